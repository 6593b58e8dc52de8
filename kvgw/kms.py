"""A root key in AWS KMS: it never leaves the service, which wraps and unwraps namespace keys for this gateway.

Tenant, namespace, purpose and version are the encryption context: KMS itself refuses a record that was moved, and
its own log names the namespace of every key that was opened. A record says which KMS key wrapped it, and is asked of
none but the configured ones: whoever can write to the key store cannot bring a key of their own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NotRequired, Protocol, TypedDict
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from botocore.exceptions import BotoCoreError, ClientError

from storage.s3.client import DirectHttp, GuardedResolver, make_session
from tenancy.errors import KeyDamaged, KeyGone, KeyMismatch, KeyRefused, KeyUnavailable
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.keys.wrapping import KeyContext, remote_parts, remote_record

REQUEST_SECONDS: Final = 5.0
"""One question to KMS with all its retries."""
CONNECT_SECONDS: Final = 2.0
ATTEMPTS_MAX: Final = 3
CONNECTIONS_MAX: Final = 8

_KEY_ARN = re.compile(r"arn:aws[a-z-]*:kms:([a-z0-9-]{1,32}):[0-9]{12}:key/[A-Za-z0-9-]{1,64}")
_GONE: Final = frozenset({"PendingDeletion", "PendingReplicaDeletion"})
_WRONG: Final = frozenset({"InvalidCiphertextException", "IncorrectKeyException"})


@dataclass(frozen=True, slots=True)
class KmsOptions:
    """Which KMS key, and how it is reached. Raises `KeyRefused` for what cannot work; secrets are never shown.

    Without an access key the credentials of this machine or its role are asked for.
    """

    key_arn: str
    previous_arns: tuple[str, ...] = ()
    """KMS keys that may still open what they wrapped."""
    endpoint_url: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        for arn in (self.key_arn, *self.previous_arns):
            if _KEY_ARN.fullmatch(arn) is None:
                raise KeyRefused(
                    f"{arn!r} is not the ARN of a KMS key: write arn:aws:kms:<region>:<account>:key/<id>; an alias "
                    "would not do, since it can be moved to another key"
                )
        if self.endpoint_url is not None and not _is_safe(self.endpoint_url):
            raise KeyRefused(
                "keys.kms_endpoint must be https://host[:port]: keys go there to be wrapped. "
                "Plain http is for a service on this very host"
            )
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise KeyRefused("only one half of the access key for KMS is set; set both, or neither")

    @property
    def region(self) -> str:
        return self.key_arn.split(":")[3]


class _Described(TypedDict):
    KeyState: str
    KeyUsage: NotRequired[str]
    KeySpec: NotRequired[str]


class KmsClient(Protocol):
    """The three calls that are used, typed: aiobotocore brings no types. Parameters have the service's names."""

    # ruff: noqa: N803
    async def encrypt(self, *, KeyId: str, Plaintext: bytes, EncryptionContext: Mapping[str, str]) -> _Encrypted: ...

    async def decrypt(
        self, *, KeyId: str, CiphertextBlob: bytes, EncryptionContext: Mapping[str, str]
    ) -> _Decrypted: ...

    async def describe_key(self, *, KeyId: str) -> _Description: ...


class _Encrypted(TypedDict):
    CiphertextBlob: bytes


class _Decrypted(TypedDict):
    Plaintext: bytes


class _Description(TypedDict):
    KeyMetadata: _Described


