"""Runs every attack on kvgw and on the stores that can run here, and prints what became of each side by side.

    python -m tests.attacks                          all that are installed
    python -m tests.attacks --only kvgw              one of them
    python -m tests.attacks --page docs/attacks.md   and puts the table into the page

Exit code 1 if kvgw is not safe from one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.attacks.gateway import KvgwSubject
from tests.attacks.peers import PEERS
from tests.attacks.subject import Subject
from tests.attacks.trials import TRIALS, Verdict, tried
from tests.bench_peers.environments import PeerAbsent

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- what it printed -->", "<!-- end of what it printed -->"


async def verdicts(store: Subject) -> dict[str, Verdict]:
    try:
        return await tried(store)
    finally:
        await store.aclose()


async def everything(only: str, folder: Path) -> tuple[list[tuple[Subject, dict[str, Verdict]]], list[str]]:
    """Stores with their verdicts, and a sentence for each store that cannot run here."""
    found: list[tuple[Subject, dict[str, Verdict]]] = []
    missing: list[str] = []
    if only.lower() in "kvgw":
        print("kvgw …", file=sys.stderr)
        gateway = await KvgwSubject.started(folder / "kvgw")
        found.append((gateway, await verdicts(gateway)))
    for number, kind in enumerate(PEERS):
        if only.lower() not in kind.title.lower():
            continue
        print(f"{kind.title} …", file=sys.stderr)
        try:
            peer = await kind.started(folder / f"peer-{number}")
            found.append((peer, await verdicts(peer)))
        except PeerAbsent as why:
            missing.append(f"{kind.title} was left out: {why}.")
    return found, missing


def table(found: Sequence[tuple[Subject, dict[str, Verdict]]], missing: Sequence[str]) -> str:
    """The report, in Markdown."""
    lines = [
        "| attack | " + " | ".join(store.name for store, _ in found) + " |",
        "|---" * (len(found) + 1) + "|",
        *("| " + " | ".join([name, *(each[name].short for _, each in found)]) + " |" for name in TRIALS),
        "",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}.",
    ]
    for store, each in found:
        title = store.name if store.version.startswith(store.name) else f"{store.name} ({store.version})"
        lines += ["", f"**{title}**", ""]
        lines += [f"- {name}: {verdict.short}: {verdict.evidence}" for name, verdict in each.items()]
    return "\n".join([*lines, *([""] if missing else []), *missing])


def put_into(page: str, report: str) -> str:
    """The page with the report between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{report}\n\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="stores whose name has this in it")
    parser.add_argument("--page", type=Path, help="put the report between this page's marks")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvgw-attacks-") as folder:
        found, missing = asyncio.run(everything(chosen.only, Path(folder)))
    report = table(found, missing)
    print(report)
    if chosen.page is not None:
        chosen.page.write_text(put_into(chosen.page.read_text(encoding="utf-8"), report), encoding="utf-8")
    own = [verdict for store, each in found if store.name == "kvgw" for verdict in each.values()]
    return int(any(verdict.word != "safe" for verdict in own))


if __name__ == "__main__":
    sys.exit(main())
