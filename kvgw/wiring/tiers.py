"""Opening the tiers."""

from __future__ import annotations

import logging
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvgw.runtime import Clock, ThreadWorkers, Workers
from kvgw.settings import S3Settings, Settings, SettingsError
from kvgw.wiring.abilities import missing_abilities
from kvgw.wiring.secrets import read_secret
from storage.limited import LimitedTier
from storage.nvme import NvmeOptions, NvmeTier, NvmeTracer
from storage.s3 import S3Objects, S3Options, S3Tier
from storage.tier import Tier
from storage.tracing import Tracer

log = logging.getLogger("kvgw.tiers")

_NVME_OPERATIONS: Final = 16


async def open_nvme(
    stack: AsyncExitStack, settings: Settings, folder: Path, workers: Workers, clock: Clock
) -> NvmeTier | None:
    """The NVMe tier, or None when it is switched off."""
    if not settings.nvme.enabled:
        return None
    options = NvmeOptions(
        root=nvme_folder(settings, folder),
        capacity_bytes=settings.nvme.capacity_bytes,
        free_bytes_min=settings.nvme.min_free_bytes,
        owner=f"the gateway with data folder {folder}",
    )
    nvme = await NvmeTier.open(options, workers=workers, clock=clock)
    stack.push_async_callback(nvme.aclose)
    if missing := await workers.run(lambda: missing_abilities(options.root)):
        log.warning("the file system of %s has no %s: slower, and nothing else", options.root, ", no ".join(missing))
    return nvme


def nvme_folder(settings: Settings, folder: Path) -> Path:
    """Where this node's blobs are."""
    return Path(settings.nvme.dir) if settings.nvme.dir else folder / "nvme"


def tracers_of(
    settings: Settings, folder: Path, workers: Workers, nvme: NvmeTier | None, s3: S3Tier | None
) -> dict[str, Tracer]:
    """What looks through each tier from outside."""
    tracers: dict[str, Tracer] = {}
    if nvme is not None:
        tracers["nvme"] = NvmeTracer(nvme_folder(settings, folder).resolve(), workers)
    if s3 is not None:
        tracers["s3"] = s3.tracer()
    return tracers


def s3_options(settings: S3Settings) -> S3Options:
    """The S3 tier's options. Raises `SettingsError` or `TierMisconfigured`."""
    secret = read_secret(settings.secret_access_key_file) if settings.secret_access_key_file else None
    return S3Options(
        bucket=settings.bucket,
        prefix=settings.prefix,
        endpoint_url=settings.endpoint or None,
        region=settings.region,
        addressing_style=settings.addressing,
        access_key_id=settings.access_key_id or os.environ.get("AWS_ACCESS_KEY_ID"),
        secret_access_key=secret or os.environ.get("AWS_SECRET_ACCESS_KEY"),
        session_token=os.environ.get("AWS_SESSION_TOKEN"),
        instance_credentials=settings.instance_credentials,
        use_proxy=settings.use_proxy,
        ca_file=Path(settings.ca_file) if settings.ca_file else None,
        allow_http=settings.allow_http,
        request_timeout_s=settings.request_seconds,
        connections_max=settings.connections,
        checksums=settings.checksums,
    )


async def open_s3(stack: AsyncExitStack, settings: S3Settings, clock: Clock) -> S3Tier | None:
    """The S3 tier, or None when no bucket is named. Needs no connection."""
    if not settings.bucket:
        return None
    workers = ThreadWorkers(settings.connections, "kvgw-s3")
    stack.callback(workers.close)
    tier = await S3Tier.open(s3_options(settings), clock=clock, workers=workers)
    stack.push_async_callback(tier.aclose)
    return tier


def open_audit_objects(stack: AsyncExitStack, settings: Settings) -> S3Objects | None:
    """Where checkpoints of the audit log go in S3, or None without S3. Needs no connection."""
    if not settings.s3.bucket:
        return None
    objects = S3Objects(replace(s3_options(settings.s3), prefix=f"{settings.s3.prefix}audit/"))
    stack.push_async_callback(objects.aclose)
    return objects


def layered(settings: Settings, nvme: NvmeTier | None, s3: S3Tier | None) -> dict[str, Tier]:
    """The tiers by label, fastest first, each with bounded concurrency. Raises `SettingsError` when there is none."""
    tiers: dict[str, Tier] = {}
    if nvme is not None:
        tiers["nvme"] = LimitedTier(nvme, _NVME_OPERATIONS)
    if s3 is not None:
        tiers["s3"] = LimitedTier(s3, settings.s3.connections)
    if not tiers:
        raise SettingsError(
            "a gateway needs at least one tier below its staging: set nvme.enabled = true, or name s3.bucket"
        )
    if settings.defaults.durability != "staged" and settings.defaults.durability not in tiers:
        raise SettingsError(f"defaults.durability is {settings.defaults.durability}, but that tier is not configured")
    return tiers
