"""Examination of a set-up for ``kvgw doctor``: looks at everything, changes nothing, says what to do."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from enum import StrEnum
from pathlib import Path
from typing import Final

from msgspec import Struct

from kvgw.cli.output import human_bytes
from kvgw.datadir import check_folder, holder
from kvgw.dial import UNIX_SEND_BYTES
from kvgw.errors import KvgwError
from kvgw.runtime import SystemClock, SystemRng, ThreadWorkers
from kvgw.settings import Settings
from kvgw.wiring.abilities import missing_abilities
from kvgw.wiring.catalog import open_to_read
from kvgw.wiring.keys import open_root
from kvgw.wiring.tiers import s3_options
from storage.errors import StorageError
from storage.s3 import S3Capabilities, S3Tier
from tenancy import migrate
from tenancy.errors import TenancyError
from tenancy.keys.rootkey import FileRootKey

_BUFFER_LIMIT: Final = Path("/proc/sys/net/core/wmem_max")
_PROXIES: Final = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})


class Verdict(StrEnum):
    """How a finding is."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


class Finding(Struct, frozen=True):
    """One thing that was looked at; `remedy` is empty when there is nothing to do."""

    subject: str
    verdict: Verdict
    what: str
    remedy: str = ""


async def examine(settings: Settings, folder: Path) -> list[Finding]:
    """All findings about a gateway with these settings on this data folder."""
    findings = [_guarded("data folder", lambda: _data_folder(folder))]
    if settings.catalog.url:
        findings.append(await _postgres(settings, folder))
    elif findings[0].verdict is Verdict.GOOD:
        findings.append(_guarded("catalog", lambda: _catalog(settings, folder)))
    if findings[0].verdict is Verdict.GOOD:
        findings.append(await _root_key(settings, folder))
    findings.append(_guarded("disk", lambda: _disk(settings, folder)))
    findings.append(_memory(settings))
    findings += _buffers()
    findings += _proxies(settings)
    findings += await _s3(settings)
    return findings


def _guarded(subject: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except (KvgwError, StorageError, TenancyError, OSError, sqlite3.Error) as error:
        return Finding(subject, Verdict.BAD, str(error), "see the sentence on the left")


def _data_folder(folder: Path) -> Finding:
    if not folder.exists():
        return Finding("data folder", Verdict.NOTE, f"{folder} does not exist yet", "kvgw serve makes it")
    check_folder(folder)
    owner = holder(folder)
    state = f"in use by {owner}" if owner else "no gateway runs on it"
    return Finding("data folder", Verdict.GOOD, f"private; {state}")


async def _postgres(settings: Settings, folder: Path) -> Finding:
    try:
        async with AsyncExitStack() as stack:
            database = await open_to_read(stack, settings.catalog, folder)
            revision = await database.read(migrate.check_known)
    except (KvgwError, TenancyError) as error:
        return Finding("catalog", Verdict.BAD, str(error), "see the sentence on the left")
    return Finding("catalog", Verdict.GOOD, f"PostgreSQL answers as an ordinary role; revision {revision}, the newest")


def _catalog(settings: Settings, folder: Path) -> Finding:
    file = Path(settings.catalog.file) if settings.catalog.file else folder / "catalog.db"
    if not file.exists():
        return Finding("catalog", Verdict.NOTE, "none yet", "kvgw serve makes it")
    # Read-only and without SQLAlchemy, so that a running gateway's one connection stays the only one that writes.
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    revision = row[0] if row else None
    newest = migrate.newest_revision()
    if revision == newest:
        return Finding("catalog", Verdict.GOOD, f"revision {revision}, the newest")
    if revision in migrate.known_revisions():
        return Finding("catalog", Verdict.NOTE, f"revision {revision}, this release has {newest}", "run kvgw migrate")
    return Finding(
        "catalog",
        Verdict.BAD,
        f"revision {revision} is not known to this release (newest {newest})",
        "run a newer kvgw",
    )


async def _root_key(settings: Settings, folder: Path) -> Finding:
    if settings.keys.provider != "file":
        return await _root_key_elsewhere(settings, folder)
    keys = Path(settings.keys.dir) if settings.keys.dir else folder / "keys"
    if not keys.exists() and not (folder / "catalog.db").exists():
        return Finding("root key", Verdict.NOTE, "none yet", "kvgw serve makes it")
    workers = ThreadWorkers(1)
    try:
        root = await FileRootKey.open(keys, workers, SystemRng().token)
    except TenancyError as error:
        return Finding("root key", Verdict.BAD, str(error), "see the sentence on the left")
    finally:
        workers.close()
    return Finding("root key", Verdict.GOOD, f"key id {root.key_id}; keep a copy of {keys} apart from the data")


async def _root_key_elsewhere(settings: Settings, folder: Path) -> Finding:
    async with AsyncExitStack() as stack:
        workers = ThreadWorkers(1)
        stack.callback(workers.close)
        try:
            root = await open_root(stack, settings, folder, workers, SystemRng())
        except (KvgwError, TenancyError) as error:
            return Finding("root key", Verdict.BAD, str(error), "see the sentence on the left")
        return Finding("root key", Verdict.GOOD, f"{root.key_id}, kept by {root.provider}")


def _disk(settings: Settings, folder: Path) -> Finding:
    if not settings.nvme.enabled:
        return Finding("disk", Verdict.GOOD, "the NVMe tier is off")
    root = Path(settings.nvme.dir) if settings.nvme.dir else folder / "nvme"
    existing = next(one for one in (root, *root.parents) if one.exists())
    free = shutil.disk_usage(existing).free
    used = sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) if root.exists() else 0
    if used + free < settings.nvme.capacity_bytes:
        return Finding(
            "disk",
            Verdict.NOTE,
            f"nvme.capacity_bytes is {human_bytes(settings.nvme.capacity_bytes)}, but {existing} has room for "
            f"{human_bytes(used + free)}",
            "lower nvme.capacity_bytes, or use a larger disk; until then the disk's own free space is the limit",
        )
    if missing := missing_abilities(existing):
        what = f"{human_bytes(free)} free for blobs at {existing}, whose file system has no {', no '.join(missing)}"
        return Finding("disk", Verdict.NOTE, what, "everything works, more slowly; ext4 and XFS have all of it")
    return Finding("disk", Verdict.GOOD, f"{human_bytes(free)} free for blobs at {existing}")


