"""Digests of model files, so that KV is never reused where weights, tokenizer or adapter differ.

The digest of a file is remembered by path, size and modification time, in small files in a folder of digests: large
models are read once per machine, not once per start.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

from kvgw.canonical import length_prefixed
from kvgw.errors import FormatError

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZER: Final = ("tokenizer*", "*vocab*", "merges.txt", "*.model", "tekken.json", "*_tokens*.json")
MEDIA: Final = ("*processor*.json", "config.json", "params.json")
"""What makes a model's input from images and sounds."""
ADAPTER: Final = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")


def default_digest_dir() -> Path:
    """``kvgw/digests`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgw" / "digests"


def folder_digest(folder: Path, patterns: Sequence[str], digest_dir: Path | None) -> bytes:
    """Digest (32 bytes) of the names and contents of the files of `folder` that match a pattern.

    `digest_dir`: where digests of files are remembered; None: nowhere. Raises `FormatError` where no file matches.
    """
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    if not files:
        raise FormatError(f"{folder} holds no file that matches {' '.join(patterns)}")
    hasher = blake3()
    for path in files:
        hasher.update(length_prefixed(path.name.encode(), _file_digest(path.resolve(strict=True), digest_dir)))
    return hasher.digest()


def _file_digest(path: Path, digest_dir: Path | None) -> bytes:
    state = path.stat()
    if digest_dir is None:
        return _read_digest(path, state)
    name = length_prefixed(os.fsencode(path), str(state.st_size).encode(), str(state.st_mtime_ns).encode())
    entry = digest_dir / f"{blake3(name).hexdigest()}.blake3"
    if entry.is_file():
        known = entry.read_bytes()
        if len(known) == blake3.digest_size:
            return known
    digest = _read_digest(path, state)
    digest_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=digest_dir, prefix=".part-", delete=False) as part:
        part.write(digest)
    os.replace(part.name, entry)
    return digest


def _read_digest(path: Path, before: os.stat_result) -> bytes:
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise FormatError(f"{path} changed while it was read; start the engine when its files are complete")
    return digest
