"""Whose KV a request's is. The operator's map decides; what a caller sends is never a tenant by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvgw.canonical import length_prefixed
from kvgw.checks import check_references
from kvgw.errors import FormatError

OWN: Final = ""
"""The engine's own credential and namespace: for every request that the map does not name."""

SALT: Final = "cache_salt"
PARAMS: Final = "kv_transfer_params."
PUBLIC_SALT: Final = length_prefixed(b"public")
"""Of the keys in a public namespace. No request has this salt, so that a tenant's own entries never answer for it."""


@dataclass(frozen=True, slots=True)
class Credential:
    """By which token, and in which namespace, one tenant's chunks are kept."""

    token_file: str | None = None
    """A file whose only content is the token; None: none, as the gateway's own user over its Unix socket."""
    namespace: str = ""
    """Empty: the credential's default namespace."""
    publishes: bool = False
    """What is stored under it is for every reader of a public namespace: for the operator's own prompts alone."""

    def token(self) -> str | None:
        """Read the token. Raises `FormatError` for a file that cannot be read or holds none."""
        if self.token_file is None:
            return None
        try:
            text = Path(self.token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"the token file {self.token_file} cannot be read: {error}") from error
        if not text:
            raise FormatError(f"the token file {self.token_file} is empty")
        return text


@dataclass(frozen=True, slots=True)
class TenantMap:
    """From a value in a request to a credential. `by`: ``cache_salt``, or ``kv_transfer_params.<name>``."""

    own: Credential
    by: str = SALT
    tenants: Mapping[str, Credential] = field(default_factory=dict)
    public: tuple[str, ...] = ()
    """Public namespaces, as ``tenant/namespace``, in which every request's prompt is looked up first."""

    def reads_public(self, tenant: str) -> bool:
        """Whether the public namespaces are asked for a tenant's prompts: not where they are written."""
        return bool(self.public) and not self.credential(tenant).publishes

    def credential(self, tenant: str) -> Credential:
        """The credential behind a name that `resolve` gave."""
        return self.own if tenant == OWN else self.tenants[tenant]

    def resolve(self, cache_salt: str | None, params: Mapping[str, object] | None) -> tuple[str, bytes]:
        """Tenant and salt of a request.

        A value that the map does not name stays in the engine's own namespace, apart from every other value: it is
        part of the salt. The cache_salt always is, as in the engine's own prefix cache, but for what is published.
        """
        value = cache_salt if self.by == SALT else (params or {}).get(self.by.removeprefix(PARAMS))
        if isinstance(value, str) and value in self.tenants:
            return value, PUBLIC_SALT if self.tenants[value].publishes else _salt(cache_salt, None)
        return OWN, _salt(cache_salt, None if self.by == SALT or value is None else json.dumps(value, default=repr))


def _salt(cache_salt: str | None, stranger: str | None) -> bytes:
    """Bytes that differ wherever one of the two does; empty where both are absent."""
    if not cache_salt and stranger is None:
        return b""
    return length_prefixed(*((text or "").encode() for text in (cache_salt, stranger)))


def read_tenants(path: str, own: Credential) -> TenantMap:
    """Read a map of tenants, as JSON: ``{"by": "cache_salt", "tenants": {"value": {"token_file": …}}}``.

    Relative token files are beside the map. Raises `FormatError` naming what is wrong.
    """
    place = Path(path)
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"the tenants file {path} cannot be read: {error}") from error
    if (
        not isinstance(content, dict)
        or set(content) - {"by", "public", "tenants"}
        or not isinstance(content.get("tenants"), dict)
    ):
        raise FormatError(f'the tenants file {path} must be {{"by": …, "tenants": {{value: {{"token_file": …}}}}}}')
    by = content.get("by", SALT)
    if by != SALT and not (isinstance(by, str) and by.startswith(PARAMS) and by != PARAMS):
        raise FormatError(f"'by' in {path} must be {SALT!r} or '{PARAMS}<name>', not {by!r}")
    public = content.get("public", [])
    if not isinstance(public, list) or not all(isinstance(one, str) for one in public):
        raise FormatError(f"'public' in {path} must be a list of namespaces, each as tenant/namespace, not {public!r}")
    tenants = {value: _credential(path, value, entry) for value, entry in content["tenants"].items()}
    return TenantMap(own, by, tenants, tuple(check_references(public)))


def _credential(path: str, value: str, entry: object) -> Credential:
    if value == OWN or not isinstance(entry, dict) or set(entry) - {"token_file", "namespace", "publishes"}:
        raise FormatError(
            f"tenant {value!r} in {path} must be a name with token_file and, if need be, namespace and publishes"
        )
    token_file, namespace = entry.get("token_file"), entry.get("namespace", "")
    if not isinstance(token_file, str) or not token_file or not isinstance(namespace, str):
        raise FormatError(f"tenant {value!r} in {path} needs a token_file, and its namespace must be text")
    publishes = entry.get("publishes", False)
    if not isinstance(publishes, bool) or (publishes and not namespace):
        raise FormatError(
            f"'publishes' of tenant {value!r} in {path} must be true or false, and true needs a namespace"
        )
    return Credential(str(Path(path).parent / token_file), namespace, publishes)
