"""What a replay is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgw.kvformat import CHUNK_BYTES_MAX
from kvgw.replay.trace import BLOCK_TOKENS, TraceError

TENANTS_MAX: Final = 64
BYTES_PER_TOKEN: Final = 16
"""Small beside a real model's, so that an hour of traffic fits a small disk; hits do not depend on it."""
PREFILL_TOKENS_PER_S: Final = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """Checked. Raises `TraceError` naming the option that cannot be."""

    tenants: int = 4
    bytes_per_token: int = BYTES_PER_TOKEN
    speed: float = 0.0
    """Times faster than recorded; 0: each tenant's next request as soon as its last one is done."""
    nvme_bytes: int = 8 * 1024**3
    """What the gateway's NVMe tier may hold."""
    staging_bytes: int = 256 * 1024**2
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    """What an engine would compute; for the seconds saved alone."""

    def __post_init__(self) -> None:
        if not 1 <= self.tenants <= TENANTS_MAX:
            raise TraceError(f"--tenants is from 1 to {TENANTS_MAX}, not {self.tenants}")
        if not 1 <= self.bytes_per_token <= CHUNK_BYTES_MAX // BLOCK_TOKENS:
            raise TraceError(
                f"--bytes-per-token is from 1 to {CHUNK_BYTES_MAX // BLOCK_TOKENS}, not {self.bytes_per_token}"
            )
        if self.speed < 0:
            raise TraceError(f"--speed is 0 or more, not {self.speed:g}")
        if self.prefill_tokens_per_s <= 0:
            raise TraceError(f"--prefill-tokens-per-s is more than 0, not {self.prefill_tokens_per_s:g}")

    @property
    def chunk_bytes(self) -> int:
        """Length of the KV bytes of one block."""
        return self.bytes_per_token * BLOCK_TOKENS
