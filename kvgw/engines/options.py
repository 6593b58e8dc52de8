"""What an operator sets for an adapter, from the mapping that the engine passes on. Unknown names are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from kvgw.engines.breakeven import BreakEven
from kvgw.engines.tenants import Credential, TenantMap, read_tenants
from kvgw.errors import FormatError

Seconds = Annotated[float, Meta(gt=0, le=240)]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every adapter. Deadlines in seconds, for a whole operation; sizes in bytes."""

    endpoint: str | list[str]
    """``unix:/path``, ``tls:host:port`` or ``tcp:host:port``; several gateways of one catalog as a list."""
    ca_file: str | None = None
    token_file: str | None = None
    """The engine's own credential; see `tenants_file` for others."""
    namespace: str = ""
    tenants_file: str | None = None
    model: str | None = None
    """The model's name, the same on every machine; None: as the engine was given it, without the folders above."""
    weights: str | None = None
    """An immutable revision that stands in for a digest of the weights; None: the revision or files are looked at."""
    tokenizer: str | None = None
    tokens_per_chunk: Annotated[int, Meta(ge=1, le=65_536)] = 256
    store: bool = True
    """False: read only."""
    lookup_deadline_s: Seconds = 0.5
    wait_deadline_s: Annotated[float, Meta(ge=0, le=240)] = 0.0
    """How much longer a request of an engine that only reads waits for chunks that are not there yet; 0: not at all."""
    load_deadline_s: Seconds = 10.0
    store_deadline_s: Seconds = 30.0
    lease_s: Annotated[float, Meta(ge=0, le=60)] = 30.0
    """How long a matched run is shielded from eviction, and how long the answer of a lookup is believed."""
    store_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024 * 1024
    """Host memory for chunks on their way out, of each worker. What does not fit is not stored."""
    load_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024 * 1024
    """Host memory for chunks on their way in, of each worker. What does not fit waits."""
    break_even: bool = True
    """Decline what would be loaded slower than it is computed."""
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)] | None = None
    """How fast the engine computes prompts; None: as measured, where the adapter can see it."""
    shared_memory: bool = False
    """Move chunks through memory that a gateway at ``unix:`` lends, as far as it does."""
    digest_dir: str | None = None
    """Where digests of model files are remembered; None: ``kvgw/digests`` in the user's cache folder."""

    @property
    def endpoints(self) -> list[str]:
        return [self.endpoint] if isinstance(self.endpoint, str) else self.endpoint

    def guard(self) -> BreakEven:
        """A new judge of whether hits pay."""
        return BreakEven(on=self.break_even, prefill_tokens_per_s=self.prefill_tokens_per_s)

    def tenants(self) -> TenantMap:
        """Whose a request is. Raises `FormatError` for a map that cannot be read."""
        own = Credential(self.token_file, self.namespace)
        return TenantMap(own) if self.tenants_file is None else read_tenants(self.tenants_file, own)


def parse_options(given: Mapping[str, object]) -> EngineOptions:
    """Read the adapter's settings. Raises `FormatError` naming the setting that is unknown, missing or out of range."""
    try:
        return msgspec.convert(given, EngineOptions)
    except msgspec.ValidationError as error:
        raise FormatError(f"the settings of kvgw are not right: {error}") from error
