"""The backend's settings, from the extra config that SGLang passes on beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvgw.engines.options import EngineOptions
from kvgw.errors import FormatError

SGLANGS_OWN: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""What SGLang's loader reads and leaves in the mapping."""

NOT_HERE: Final = frozenset({"tenants_file", "tokens_per_chunk", "digest_dir", "wait_deadline_s"})
"""Settings of other adapters: a backend is told no request, and its chunk is a page."""


class SglangOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What SGLang's operator sets."""

    compatibility: str
    """Everything else that makes other bytes of the same weights and tokens: what only the command line says."""
    kv_dtype: str | None = None
    """Element type of the cache, where the host pool only says that it has bytes: ``fp8_e4m3`` or ``fp8_e5m2``."""
    interface_v1: bool = False


def parse_sglang_options(extra_config: Mapping[str, object] | None) -> SglangOptions:
    """Read the settings. Raises `FormatError` naming the one that is unknown, missing or out of range."""
    given = dict(extra_config or {})
    wrong = NOT_HERE & given.keys()
    if wrong:
        raise FormatError(f"kvgw's SGLang backend has no setting {', '.join(sorted(wrong))}")
    given["interface_v1"] = bool(given.get("interface_v1", False))
    mine = {name: value for name, value in given.items() if name not in SGLANGS_OWN or name == "interface_v1"}
    try:
        options = msgspec.convert(mine, SglangOptions)
    except msgspec.ValidationError as error:
        raise FormatError(f"the settings of kvgw are not right: {error}") from error
    for name in ("weights", "tokenizer", "compatibility"):
        if not getattr(options, name):
            raise FormatError(
                f"kvgw needs {name!r} in the extra config: SGLang does not tell a storage backend, and servers that "
                "differ in it must not share pages"
            )
    return options
