"""Which model this is: its name, and digests of its weights and tokenizer, from files or from memory."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvgw.canonical import length_prefixed
from kvgw.errors import FormatError

_WEIGHT_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_TOKENIZER_PATTERNS: Final = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "tekken.json", "*_tokens*.json")
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

        Digests of files are remembered in this process by path, size and modification time, and beyond it in small
        files in `cache_dir`, which must not be `folder`. Raises `FormatError` where there are no weights or tokenizer.
        """
        if cache_dir is not None and cache_dir.resolve() == folder.resolve():
            raise FormatError(f"cache_dir {cache_dir} is the model's own folder, which is never written to")
        weights = _matching(folder, _WEIGHT_PATTERNS)
        tokenizer = _matching(folder, _TOKENIZER_PATTERNS)
        for what, files, patterns in (
            ("weights", weights, _WEIGHT_PATTERNS),
            ("tokenizer", tokenizer, _TOKENIZER_PATTERNS),
        ):
            if not files:
                raise FormatError(f"{folder} holds no {what}: no file there matches {' '.join(patterns)}")
        return cls(name=name, weights=_files(weights, cache_dir), tokenizer=_files(tokenizer, cache_dir))

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


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _files(paths: Iterable[Path], cache_dir: Path | None) -> bytes:
    hasher = blake3()
    for path in paths:
        real = path.resolve(strict=True)
        state = real.stat()
        digest = _file_digest(real, state.st_size, state.st_mtime_ns, cache_dir)
        hasher.update(length_prefixed(path.name.encode(), digest))
    return hasher.digest()


@lru_cache(maxsize=4096)
def _file_digest(path: Path, size: int, mtime_ns: int, cache_dir: Path | None) -> bytes:
    """Digest of a file in the state that size and time name."""
    if cache_dir is None:
        return _read_digest(path, size, mtime_ns)
    state = length_prefixed(os.fsencode(path), str(size).encode(), str(mtime_ns).encode())
    entry = cache_dir / f"{blake3(state).hexdigest()}.blake3"
    if entry.is_file():
        known = entry.read_bytes()
        if len(known) == blake3.digest_size:
            return known
    digest = _read_digest(path, size, mtime_ns)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache_dir, prefix=".part-", delete=False) as part:
        part.write(digest)
    os.replace(part.name, entry)
    return digest


def _read_digest(path: Path, size: int, mtime_ns: int) -> bytes:
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    state = path.stat()
    if (state.st_size, state.st_mtime_ns) != (size, mtime_ns):
        raise FormatError(f"{path} changed while it was read; load and identify the model when its files are complete")
    return digest
