"""Keys: rotated, wrapped anew, and destroyed. What cannot be undone wants the name typed again."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias
from uuid import UUID

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from kvgw.admin.bodies import Body, StrictRoute
from kvgw.admin.seat import Confirm, NamespaceName, Seated, TenantName, confirmed
from tenancy.access import Permission
from tenancy.keys.custody import KeyStatus
from tenancy.keys.epochs import EPOCH_MAX, EpochPolicy
from tenancy.registry import check_unprotected

router: Final = APIRouter(route_class=StrictRoute, tags=["keys"])

EpochNumber: TypeAlias = Annotated[int, Field(ge=1, le=EPOCH_MAX)]


class Rotation(Body):
    """Which key of the namespace."""

    key: Annotated[
        Literal["data", "namespace"],
        Field(description="data: what new chunks are sealed with; namespace: what wraps the data keys."),
    ] = "data"


class KeyChange(Body):
    """What may be opened, sealed and destroyed; what is not named stays."""

    min_decrypt_epoch: Annotated[EpochNumber | None, Field(description="Chunks of lower epochs are misses.")] = None
    min_encrypt_epoch: Annotated[EpochNumber | None, Field(description="PUTs of lower epochs are refused.")] = None
    deletion_allowed: Annotated[bool | None, Field(description="false: neither deleted nor shredded.")] = None


class EpochInfo(BaseModel):
    """A data key."""

    epoch: int
    created_ms: int
    live_chunks: Annotated[int, Field(description="Chunks that need it.")]


class NamespaceKeyInfo(BaseModel):
    """The keys of a namespace."""

    namespace: str
    state: str
    epoch: Annotated[int, Field(description="What new chunks are sealed in.")]
    min_decrypt_epoch: int
    min_encrypt_epoch: int
    deletion_allowed: bool
    destroyed: Annotated[bool, Field(description="Its key was destroyed: nothing of it opens again.")]
    versions: Annotated[
        dict[int, str], Field(description="Versions of its own key, by which root key each is wrapped.")
    ]
    epochs: list[EpochInfo]


class RootKeyInfo(BaseModel):
    """The root key."""

    provider: str
    key_id: str
    wrapped: Annotated[dict[str, int], Field(description="How many keys in the store each root key wrapped.")]


class RootRotated(BaseModel):
    """The root key that wraps from now on."""

    key_id: str


class RewrapInfo(BaseModel):
    """What was wrapped anew."""

    root_key: str
    namespaces: int
    versions: int
    rows: int
    gone: Annotated[int, Field(description="Namespaces without keys, since they were shredded.")]
    failed: Annotated[dict[UUID, str], Field(description="What is wrong with the keys of a namespace.")]
    retired: Annotated[list[str], Field(description="Root keys that were destroyed.")]


class Shredded(BaseModel):
    """Namespaces whose keys were destroyed."""

    shredded: list[str]


@router.get("/keys")
async def show_root_key(seat: Seated) -> RootKeyInfo:
    """The root key, and what is wrapped by it and by those before it."""
    seat.require(Permission.OPERATOR)
    provider, key_id, wrapped = await seat.opened.custodian.root_status()
    return RootKeyInfo(provider=provider, key_id=key_id, wrapped=wrapped)


@router.post("/keys/rotate")
async def rotate_root_key(seat: Seated) -> RootRotated:
    """Make a root key in this gateway's keys folder. Then every gateway needs it, and `rewrap` brings it into use."""
    seat.require(Permission.OPERATOR)
    seat.require(Permission.KEYS)
    act = seat.act("key.rotate_root")
    return RootRotated(key_id=await seat.opened.custodian.rotate_root_key(act, seat.caller.tenant))


@router.post("/keys/rewrap")
async def rewrap(
    seat: Seated,
    retire: Annotated[bool, Query(description="Destroy root keys that then wrap nothing.")] = False,
    confirm: Annotated[str | None, Query(max_length=128, description="With retire: the id of the one to stay.")] = None,
) -> RewrapInfo:
    """Wrap all namespace keys by the newest root key, and all rows by them. No data is touched."""
    seat.require(Permission.OPERATOR)
    seat.require(Permission.KEYS)
    custodian = seat.opened.custodian
    if retire:
        confirmed(confirm, (await custodian.root_status())[1])
    done = await custodian.rewrap(seat.act("key.rewrap"), seat.caller.tenant, retire=retire)
    return RewrapInfo(
        root_key=done.root_key,
        namespaces=done.namespaces,
        versions=done.versions,
        rows=done.rows,
        gone=done.gone,
        failed={UUID(namespace): sentence for namespace, sentence in done.failed.items()},
        retired=done.retired,
    )


