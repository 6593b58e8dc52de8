"""The parsers: each takes bytes and answers with its value, or raises one of its own errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from kvgw import settings, wire
from tests.kvgw.test_decoders_fuzzed import DECODERS
from tests.tenancy.test_parsers_fuzzed import PARSERS

CORPUS: Final = Path(__file__).parent / "corpus"
SETTINGS: Final = (
    b'node = "a"\n[staging]\nbytes = 67108864\n[nvme]\nenabled = false\n[s3]\nbucket = "b"\nprefix = "p/"\n'
)


@dataclass(frozen=True, slots=True)
class Target:
    parse: Callable[[bytes], Any]
    valid: tuple[bytes, ...]
    """Where the fuzzer begins, beside the corpus."""
    refusals: tuple[type[Exception], ...]

    def __call__(self, data: bytes) -> None:
        """Raises whatever is neither a value nor a refusal."""
        try:
            self.parse(data)
        except self.refusals:
            return


def _settings(data: bytes) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kvgw.toml"
        file.write_bytes(data)
        settings.load(file, {})


def _targets() -> Mapping[str, Target]:
    found = {
        name.replace(" ", "-"): Target(parse, (valid,), refusals) for name, (parse, valid, refusals) in PARSERS.items()
    }
    requests = [valid for parse, valid, _ in DECODERS.values() if parse is wire.decode_request]
    parse, _, refusals = PARSERS["request"]
    found["request"] = Target(parse, tuple(requests), refusals)
    hello, valid, refusals = DECODERS["Hello"]
    found["hello"] = Target(hello, (valid,), refusals)
    found["settings"] = Target(_settings, (SETTINGS,), (settings.SettingsError,))
    return found


TARGETS: Final = _targets()


def kept(name: str) -> list[Path]:
    """Inputs of a target that are tried in every run: what the fuzzer found to take a way of its own."""
    return sorted(path for path in (CORPUS / name).glob("*") if path.is_file())
