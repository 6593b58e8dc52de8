"""The demo with vLLM: two of its servers, one after the other, share long documents through a gateway.

    python docs/demo/demo_vllm.py [--python INTERPRETER] [--json FILE]

The first server computes three prompts and is ended; the second one, a new process, is asked the same over the OpenAI
API and takes their KV from the gateway. Needs vLLM's environment, which `make demo-vllm` builds. Exit codes: 0 every
claim held · 1 one did not, or something failed · 130 interrupted.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from corpus import QUESTIONS, document
from gateway import DemoGateway, GatewayFailed
from model import ModelUnavailable, default_cache, prepare_model
from progress import LOG_COLUMNS, Progress
from rich.console import Console
from rich.table import Table
from vllm_server import PYTHON, Answer, VllmFailed, VllmServer, check_environment

ANSWER_TOKENS = 32
CHUNK_TOKENS = 256
_TTFT_SHARE_MAX = 0.5


@dataclass(frozen=True)
class Row:
    """One question, asked of both servers."""

    question: str
    first: Answer
    second: Answer
    reused_tokens: int
    """Tokens of the second server's prompt that vLLM counts as taken from outside."""

    @property
    def whole_chunks(self) -> int:
        """Tokens of the prompt that can be reused: its whole chunks, without its last token."""
        return (self.first.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS


def contents() -> list[str]:
    """What a user says, once for each question: three documents that differ from the first line on."""
    text = document()
    return [f"Edition {number} of the document.\n{text}\n\n{one}" for number, one in enumerate(QUESTIONS, 1)]


def run_all(python: Path, model: Path, scratch: Path, progress: Progress) -> list[Row]:
    """Everything between an empty folder and the rows."""
    cache = default_cache()
    progress.stage("gateway: starts on an empty data folder")
    with DemoGateway(scratch / "data", scratch / "gateway.log") as gateway:

        def server(name: str) -> VllmServer:
            progress.stage(f"{name} server: starts")
            return VllmServer(python, model, gateway.endpoint, cache, scratch / f"{name}.log")

        with server("first") as one:
            firsts = []
            for number, content in enumerate(contents(), 1):
                progress.stage(f"first server: question {number}")
                firsts.append(one.ask(content, ANSWER_TOKENS))
            progress.stage("first server: ends")
            if not one.stored(sum(answer.prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS for answer in firsts)):
                raise VllmFailed("the first server did not store its prompts within a minute")
        with server("second") as two:
            rows = []
            for number, (content, first) in enumerate(zip(contents(), firsts, strict=True), 1):
                progress.stage(f"second server: question {number}")
                before = two.metric("vllm:external_prefix_cache_hits_total")
                second = two.ask(content, ANSWER_TOKENS)
                reused = two.metric("vllm:external_prefix_cache_hits_total") - before
                rows.append(Row(QUESTIONS[number - 1], first, second, reused))
            progress.stage("second server: ends")
    return rows


def medians(rows: list[Row]) -> tuple[float, float]:
    """Time to the first token of the first and of the second server, in seconds."""
    return statistics.median(row.first.ttft_s for row in rows), statistics.median(row.second.ttft_s for row in rows)


def claims(rows: list[Row]) -> dict[str, bool]:
    """What the demo says, and whether it held."""
    first, second = medians(rows)
    return {
        "the second server computes none of a prompt's whole chunks": all(
            row.reused_tokens == row.whole_chunks >= 4 * CHUNK_TOKENS for row in rows
        ),
        "both servers give the same text": all(row.first.text == row.second.text for row in rows),
        "the time to the first token is at most half": second <= first * _TTFT_SHARE_MAX,
    }


def show(console: Console, rows: list[Row]) -> None:
    """Print the table, the answers and the claims."""
    table = Table(
        title="SmolLM2-135M-Instruct in vLLM on this CPU, fp32",
        title_justify="left",
        header_style="bold",
    )
    for column in ("question", "prompt", "reused", "TTFT first", "TTFT second", "same text"):
        table.add_column(column, justify="left" if column in ("question", "same text") else "right")
    for number, row in enumerate(rows, 1):
        times = f"{row.first.ttft_s:.2f} s", f"{row.second.ttft_s:.2f} s"
        same = "yes" if row.first.text == row.second.text else "[bold red]NO[/]"
        table.add_row(str(number), str(row.first.prompt_tokens), str(row.reused_tokens), *times, same)
    first, second = medians(rows)
    table.add_section()
    table.add_row("median", "", "", f"[bold]{first:.2f} s[/]", f"[bold]{second:.2f} s[/]", "")
    table.caption = "Prompt and reused: tokens. TTFT: time to the first token of the stream."
    console.print(table)
    for row in rows:
        console.print(f"  [bold]{row.question}[/]\n  {row.second.text.strip()} …", highlight=False)
    for text, held in claims(rows).items():
        console.print(f"{'[green]held[/]  ' if held else '[bold red]FAILED[/]'}  {text}", highlight=False)


def as_json(rows: list[Row]) -> bytes:
    """Everything that was measured and claimed, as one document."""
    held = claims(rows)
    document = {"held": all(held.values()), "claims": held, "rows": rows}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(description="Two vLLM servers share long documents through kvgw.")
    parser.add_argument("--python", type=Path, default=PYTHON, help="the interpreter of an environment with vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    options = parser.parse_args()
    # The end by SIGTERM takes the same way out as Ctrl-C, through every `with` block.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console(width=None if sys.stdout.isatty() else LOG_COLUMNS)
    progress = Progress(console)
    try:
        check_environment(options.python)
        progress.stage("model: SmolLM2-135M-Instruct")
        model = prepare_model(default_cache())
        with tempfile.TemporaryDirectory(prefix="kvgw-demo-") as scratch:
            rows = run_all(options.python, model, Path(scratch), progress)
    except (GatewayFailed, ModelUnavailable, VllmFailed) as error:
        console.print(f"[bold red]demo:[/] {error}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; gateway, servers and temporary files are gone")
        return 130
    show(console, rows)
    if options.json is not None:
        options.json.write_bytes(as_json(rows))
    return 0 if all(claims(rows).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