def _memory(settings: Settings) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = settings.staging.bytes
    if soft != resource.RLIM_INFINITY and soft < size and not _may_lock():
        return Finding(
            "memory",
            Verdict.NOTE,
            f"only {human_bytes(soft)} may be locked, staging has {human_bytes(size)}: plaintext may reach swap",
            "raise RLIMIT_MEMLOCK (LimitMEMLOCK= in systemd, --ulimit memlock= in Docker), or switch swap off",
        )
    return Finding("memory", Verdict.GOOD, f"staging of {human_bytes(size)} can be locked into RAM")


def _may_lock() -> bool:
    """Whether this process may lock memory beyond its limit (CAP_IPC_LOCK, bit 14)."""
    with open("/proc/self/status", encoding="ascii") as file:
        effective = next(line.split()[1] for line in file if line.startswith("CapEff:"))
    return bool(int(effective, 16) >> 14 & 1)


def _buffers() -> list[Finding]:
    """Whether the kernel lets a client's Unix socket hold what kvgw asks for; nothing where it does not say."""
    try:
        most = int(_BUFFER_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return []
    if most >= UNIX_SEND_BYTES:
        return [Finding("socket buffers", Verdict.GOOD, f"a Unix socket may hold {human_bytes(UNIX_SEND_BYTES)}")]
    what = f"a Unix socket may hold {human_bytes(most)}, kvgw asks for up to {human_bytes(UNIX_SEND_BYTES)}"
    return [
        Finding("socket buffers", Verdict.NOTE, f"{what}: it is slower", f"sysctl net.core.wmem_max={UNIX_SEND_BYTES}")
    ]


def _proxies(settings: Settings) -> list[Finding]:
    """Which proxy variables of the environment count. Their values may hold passwords, so that they are not shown."""
    names = sorted(name for name, value in os.environ.items() if name.upper() in _PROXIES and value)
    if not names:
        return []
    listed = ", ".join(names)
    if settings.s3.use_proxy:
        return [Finding("proxy", Verdict.NOTE, f"S3 is reached as {listed} says, KMS directly")]
    remedy = "set s3.use_proxy = true if S3 is behind it"
    return [Finding("proxy", Verdict.NOTE, f"{listed} is set and not used: S3 and KMS are reached directly", remedy)]


async def _s3(settings: Settings) -> list[Finding]:
    if not settings.s3.bucket:
        return [Finding("S3", Verdict.GOOD, "no bucket is named: no S3 tier")]
    try:
        tier = await S3Tier.open(s3_options(settings.s3), clock=SystemClock())
    except (StorageError, KvgwError) as error:
        return [Finding("S3", Verdict.BAD, str(error), "correct the s3 settings")]
    try:
        found = await tier.probe()
    finally:
        await tier.aclose()
    return [_s3_verdict(settings, found), *(Finding("S3", Verdict.NOTE, message) for message in found.messages)]


def _s3_verdict(settings: Settings, found: S3Capabilities) -> Finding:
    if not found.usable:
        return Finding(
            "S3",
            Verdict.BAD,
            f"bucket {settings.s3.bucket} cannot be used: reachable {found.reachable}, put {found.put}, "
            f"get {found.get}, list {found.list}, delete {found.delete}",
            "see the notes below",
        )
    abilities = [
        f"versions {found.versioning}",
        f"object lock {found.object_lock}",
        f"rejects wrong checksums {found.checksum_mismatch_rejected}",
        f"conditional put {found.conditional_put}",
    ]
    return Finding("S3", Verdict.GOOD, f"bucket {settings.s3.bucket} works; {', '.join(abilities)}")
