"""The first start: a tenant, its namespace and its token."""

from __future__ import annotations

import contextlib
from typing import Final
from uuid import UUID

from kvgw.authenticate import token_row
from kvgw.gateway.limiter import Allowance
from kvgw.gateway.outbox import OutboxLimits
from kvgw.maintenance.crew import Pace
from kvgw.runtime import Rng, Workers, usable_cpus
from kvgw.settings import (
    CatalogSettings,
    DefaultSettings,
    LimitSettings,
    MaintenanceSettings,
    Settings,
    WriteBackSettings,
)
from storage.lending import Lending, LendingLimits
from tenancy.access import DATA_PERMISSIONS, DEFAULT_NAMESPACE, Permission, new_token
from tenancy.catalog import Catalog
from tenancy.errors import KeyGone, KeyUnavailable, RegistryRefused
from tenancy.keys.keyring import Keyring
from tenancy.keys.secret import SecretBytes
from tenancy.policy import Policy
from tenancy.provision import create_namespace

FIRST_TENANT: Final = "default"
FIRST_TOKEN_DAYS: Final = 365
FIRST_PERMISSIONS: Final = DATA_PERMISSIONS | {Permission.ADMIN, Permission.METRICS}

_DAY_MS: Final = 86_400_000


async def first_start(
    catalog: Catalog, keyring: Keyring, rng: Rng, now_ms: int, pepper: SecretBytes, policy: Policy
) -> tuple[UUID, str | None]:
    """Make sure that there is a first tenant with its namespace and token; the token's text if it was made now."""
    known = await catalog.tenant(FIRST_TENANT)
    if known is None:
        tenant = UUID(bytes=rng.token(16), version=4)
        try:
            await catalog.create_tenant(tenant, FIRST_TENANT, now_ms)
        except RegistryRefused:  # another gateway of this catalog was first
            known = await catalog.tenant(FIRST_TENANT)
        else:
            await _first_namespace(catalog, keyring, rng, now_ms, tenant, policy)
            token = new_token(rng.token)
            row = token_row(token, pepper.reveal(), tenant, FIRST_PERMISSIONS, "*", now_ms + FIRST_TOKEN_DAYS * _DAY_MS)
            await catalog.add_token(row, now_ms)
            return tenant, token.text
    assert known is not None
    namespace = await catalog.namespace(known, DEFAULT_NAMESPACE)
    if namespace is None:
        await _first_namespace(catalog, keyring, rng, now_ms, known, policy)
    else:
        # The keys of another gateway stop the start, instead of failing every request after it.
        with contextlib.suppress(KeyUnavailable, KeyGone):
            await keyring.keys(namespace.scope)
    return known, None


async def _first_namespace(
    catalog: Catalog, keyring: Keyring, rng: Rng, now_ms: int, tenant: UUID, policy: Policy
) -> None:
    """Make the namespace, unless another gateway that starts too has made it in this moment."""
    try:
        await create_namespace(catalog, keyring, rng.token, now_ms, tenant, DEFAULT_NAMESPACE, policy)
    except RegistryRefused:
        if await catalog.namespace(tenant, DEFAULT_NAMESPACE) is None:
            raise


def policy_of(defaults: DefaultSettings) -> Policy:
    """The policy of namespaces for which nothing else was said."""
    return Policy(
        durability=defaults.durability,
        default_ttl_ms=defaults.ttl_seconds * 1000,
        max_ttl_ms=defaults.max_ttl_seconds * 1000,
    )


def allowance_of(limits: LimitSettings) -> Allowance:
    """What each tenant may ask for."""
    return Allowance(limits.requests_per_second, limits.bytes_per_second, limits.concurrent_requests)


def places_of(catalog: CatalogSettings) -> int:
    """How many requests work at once: one for each processor, and one for each transaction that waits for a server."""
    return usable_cpus() + (catalog.pool if catalog.url else 0)


def pace_of(maintenance: MaintenanceSettings) -> Pace:
    """How often each maintenance job runs."""
    return Pace(
        outbox=maintenance.outbox_seconds,
        sweep=maintenance.sweep_seconds,
        evict=maintenance.evict_seconds,
        orphans=maintenance.orphans_seconds,
        heartbeat=maintenance.heartbeat_seconds,
        reach=maintenance.reach_seconds,
        nvme_orphan_grace=maintenance.nvme_orphan_grace_seconds,
        s3_orphan_grace=maintenance.s3_orphan_grace_seconds,
    )


def lending_of(settings: Settings, workers: Workers) -> Lending:
    """Who lends windows to clients of this host, one for each connection at most."""
    shared = settings.shared_memory
    limits = LendingLimits(
        total_bytes=shared.bytes,
        tenant_bytes=shared.tenant_bytes,
        connection_bytes=shared.connection_bytes,
    )
    return Lending(limits, workers, windows_max=settings.server.connections)


def outbox_limits_of(write_back: WriteBackSettings) -> OutboxLimits:
    """How far behind write-back may be."""
    return OutboxLimits(bytes_max=write_back.outbox_bytes, seconds_max=write_back.outbox_seconds)


def rates_of(write_back: WriteBackSettings) -> dict[str, int]:
    """Bytes per second that write-back may write, by tier; 0: no limit."""
    return {"nvme": write_back.nvme_bytes_per_second, "s3": write_back.s3_bytes_per_second}
