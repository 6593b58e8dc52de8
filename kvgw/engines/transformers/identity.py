"""Which model this is: its name, and digests of its weights and tokenizer, from files or from memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvgw.canonical import length_prefixed
from kvgw.engines.identity import TOKENIZER, WEIGHTS, folder_digest
from kvgw.errors import FormatError

_TOKENIZER_RUN_STATE: Final = ("padding", "truncation")
"""Parts of a fast tokenizer's JSON that calls of the tokenizer change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Two processes whose identities are equal hold the same weights. KV is never reused where they differ.

    An immutable revision may stand in for either digest: ``ModelIdentity(name=…, weights="<commit>", …)``. A branch
    name must not. An adapter (LoRA) that is active in the model needs its name and the digest of its content.
    """

    name: str
    """The model's name as operators know it; the same on every machine, so not a path."""
    weights: str | bytes
    tokenizer: str | bytes
    adapter: str | None = None
    adapter_digest: bytes | None = None

    @classmethod
    def of_folder(cls, name: str, folder: Path, *, cache_dir: Path | None = None) -> ModelIdentity:
        """The identity of the model that `folder` holds and that was loaded from there unchanged.

        Digests of files are remembered by path, size and modification time in small files in `cache_dir`, which must
        not be `folder`; None: every file is read each time. Raises `FormatError` where there are no weights or no
        tokenizer.
        """
        if cache_dir is not None and cache_dir.resolve() == folder.resolve():
            raise FormatError(f"cache_dir {cache_dir} is the model's own folder, which is never written to")
        weights, tokenizer = (folder_digest(folder, patterns, cache_dir) for patterns in (WEIGHTS, TOKENIZER))
        return cls(name=name, weights=weights, tokenizer=tokenizer)

    @classmethod
    def of_memory(cls, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelIdentity:
        """The identity of a model as it is in memory: reads every weight once."""
        return cls(name=name, weights=state_digest(model), tokenizer=tokenizer_digest(tokenizer))


def state_digest(model: PreTrainedModel) -> bytes:
    """Digest (32 bytes) of names, types, shapes and bytes of the model's state."""
    hasher = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(model.state_dict().items()):
        shape = ",".join(map(str, tensor.shape))
        hasher.update(length_prefixed(name.encode(), str(tensor.dtype).encode(), shape.encode()))
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        hasher.update(memoryview(flat.numpy()))
    return hasher.digest()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Digest (32 bytes) of what a tokenizer makes of text."""
    if tokenizer.is_fast:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        for part in _TOKENIZER_RUN_STATE:
            rules.pop(part, None)
    else:
        # A slow tokenizer's rules are its Python class; only its tables can be hashed.
        rules = {"class": type(tokenizer).__qualname__, "vocabulary": tokenizer.get_vocab()}
    return blake3(json.dumps(rules, sort_keys=True).encode()).digest()