@router.get("/tenants/{tenant}/namespaces/{namespace}/keys")
async def show_keys(seat: Seated, tenant: TenantName, namespace: NamespaceName) -> NamespaceKeyInfo:
    """A namespace's keys: epochs, versions, and how many chunks need each."""
    seat.require(Permission.READ)
    return _info(await seat.opened.custodian.status(await seat.namespace(tenant, namespace)))


@router.post("/tenants/{tenant}/namespaces/{namespace}/keys/rotate")
async def rotate_key(seat: Seated, tenant: TenantName, namespace: NamespaceName, wanted: Rotation) -> NamespaceKeyInfo:
    """Rotate the data key (what was sealed before stays readable) or the namespace's own key."""
    seat.require(Permission.KEYS)
    found = await seat.namespace(tenant, namespace)
    custodian = seat.opened.custodian
    if wanted.key == "data":
        await custodian.rotate_data_key(found.scope, seat.about(found, "key.rotate_data"))
        seat.opened.directory.forget(found.scope.tenant)
    else:
        await custodian.rotate_namespace_key(found.scope, seat.about(found, "key.rotate_namespace"))
    return _info(await custodian.status(await seat.namespace(tenant, namespace)))


@router.patch("/tenants/{tenant}/namespaces/{namespace}/keys")
async def change_keys(
    seat: Seated, tenant: TenantName, namespace: NamespaceName, change: KeyChange, confirm: Confirm = None
) -> NamespaceKeyInfo:
    """Say what may be opened, sealed and destroyed. Raising `min_decrypt_epoch` ends chunks for good."""
    seat.require(Permission.KEYS)
    found = await seat.namespace(tenant, namespace)
    if (change.min_decrypt_epoch or 0) > found.min_decrypt_epoch:
        confirmed(confirm, found.name)
    told = {name: value for name, value in change.model_dump().items() if value is not None}
    wanted = EpochPolicy(change.min_decrypt_epoch, change.min_encrypt_epoch, change.deletion_allowed)
    await seat.opened.custodian.change_epochs(found.scope, wanted, seat.about(found, "key.policy", told))
    seat.opened.directory.forget(found.scope.tenant)
    return _info(await seat.opened.custodian.status(await seat.namespace(tenant, namespace)))


@router.post("/tenants/{tenant}/namespaces/{namespace}/shred")
async def shred_namespace(
    seat: Seated, tenant: TenantName, namespace: NamespaceName, confirm: Confirm = None
) -> Shredded:
    """Destroy the namespace's key: nothing of it opens again, from whatever copy or backup."""
    seat.require(Permission.SHRED)
    found = await seat.namespace(tenant, namespace)
    confirmed(confirm, found.name)
    await seat.opened.custodian.shred(found.scope, seat.about(found, "namespace.shred"))
    seat.opened.directory.forget(found.scope.tenant)
    return Shredded(shredded=[found.name])


@router.post("/tenants/{tenant}/shred")
async def shred_tenant(seat: Seated, tenant: TenantName, confirm: Confirm = None) -> Shredded:
    """Destroy the keys of all of a tenant's namespaces. While one is protected, none is touched."""
    seat.require(Permission.SHRED)
    seat.require(Permission.TENANT)
    owner = await seat.tenant(tenant)
    catalog = seat.opened.rooms.catalog
    row = await catalog.describe_tenant(owner)
    confirmed(confirm, "" if row is None else row.name)
    found = await catalog.namespaces(owner)
    for one in found:
        if owner == seat.caller.tenant:
            seat.caller.namespace(one.name)
        check_unprotected(one)
    for one in found:
        await seat.opened.custodian.shred(one.scope, seat.about(one, "namespace.shred"))
    seat.opened.directory.forget(owner)
    return Shredded(shredded=[one.name for one in found])


def _info(status: KeyStatus) -> NamespaceKeyInfo:
    namespace = status.namespace
    return NamespaceKeyInfo(
        namespace=namespace.name,
        state=namespace.state,
        epoch=namespace.epoch,
        min_decrypt_epoch=namespace.min_decrypt_epoch,
        min_encrypt_epoch=namespace.min_encrypt_epoch,
        deletion_allowed=namespace.deletion_allowed,
        destroyed=status.destroyed,
        versions=dict(status.versions),
        epochs=[
            EpochInfo(epoch=one.epoch, created_ms=one.created_ms, live_chunks=one.live_chunks) for one in status.epochs
        ],
    )
