"""Opening the keys: the root key, the store of namespace keys, and the secret that token digests are keyed with."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvgw.kms import KmsOptions, KmsRootKey
from kvgw.runtime import Rng, Workers
from kvgw.settings import Settings, SettingsError
from kvgw.sharedkeys import S3KeyStore
from kvgw.wiring.tiers import s3_options
from storage.s3 import S3Objects
from tenancy.errors import KeyUnavailable
from tenancy.keys import keyfiles
from tenancy.keys.custody import GATEWAYS
from tenancy.keys.environmentroot import VARIABLE, EnvironmentRootKey
from tenancy.keys.keystore import FileKeyStore, KeyStore
from tenancy.keys.rootkey import FileRootKey, RootKey
from tenancy.keys.secret import KEY_BYTES, SecretBytes
from tenancy.keys.signing import Signer
from tenancy.keys.wrapping import KeyContext


@dataclass(frozen=True, slots=True)
class Keys:
    """The opened key hierarchy."""

    root: RootKey
    store: KeyStore
    pepper: SecretBytes
    signer: Signer
    shared: bool
    """Whether other gateways can reach the store."""


def keys_folder(settings: Settings, data: Path) -> Path:
    """Where the root key is."""
    return Path(settings.keys.dir) if settings.keys.dir else data / "keys"


async def open_keys(stack: AsyncExitStack, settings: Settings, data: Path, workers: Workers, rng: Rng) -> Keys:
    """Open the keys. One host makes its root key by itself; a shared one must be there (``kvgw keys init``).

    Raises `SettingsError`, `KeyUnavailable`, `KeyGone` and `KeyRefused` with the remedy.
    """
    shared = settings.keys.store == "s3"
    root = await open_root(stack, settings, data, workers, rng)
    store = await open_store(stack, settings, data, workers)
    pepper = await _pepper(root, store, rng)
    return Keys(root, store, pepper, Signer(pepper), shared)


async def open_root(stack: AsyncExitStack, settings: Settings, data: Path, workers: Workers, rng: Rng) -> RootKey:
    """The root key of the provider that the settings name. Raises as `open_keys`."""
    keys, folder = settings.keys, keys_folder(settings, data)
    if keys.provider == "file":
        opens = FileRootKey.open if keys.store == "s3" else FileRootKey.open_or_create
        return await opens(folder, workers, rng.token)
    if keys.provider == "environment":
        if not keys.development:
            raise SettingsError(
                "keys.provider is environment, where whoever sees the process's environment has the root key: use "
                "file or aws-kms, or say keys.development = true if nothing here must stay secret"
            )
        if VARIABLE not in os.environ:
            raise SettingsError(
                f"keys.provider is environment, but {VARIABLE} is not set; openssl rand -hex 32 makes one"
            )
        return EnvironmentRootKey(os.environ[VARIABLE], rng.token)
    return await _open_kms(stack, settings)


async def _open_kms(stack: AsyncExitStack, settings: Settings) -> KmsRootKey:
    keys = settings.keys
    if not keys.kms_key_id:
        raise SettingsError("keys.provider is aws-kms, but keys.kms_key_id names no key")
    root = KmsRootKey(
        KmsOptions(
            key_arn=keys.kms_key_id,
            previous_arns=(keys.kms_previous_key_id,) if keys.kms_previous_key_id else (),
            endpoint_url=keys.kms_endpoint or None,
            access_key_id=os.environ.get("AWS_ACCESS_KEY_ID"),
            secret_access_key=os.environ.get("AWS_SECRET_ACCESS_KEY"),
            session_token=os.environ.get("AWS_SESSION_TOKEN"),
            ca_file=Path(settings.s3.ca_file) if settings.s3.ca_file else None,
        )
    )
    stack.push_async_callback(root.aclose)
    await root.check()
    return root


async def open_store(stack: AsyncExitStack, settings: Settings, data: Path, workers: Workers) -> KeyStore:
    """The store of wrapped namespace keys. Raises `SettingsError` and `KeyRefused`."""
    if settings.keys.store == "file":
        folder = keys_folder(settings, data)
        await workers.run(lambda: keyfiles.make_folder(folder))  # there already, if the root key is a file in it
        return await FileKeyStore.open(folder, workers)
    if not settings.s3.bucket:
        raise SettingsError("keys.store is s3, but s3.bucket names no bucket")
    if settings.keys.s3_prefix.startswith(settings.s3.prefix + "v1/"):
        raise SettingsError(f"keys.s3_prefix {settings.keys.s3_prefix!r} lies among the blobs; choose another")
    objects = S3Objects(replace(s3_options(settings.s3), prefix=settings.keys.s3_prefix))
    stack.push_async_callback(objects.aclose)
    return S3KeyStore(objects)


async def _pepper(root: RootKey, store: KeyStore, rng: Rng) -> SecretBytes:
    """The secret that token digests are keyed with: in the key store, never in the catalog."""
    context = KeyContext(GATEWAYS, GATEWAYS, "token", 1)
    try:
        versions = await store.read(GATEWAYS)
    except KeyUnavailable:
        # Not there yet, or not reachable: then this fails too, and says so. Of two gateways the first one's stands.
        versions = await store.create(GATEWAYS, {1: await root.wrap(SecretBytes(rng.token(KEY_BYTES)), context)})
    return await root.unwrap(versions[1], context)
