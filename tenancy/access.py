"""Access: API tokens and the decision what a caller may do. Pure functions of data and time; no I/O.

A token reads ``kvgw_<id: 16 base32>_<secret: 43 base64url>_<crc32: 6 base62>``. The checksum rejects typing errors
before any look-up; the catalog keeps only an HMAC of the secret. The tenant comes from the credential alone; the
namespace in a request is a claim that is checked against the credential's patterns.
"""

from __future__ import annotations

import base64
import hmac
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final
from uuid import UUID

from tenancy.errors import AccessDenied, PermissionMissing

DEFAULT_NAMESPACE: Final = "default"
NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
"""Names of tenants and namespaces: no path, no control character, no look-alike letters."""

PATTERN: Final = re.compile(r"[a-z0-9*](?:[a-z0-9._*-]{0,62}[a-z0-9*])?")
"""Patterns of namespaces' names: ``*`` matches any run of characters."""

_TOKEN = re.compile(r"kvgw_([a-z2-7]{16})_([A-Za-z0-9_-]{43})_([0-9A-Za-z]{6})")
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Permission(StrEnum):
    """What a credential may be used for."""

    GET = "chunk:get"
    PUT = "chunk:put"
    DELETE = "chunk:delete"
    READ = "ns:read"
    ADMIN = "ns:admin"
    METRICS = "metrics:read"
    TENANT = "tenant:admin"
    AUDIT = "audit:read"
    KEYS = "key:rotate"
    SHRED = "shred"
    OPERATOR = "operator"
    """Every tenant, not the caller's own alone: who runs the gateways."""


DATA_PERMISSIONS: Final = frozenset({Permission.GET, Permission.PUT, Permission.DELETE, Permission.READ})
CHUNK_PERMISSIONS: Final = frozenset({Permission.GET, Permission.PUT, Permission.DELETE})
DANGEROUS: Final = frozenset({Permission.KEYS, Permission.SHRED, Permission.OPERATOR})
"""What no token has together with `CHUNK_PERMISSIONS`: an engine's token that leaks destroys nothing for good."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated principal of a request."""

    tenant: UUID
    name: str
    permissions: frozenset[Permission]
    namespaces: tuple[str, ...]
    """Patterns (``*`` matches any run of characters) of the namespaces it may name."""
    default_namespace: str

    def namespace(self, claim: str) -> str:
        """The namespace a request is about. Raises `AccessDenied`, the same for a missing and a forbidden one."""
        name = claim or self.default_namespace
        if NAME.fullmatch(name) is None or not self.may_name(name):
            raise AccessDenied("the namespace does not exist, or this credential may not use it")
        return name

    def may_name(self, namespace: str) -> bool:
        """Whether the credential's patterns cover this namespace."""
        return "*" in self.namespaces or any(fnmatchcase(namespace, pattern) for pattern in self.namespaces)

    def may_name_all(self, pattern: str) -> bool:
        """Whether one of the credential's patterns covers every name that `pattern` covers."""
        # A star of `pattern` is matched by nothing but a star: so whatever it may stand for is covered too.
        return self.may_name(pattern)

    def require(self, permission: Permission) -> None:
        """Raises `AccessDenied` unless the credential has `permission`."""
        if permission not in self.permissions:
            raise PermissionMissing(f"this credential lacks the permission {permission.value}")


@dataclass(frozen=True, slots=True)
class Token:
    """A token's two halves. Its text is shown once, when it is made."""

    token_id: str
    secret: str

    @property
    def text(self) -> str:
        body = f"kvgw_{self.token_id}_{self.secret}"
        return f"{body}_{_checksum(body)}"

    def __repr__(self) -> str:
        return f"Token({self.token_id}, …)"


def new_token(random_bytes: Callable[[int], bytes]) -> Token:
    """A fresh token with 256 bits of secret."""
    token_id = base64.b32encode(random_bytes(10)).decode().lower()
    secret = base64.urlsafe_b64encode(random_bytes(32)).decode().rstrip("=")
    return Token(token_id, secret)


def parse_token(text: str) -> Token | None:
    """The halves of a well-formed token, or None: no look-up is worth making for anything else."""
    found = _TOKEN.fullmatch(text)
    if found is None:
        return None
    body, _, checksum = text.rpartition("_")
    if not hmac.compare_digest(checksum, _checksum(body)):
        return None
    return Token(found[1], found[2])


def token_digest(pepper: bytes, token: Token) -> bytes:
    """What the catalog keeps of a token (32 bytes)."""
    return hmac.digest(pepper, f"{token.token_id}\0{token.secret}".encode(), "sha256")


def _checksum(body: str) -> str:
    number = zlib.crc32(body.encode())
    digits = []
    for _ in range(6):
        number, digit = divmod(number, 62)
        digits.append(_BASE62[digit])
    return "".join(reversed(digits))
