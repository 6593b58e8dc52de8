"""The adapter's settings, from the ``adapter_params`` that LMCache passes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvgw.engines.options import EngineOptions
from kvgw.engines.tenants import SALT, TenantMap
from kvgw.errors import FormatError

NOT_HERE: Final = frozenset(
    {"model", "weights", "tokenizer", "digest_dir", "load_bytes", "store_bytes", "wait_deadline_s"}
)
"""Settings of other adapters: what a model is stands in `models`, memory for chunks is LMCache's own."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What LMCache does not tell about a model: what must be equal before its KV may be reused."""

    weights: str
    """An immutable revision or a digest."""
    tokenizer: str
    compatibility: str
    """The engine and everything on its command line that makes other bytes: version, backend, type of the cache, …"""


class LmcacheOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator of an LMCache server sets."""

    models: dict[str, ModelIdentity]
    """By the name under which the engine gives its model to LMCache. Chunks of other models are not kept."""


def parse_lmcache_options(params: Mapping[str, object]) -> tuple[LmcacheOptions, TenantMap]:
    """Read settings and tenants. Raises `FormatError` naming what is unknown, missing or out of range."""
    wrong = NOT_HERE & params.keys()
    if wrong:
        raise FormatError(
            f"kvgw's LMCache adapter has no setting {', '.join(sorted(wrong))}: a server keeps chunks of several "
            "models ('models' says what each is), in memory of its own"
        )
    try:
        options = msgspec.convert(params, LmcacheOptions)
    except msgspec.ValidationError as error:
        raise FormatError(f"the settings of kvgw are not right: {error}") from error
    empty = [name for name, one in options.models.items() if not (one.weights and one.tokenizer and one.compatibility)]
    if not options.models or empty:
        raise FormatError(f"'models' must name weights, tokenizer and compatibility of every model, not of {empty}")
    tenants = options.tenants()
    if tenants.by != SALT:
        raise FormatError(f"'by' in {options.tenants_file} must be {SALT!r}: LMCache passes on nothing else")
    if tenants.public or any(one.publishes for one in tenants.tenants.values()):
        raise FormatError(f"{options.tenants_file} names public namespaces, and chunks of LMCache are kept in none")
    return options, tenants
