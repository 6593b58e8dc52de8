"""The tier's settings, from the entry of ``secondary_tiers`` that vLLM hands on as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvgw.engines.options import EngineOptions
from kvgw.engines.tenants import SALT, TenantMap
from kvgw.errors import FormatError

NOT_HERE: Final = frozenset({"tokens_per_chunk", "wait_deadline_s"})
"""Settings of other adapters: the tier's chunk is the one of vLLM's primary tier, and vLLM's requests do not wait."""

_GIB: Final = 1024**3


class TierOptions(EngineOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator of a vLLM with tiered offloading sets."""

    compatibility: str
    """Everything else that makes other bytes of the same weights and tokens: vLLM does not tell a tier."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """vLLM's own: what a request's ``kv_load_tiers`` is compared with."""
    store_bytes: Annotated[int, Meta(ge=1)] = 4 * _GIB
    """Chunks of the primary tier that wait to be stored, in bytes. What is beyond fails at once."""
    load_bytes: Annotated[int, Meta(ge=1)] = 4 * _GIB
    """Chunks of the primary tier that wait to be loaded, in bytes. What is beyond fails at once."""


def parse_tier_options(given: Mapping[str, object]) -> tuple[TierOptions, TenantMap]:
    """Read settings and tenants. Raises `FormatError` naming what is unknown, missing or out of range."""
    wrong = NOT_HERE & given.keys()
    if wrong:
        raise FormatError(
            f"kvgw's tier has no setting {', '.join(sorted(wrong))}; the size of chunks is 'block_size' in "
            "kv_connector_extra_config"
        )
    try:
        options = msgspec.convert(given, TierOptions)
    except msgspec.ValidationError as error:
        raise FormatError(f"the settings of kvgw's tier are not right: {error}") from error
    if not options.compatibility:
        raise FormatError(
            "kvgw's tier needs 'compatibility': vLLM does not tell a tier its GPU, attention backend, overrides and so "
            "on, and engines that differ in them must not share chunks"
        )
    tenants = options.tenants()
    if options.tenants_file is not None and tenants.by == SALT:
        raise FormatError(
            f"'by' in {options.tenants_file} must be 'kv_transfer_params.<name>': vLLM tells a tier no cache_salt (it "
            "is in the keys of chunks, so that salts are apart without it)"
        )
    if tenants.public or any(one.publishes for one in tenants.tenants.values()):
        raise FormatError(f"{options.tenants_file} names public namespaces, and chunks of a tier are kept in none")
    return options, tenants
