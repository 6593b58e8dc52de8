"""What the operator sets for an S3 tier."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import SplitResult, urlsplit

from storage.errors import TierMisconfigured

_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}/)*")


@dataclass(frozen=True, slots=True)
class S3Options:
    """Settings of one S3 tier. Raises `TierMisconfigured` on values that cannot work; secrets are never shown.

    Without `endpoint_url` the region's AWS endpoint is used. Without keys, `instance_credentials` must be set: then,
    and only then, the environment, shared files and the instance's metadata service are asked.
    `request_timeout_s` bounds one request with all its retries; `attempts_max` bounds those. Proxies named in the
    environment are ignored unless `use_proxy`.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str = "us-east-1"
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    instance_credentials: bool = False
    expected_bucket_owner: str | None = None
    allow_http: bool = False
    verify_tls: bool = True
    ca_file: Path | None = None
    use_proxy: bool = False
    checksums: Literal["when_required", "when_supported"] = "when_required"
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 30.0
    attempts_max: int = 3
    connections_max: int = 32

    def __post_init__(self) -> None:
        if not self.bucket:
            raise TierMisconfigured("the S3 tier has no bucket; name one")
        if _PREFIX.fullmatch(self.prefix) is None:
            raise TierMisconfigured(
                f"the S3 prefix {self.prefix!r} cannot be used; give segments of letters, digits, '.', '_' or '-', "
                "each ended by '/'"
            )
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url, allow_http=self.allow_http)
        self._check_credentials()
        for name in ("connect_timeout_s", "request_timeout_s", "attempts_max", "connections_max"):
            if not getattr(self, name) > 0:
                raise TierMisconfigured(f"the S3 setting {name} is {getattr(self, name)}; give more than 0")

    @property
    def encrypted(self) -> bool:
        """Whether requests go over TLS."""
        return self.endpoint_url is None or self.endpoint_url.startswith("https:")

    @property
    def place(self) -> str:
        """Bucket and endpoint, for sentences."""
        return f"bucket {self.bucket!r} at {self.endpoint_url or f'AWS {self.region}'}"

    def _check_credentials(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise TierMisconfigured(f"only one of the S3 access key's two halves is set for {self.place}; set both")
        if self.access_key_id is None and not self.instance_credentials:
            raise TierMisconfigured(
                f"there are no S3 credentials for {self.place}; set access_key_id and secret_access_key, or "
                "instance_credentials to use those of this machine"
            )
        if self.access_key_id is not None and self.instance_credentials:
            raise TierMisconfigured(
                f"both an S3 access key and instance_credentials are set for {self.place}; remove one of them"
            )


def _check_endpoint(url: str, *, allow_http: bool) -> None:
    """Refuse endpoints to which no signed request may go. The sentences never repeat a URL that may hold a secret."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 — parsed, and refused if out of range, on access
    except ValueError as error:
        raise TierMisconfigured(f"the S3 endpoint is not a URL: {error}; give https://host[:port]") from error
    if parts.username is not None or parts.password is not None:
        raise TierMisconfigured(
            "the S3 endpoint has a user or password in its URL; set access_key_id and secret_access_key instead"
        )
    if parts.scheme not in ("http", "https"):
        raise TierMisconfigured(f"the S3 endpoint's scheme is {parts.scheme!r}; give https://host[:port]")
    if not parts.hostname or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise TierMisconfigured(
            f"the S3 endpoint of host {parts.hostname!r} is more or less than a host; give https://host[:port]"
        )
    _check_host(parts, allow_http=allow_http)


def _check_host(parts: SplitResult, *, allow_http: bool) -> None:
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        near = host == "localhost"
    else:
        near = address.is_private
        if address.is_link_local:
            raise TierMisconfigured(
                f"the S3 endpoint {host} is a link-local address, where instance metadata lives; give the S3 server's"
            )
    if parts.scheme == "http" and not near and not allow_http:
        raise TierMisconfigured(
            f"the S3 endpoint http://{host} is not on this machine or a private address, so requests could be read on "
            "the way; use https, or set allow_http"
        )
