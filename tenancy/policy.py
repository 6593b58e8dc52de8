"""Policy: how a namespace treats its chunks, and what it may use. Data with its own checks; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tenancy.access import NAME
from tenancy.errors import RegistryRefused
from tenancy.schema.base import UNLIMITED

DAY_MS: Final = 86_400_000
READERS_MAX: Final = 38
EVERYBODY: Final = "*"

_AT_LEAST_ONE: Final = ("default_ttl_ms", "max_ttl_ms", "limit_bytes", "limit_objects", "limit_s3_bytes")
_MAY_BE_NONE: Final = ("hold_bytes", "nvme_bytes", "bytes_per_second")
_SMALL: Final = ("requests_per_second", "concurrent_requests")


@dataclass(frozen=True, slots=True)
class Policy:
    """Sizes in bytes, times in milliseconds. Where a limit is 0, the namespace has none of its own."""

    durability: str = "nvme"
    default_ttl_ms: int = DAY_MS
    max_ttl_ms: int = 30 * DAY_MS
    sliding_ttl: bool = True
    limit_bytes: int = UNLIMITED
    limit_objects: int = UNLIMITED
    limit_s3_bytes: int = UNLIMITED
    visibility: str = "private"
    readers: tuple[str, ...] = ()
    """Who may read a public namespace: ``*``, or tenants as ``name:id``. The id is what counts: a tenant of that name
    that comes later is another one. ``name:-`` stands for a name that no tenant had."""
    over_quota: str = "reject"
    """``make_room``: at 90 % the least valuable entries of the namespace itself make way."""
    hold_bytes: int = 0
    """Most bytes that entries under a hold may have together; 0: no holds."""
    nvme_bytes: int = 0
    requests_per_second: int = 0
    bytes_per_second: int = 0
    concurrent_requests: int = 0

    def __post_init__(self) -> None:
        for names, least, most in ((_AT_LEAST_ONE, 1, UNLIMITED), (_MAY_BE_NONE, 0, UNLIMITED), (_SMALL, 0, 10**6)):
            for name in names:
                value = getattr(self, name)
                if type(value) is not int or not least <= value <= most:
                    raise RegistryRefused(f"{name} must be an integer from {least} to {most}, not {value!r}")
        if self.default_ttl_ms > self.max_ttl_ms:
            raise RegistryRefused(f"default_ttl_ms {self.default_ttl_ms} is above max_ttl_ms {self.max_ttl_ms}")
        _check_choice("durability", self.durability, ("staged", "nvme", "s3"))
        _check_choice("visibility", self.visibility, ("private", "public"))
        _check_choice("over_quota", self.over_quota, ("reject", "make_room"))
        self._check_readers()

    def _check_readers(self) -> None:
        if self.readers and self.visibility != "public":
            raise RegistryRefused("readers are named, but the namespace is private: nobody else reads it")
        if self.visibility == "public" and not self.readers:
            raise RegistryRefused("a public namespace needs its readers: names of tenants, or '*' for all")
        if len(self.readers) > READERS_MAX:
            raise RegistryRefused(f"{len(self.readers)} readers are named; at most {READERS_MAX}, or '*' for all")
        for reader in self.readers:
            if reader != EVERYBODY and NAME.fullmatch(reader.partition(":")[0]) is None:
                raise RegistryRefused(f"the reader {reader!r} is neither a tenant's name nor '*'")


def may_read(readers: str, tenant: UUID) -> bool:
    """Whether a tenant is among the readers, as they are kept: separated by spaces."""
    return any(one == EVERYBODY or one.partition(":")[2] == str(tenant) for one in readers.split())


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RegistryRefused(f"{what} must be {', '.join(choices[:-1])} or {choices[-1]}, not {value!r}")
