"""The demo's picture: time to the first token with and without reuse."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from report import Findings

mpl.use("Agg")  # a file, whether or not there is a display

from matplotlib import pyplot as plt  # after the choice of the backend

_WITHOUT, _REST, _RESTORE = "#9aa5b1", "#2b6cb0", "#90cdf4"
_BAR = 0.36


def draw(findings: Findings, file: Path) -> None:
    """Write a PNG: one pair of bars for each question."""
    prompts = findings.reused.prompts
    places = range(len(prompts))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    without = [one.cold_ttft_s for one in prompts]
    medians = [one.median for one in prompts]
    restore = [one.restore_s for one in medians]
    rest = [one.ttft_s - one.restore_s for one in medians]
    left, right = [at - _BAR / 2 for at in places], [at + _BAR / 2 for at in places]
    bars = axes.bar(left, without, _BAR, color=_WITHOUT, label="without reuse: compute the whole prompt")
    axes.bar_label(bars, fmt="%.2f s", padding=2)
    axes.bar(right, restore, _BAR, color=_RESTORE, label="with reuse: match, read and copy the KV")
    bars = axes.bar(right, rest, _BAR, bottom=restore, color=_REST, label="with reuse: compute the rest")
    axes.bar_label(bars, labels=[f"{one.ttft_s:.2f} s" for one in medians], padding=2)
    axes.set_xticks(
        list(places),
        [
            f"question {number}\n{one.matched_tokens} of {one.prompt_tokens} tokens reused"
            for number, one in enumerate(prompts, 1)
        ],
    )
    axes.set_ylabel("time to first token (s)")
    axes.set_ylim(0, max(without) * 1.35)
    axes.set_title("SmolLM2-135M-Instruct, fp32 on CPU: KV from kvgw in a new process", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, fontsize="small")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    plt.close(figure)
