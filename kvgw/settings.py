"""Settings: one frozen object, read from ``kvgw.toml`` and ``KVGW__SECTION__KEY`` variables, unpacked by `wiring` only.

An unknown or wrong key stops the start and names itself. Variables need two underscores, so that the service links
that Kubernetes puts into the environment (``KVGW_PORT=tcp://…``) are never taken for settings.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from kvgw.errors import KvgwError

GIB: Final = 1024**3
MIB: Final = 1024**2

_VARIABLE_PREFIX: Final = "KVGW__"
_SERVICE_LINK = re.compile(r"KVGW(_[A-Z0-9]+)*_(PORT|SERVICE_HOST|SERVICE_PORT)(_[A-Z0-9_]+)?")
_OWN_VARIABLES: Final = frozenset({"KVGW_TOKEN", "KVGW_ENDPOINT", "KVGW_CONFIG", "KVGW_DATA", "KVGW_ROOT_KEY"})

_OTHERS: Final = ("KVGW_TEST_", "KVGW_DEMO_", "KVGW_COMPOSE_")
"""Variables of the tests, the demo and docker-compose.yml, which may stand in the same environment."""

Bytes = Annotated[int, Meta(ge=0, le=2**60)]
Seconds = Annotated[float, Meta(ge=0.05, le=30 * 86_400)]


class SettingsError(KvgwError):
    """A setting that is unknown, of the wrong kind, or out of range; the sentence names it."""


class ServerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the gateway listens."""

    socket: Annotated[str, Meta(description="Unix socket; empty: kvgw.sock in the data folder.")] = ""
    listen: Annotated[str, Meta(description="TCP address host:port of the data plane; empty: none.")] = ""
    http: Annotated[str, Meta(description="TCP address host:port of health and metrics; empty: none.")] = (
        "127.0.0.1:8471"
    )
    tls_cert_file: Annotated[str, Meta(description="Certificate chain of the TCP listener, PEM; empty: no TLS.")] = ""
    tls_key_file: Annotated[str, Meta(description="Key of the certificate, PEM.")] = ""
    allow_plaintext: Annotated[bool, Meta(description="Let listen be a non-loopback address without TLS.")] = False
    connections: Annotated[int, Meta(ge=1, le=65536, description="Client connections at once.")] = 512


class StagingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Host memory."""

    bytes: Annotated[int, Meta(ge=16 * MIB, le=2**50, description="Size of the staging arena.")] = 1 * GIB
    tenants: Annotated[int, Meta(ge=1, le=10_000, description="Tenants with a guaranteed share at once.")] = 4


class SharedMemorySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Windows lent to clients of this host over the Unix socket, beside the staging arena."""

    bytes: Annotated[Bytes, Meta(description="Windows of all clients together; 0: none are lent.")] = 512 * MIB
    tenant_bytes: Annotated[Bytes, Meta(description="Windows of one tenant.")] = 256 * MIB
    connection_bytes: Annotated[Bytes, Meta(description="Window of one connection.")] = 128 * MIB


class NvmeSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The local disk tier."""

    enabled: Annotated[bool, Meta(description="Keep chunks on this node's disk.")] = True
    dir: Annotated[str, Meta(description="Folder of blobs; empty: nvme in the data folder.")] = ""
    capacity_bytes: Annotated[int, Meta(ge=MIB, le=2**60, description="Bytes that blobs may take.")] = 64 * GIB
    min_free_bytes: Annotated[
        Bytes | None, Meta(description="Free bytes to leave on the file system; none: 5 %, at most 10 GiB.")
    ] = None


class S3Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The object-store tier; it is used when a bucket is named."""

    bucket: Annotated[str, Meta(description="Bucket; empty: no S3 tier.")] = ""
    prefix: Annotated[str, Meta(description="Prefix of all object names, ending in a slash; may be empty.")] = ""
    endpoint: Annotated[str, Meta(description="URL of the S3 service; empty: AWS.")] = ""
    region: Annotated[str, Meta(description="Region.")] = "us-east-1"
    addressing: Annotated[Literal["auto", "path", "virtual"], Meta(description="Bucket in the path or host name.")] = (
        "auto"
    )
    access_key_id: Annotated[str, Meta(description="Access key; empty: the AWS environment variables.")] = ""
    secret_access_key_file: Annotated[str, Meta(description="File that holds the secret key.")] = ""
    instance_credentials: Annotated[bool, Meta(description="Use the credentials of this machine or its role.")] = False
    use_proxy: Annotated[bool, Meta(description="Let proxy variables of the environment apply to S3.")] = False
    ca_file: Annotated[str, Meta(description="Certificate authority file; empty: the system's.")] = ""
    allow_http: Annotated[bool, Meta(description="Let the endpoint be plain http beyond this host.")] = False
    request_seconds: Annotated[float, Meta(gt=0, le=60, description="Limit of one request, retries included.")] = 10.0
    connections: Annotated[int, Meta(ge=1, le=1024, description="Connections to S3 at once.")] = 32
    checksums: Annotated[
        Literal["when_required", "when_supported"], Meta(description="When the S3 client sends checksums.")
    ] = "when_required"


class CatalogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The SQL catalog."""

    file: Annotated[str, Meta(description="SQLite file; empty: catalog.db in the data folder.")] = ""
    url: Annotated[
        str, Meta(description="PostgreSQL, postgresql://user@host:5432/database, without a password; empty: SQLite.")
    ] = ""
    password_file: Annotated[str, Meta(description="File that holds the password of url.")] = ""
    owner_url: Annotated[
        str, Meta(description="PostgreSQL as the owner of the tables; used by kvgw migrate alone; empty: as url.")
    ] = ""
    owner_password_file: Annotated[str, Meta(description="File that holds the password of owner_url.")] = ""
    pool: Annotated[int, Meta(ge=1, le=1000, description="PostgreSQL connections of one gateway.")] = 8
    match_index_bytes: Annotated[
        Bytes, Meta(description="Memory for what matches found, about 80 bytes an entry; 0: each asks the catalog.")
    ] = 64 * MIB


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where keys are."""

    dir: Annotated[str, Meta(description="Folder of the root key; empty: keys in the data folder.")] = ""
    store: Annotated[
        Literal["file", "s3"],
        Meta(description="Where wrapped namespace keys are: file, for one host; s3, shared by several gateways."),
    ] = "file"
    s3_prefix: Annotated[str, Meta(description="Prefix of wrapped namespace keys in the bucket of s3.")] = "kvgw-keys/"
    provider: Annotated[
        Literal["file", "environment", "aws-kms"],
        Meta(description="Who keeps the root key: a file in dir; KVGW_ROOT_KEY, for development; AWS KMS."),
    ] = "file"
    development: Annotated[bool, Meta(description="Let the root key come from the environment.")] = False
    kms_key_id: Annotated[str, Meta(description="ARN of the KMS key.")] = ""
    kms_previous_key_id: Annotated[
        str, Meta(description="ARN of the KMS key before it, while something is wrapped by it.")
    ] = ""
    kms_endpoint: Annotated[str, Meta(description="URL of the KMS service; empty: AWS, in the key's region.")] = ""


class DefaultSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Policy of the namespaces that the gateway makes at its first start."""

    durability: Annotated[Literal["staged", "nvme", "s3"], Meta(description="What an acknowledged PUT survives.")] = (
        "nvme"
    )
    ttl_seconds: Annotated[int, Meta(ge=1, le=315_360_000, description="Life of entries without a TTL.")] = 86_400
    max_ttl_seconds: Annotated[int, Meta(ge=1, le=315_360_000, description="Longest TTL.")] = 30 * 86_400


class LimitSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What each tenant may ask of all gateways together; namespaces may have limits of their own. 0: no limit."""

    requests_per_second: Annotated[int, Meta(ge=0, le=10**6, description="Requests of one tenant a second.")] = 0
    bytes_per_second: Annotated[int, Meta(ge=0, le=2**50, description="Payload bytes of one tenant a second.")] = 0
    concurrent_requests: Annotated[
        int,
        Meta(
            ge=0,
            le=10**6,
            description="Requests of one tenant at once on one gateway; matches are let in below half of it, "
            "PUTs below three quarters.",
        ),
    ] = 0


class MaintenanceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How often each maintenance job runs, and how long it waits before it believes what it sees."""

    outbox_seconds: Annotated[Seconds, Meta(description="Between two looks for writes that are due.")] = 2.0
    sweep_seconds: Annotated[Seconds, Meta(description="Between two sweeps of what expired or was deleted.")] = 10.0
    evict_seconds: Annotated[Seconds, Meta(description="Between two looks at the room on disk.")] = 2.0
    orphans_seconds: Annotated[Seconds, Meta(description="Between two looks for blobs without a row.")] = 600.0
    heartbeat_seconds: Annotated[
        float,
        Meta(ge=0.05, le=5.0, description="Between two heartbeats; without any for 10 s a gateway stores nothing."),
    ] = 5.0
    reach_seconds: Annotated[Seconds, Meta(description="Between two looks whether S3 answers.")] = 15.0
    nvme_orphan_grace_seconds: Annotated[
        Seconds, Meta(description="A blob on disk must lack a row for so long; above the longest PUT deadline.")
    ] = 300.0
    s3_orphan_grace_seconds: Annotated[
        Seconds, Meta(description="The same for S3; above the longest PUT deadline of any gateway.")
    ] = 86_400.0


class WriteBackSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How fast and how far behind write-back may be."""

    nvme_bytes_per_second: Annotated[Bytes, Meta(description="Most that write-back writes to NVMe; 0: no limit.")] = 0
    s3_bytes_per_second: Annotated[Bytes, Meta(description="The same for S3.")] = 0
    outbox_bytes: Annotated[
        Bytes, Meta(description="Waiting for one tier on this node; above it PUTs that are only staged wait; 0: any.")
    ] = 16 * GIB
    outbox_seconds: Annotated[
        float, Meta(ge=0, le=30 * 86_400, description="The same for the age of the oldest write; 0: any.")
    ] = 900.0


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a gateway."""

    server: ServerSettings = ServerSettings()
    staging: StagingSettings = StagingSettings()
    shared_memory: SharedMemorySettings = SharedMemorySettings()
    nvme: NvmeSettings = NvmeSettings()
    s3: S3Settings = S3Settings()
    catalog: CatalogSettings = CatalogSettings()
    keys: KeySettings = KeySettings()
    defaults: DefaultSettings = DefaultSettings()
    limits: LimitSettings = LimitSettings()
    maintenance: MaintenanceSettings = MaintenanceSettings()
    writeback: WriteBackSettings = WriteBackSettings()
    node: Annotated[
        str, Meta(max_length=64, description="Name of this node; empty: made once, kept in the data folder.")
    ] = ""


def load(config: Path | None, environment: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """Read the settings, and notes worth showing. Raises `SettingsError` naming the key and where it came from."""
    document: dict[str, object] = {}
    if config is not None:
        document = _read_file(config)
    notes = _apply_environment(document, environment)
    try:
        settings = msgspec.convert(document, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(
            f"wrong setting: {error} (in {config or 'the environment'} or a KVGW__ variable)"
        ) from error
    if settings.defaults.ttl_seconds > settings.defaults.max_ttl_seconds:
        raise SettingsError(
            f"defaults.ttl_seconds {settings.defaults.ttl_seconds} is above defaults.max_ttl_seconds "
            f"{settings.defaults.max_ttl_seconds}"
        )
    return settings, notes


def _read_file(config: Path) -> dict[str, object]:
    try:
        with config.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise SettingsError(f"the settings file {config} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the settings file {config} is not TOML: {error}") from error


def _apply_environment(document: dict[str, object], environment: Mapping[str, str]) -> list[str]:
    """Put ``KVGW__SECTION__KEY`` variables over the document; notes about variables that look like ours."""
    notes: list[str] = []
    for name, value in sorted(environment.items()):
        if name.startswith(_VARIABLE_PREFIX):
            path = name.removeprefix(_VARIABLE_PREFIX).lower().split("__")
            target = document
            for part in path[:-1]:
                inner = target.setdefault(part, {})
                if not isinstance(inner, dict):
                    raise SettingsError(f"the variable {name} names a key inside {part!r}, which is not a section")
                target = inner
            target[path[-1]] = value
        elif name.startswith("KVGW_") and not name.startswith(_OTHERS) and name not in _OWN_VARIABLES:
            if _SERVICE_LINK.fullmatch(name) is None:
                raise SettingsError(
                    f"the variable {name} is unknown; settings are written KVGW__SECTION__KEY with two underscores"
                )
            notes.append(
                f"{name} looks like a Kubernetes service link and is ignored "
                "(enableServiceLinks: false in the pod keeps it away)"
            )
    return notes


def default_data_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """The data folder when none is named: ``$KVGW_DATA``, else ``kvgw`` in the user's data folder."""
    if environment.get("KVGW_DATA"):
        return Path(environment["KVGW_DATA"]).absolute()
    base = environment.get("XDG_DATA_HOME") or Path(environment.get("HOME") or ".") / ".local" / "share"
    return (Path(base) / "kvgw").absolute()
