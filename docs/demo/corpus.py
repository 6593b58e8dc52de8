"""What the demo asks: three questions about one long, real document, the first sections of this project's licence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTIONS = (
    "What does the document mean by a Contributor?",
    "Which rights does the patent license grant?",
    "What must be included when a copy of the work is redistributed?",
)

_LICENCE = Path(__file__).resolve().parents[2] / "LICENSE"
_NEXT_SECTION = "   5. Submission of Contributions."


def document() -> str:
    """Sections 1 to 4 of the Apache License 2.0: about 1,400 tokens."""
    text, found, _ = _LICENCE.read_text(encoding="utf-8").partition(_NEXT_SECTION)
    if not found:
        raise ValueError(f"{_LICENCE} has no line {_NEXT_SECTION.strip()!r}: it is not the licence that is expected")
    return text


def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of one prompt for each question. They share the document, which comes first."""
    text = document()
    return [prompt_ids(tokenizer, f"{text}\n\n{question}") for question in QUESTIONS]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    """Token ids of `content` as what a user says."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(chat, add_special_tokens=False).input_ids
    return ids