class KmsRootKey:
    """A `tenancy.keys.rootkey.RootKey` whose provider is AWS KMS, or a service that speaks its protocol."""

    provider = "aws-kms"

    def __init__(self, options: KmsOptions) -> None:
        self._options = options
        self._allowed = frozenset((options.key_arn, *options.previous_arns))
        self._client: KmsClient | None = None
        self._making = asyncio.Lock()
        self._stack = AsyncExitStack()

    @property
    def key_id(self) -> str:
        return self._options.key_arn

    async def wrap(self, key: SecretBytes, context: KeyContext) -> bytes:
        arn = self._options.key_arn
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                client = await self._connected()
                answer = await client.encrypt(KeyId=arn, Plaintext=key.reveal(), EncryptionContext=context.fields())
        except (TimeoutError, BotoCoreError, ClientError, aiohttp.ClientError) as error:
            raise await self._translated(error, arn, "wrap a key") from None
        return remote_record(arn, answer["CiphertextBlob"])

    async def unwrap(self, record: bytes, context: KeyContext) -> SecretBytes:
        arn, ciphertext = remote_parts(record)
        if arn not in self._allowed:
            raise KeyMismatch(
                f"the {context.purpose} key of namespace {context.namespace} was wrapped by the KMS key {arn}, which "
                "is neither keys.kms_key_id nor keys.kms_previous_key_id; name it there, if it is yours"
            )
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                client = await self._connected()
                answer = await client.decrypt(KeyId=arn, CiphertextBlob=ciphertext, EncryptionContext=context.fields())
        except (TimeoutError, BotoCoreError, ClientError, aiohttp.ClientError) as error:
            what = f"open the {context.purpose} key {context.epoch} of namespace {context.namespace}"
            raise await self._translated(error, arn, what) from None
        if len(answer["Plaintext"]) != KEY_BYTES:
            raise KeyDamaged(f"what {arn} opened is no key of {KEY_BYTES} bytes; restore the key store")
        return SecretBytes(answer["Plaintext"])

    async def check(self) -> None:
        arn = self._options.key_arn
        state = await self._state(arn)
        if state in _GONE:
            raise KeyGone(_gone(arn, state))
        if state != "Enabled":
            raise KeyUnavailable(f"the KMS key {arn} is {state}; enable it")

    async def rotate(self) -> str:
        raise KeyRefused(
            "the root key is in KMS, which can rotate it by itself. To change to another KMS key, set keys.kms_key_id "
            "to it and keys.kms_previous_key_id to the old one, restart every gateway, then run kvgw keys rewrap"
        )

    async def retire(self, needed: Collection[str]) -> list[str]:
        """KMS keys are destroyed in KMS, which keeps them for a week at least."""
        return []

    async def aclose(self) -> None:
        """Close the connections."""
        self._client = None
        await self._stack.aclose()

    async def _state(self, arn: str) -> str:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                client = await self._connected()
                return (await client.describe_key(KeyId=arn))["KeyMetadata"]["KeyState"]
        except ClientError as error:
            if _code(error) == "NotFoundException":
                raise KeyGone(f"the KMS key {arn} does not exist; if it was deleted, nothing opens any more") from None
            raise _unavailable(error, arn, "see the state") from None
        except (TimeoutError, BotoCoreError, aiohttp.ClientError) as error:
            raise _unavailable(error, arn, "see the state") from None

    async def _translated(self, error: Exception, arn: str, act: str) -> Exception:
        """Ours for KMS's: destroyed for good, not the right one, or not to be had now."""
        code = _code(error) if isinstance(error, ClientError) else ""
        if code in _WRONG:
            return KeyMismatch(
                f"could not {act} with the KMS key {arn}: the record was made for another place, or altered"
            )
        if code == "NotFoundException":
            return KeyGone(f"the KMS key {arn} does not exist any more; what it wrapped is lost for good")
        if code == "KMSInvalidStateException":
            state = await self._state(arn)
            return KeyGone(_gone(arn, state)) if state in _GONE else KeyUnavailable(f"the KMS key {arn} is {state}")
        return _unavailable(error, arn, act)

    async def _connected(self) -> KmsClient:
        async with self._making:
            if self._client is None:
                self._client = await self._stack.enter_async_context(_make_client(self._options))
            return self._client


def _make_client(options: KmsOptions) -> AbstractAsyncContextManager[KmsClient]:
    session = make_session(instance_credentials=options.access_key_id is None)
    client: AbstractAsyncContextManager[KmsClient] = session.create_client(
        "kms",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        verify=str(options.ca_file) if options.ca_file else None,
        config=AioConfig(
            http_session_cls=DirectHttp,
            connector_args={"resolver": GuardedResolver()},
            proxies={},
            retries={"mode": "standard", "total_max_attempts": ATTEMPTS_MAX},
            connect_timeout=CONNECT_SECONDS,
            read_timeout=REQUEST_SECONDS,
            max_pool_connections=CONNECTIONS_MAX,
            defaults_mode="legacy",
            ignore_configured_endpoint_urls=True,
        ),
    )
    return client


def _is_safe(url: str) -> bool:
    parts = urlsplit(url)
    plain = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
    bare = parts.path in ("", "/") and not (parts.username or parts.password or parts.query or parts.fragment)
    return bool(parts.hostname) and bare and (parts.scheme == "https" or plain)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _gone(arn: str, state: str) -> str:
    return f"the KMS key {arn} is {state}: what it wrapped is lost for good unless its deletion is cancelled in time"


def _unavailable(error: Exception, arn: str, act: str) -> KeyUnavailable:
    """Never the service's own sentence: it may repeat what was sent."""
    if isinstance(error, TimeoutError):
        return KeyUnavailable(f"could not {act} with the KMS key {arn} within {REQUEST_SECONDS:g} s")
    if isinstance(error, ClientError):
        return KeyUnavailable(
            f"could not {act} with the KMS key {arn}: {_code(error)}; allow this gateway kms:Encrypt, kms:Decrypt and "
            "kms:DescribeKey, and see that the key is enabled"
        )
    return KeyUnavailable(f"could not {act} with the KMS key {arn}: {type(error).__name__}; is KMS reachable?")
