"""Making what a tenant needs before its first chunk: namespaces with keys of their own, tokens."""

from __future__ import annotations

from uuid import UUID

from tenancy.catalog import Catalog
from tenancy.keys.keyring import Keyring
from tenancy.model import Scope
from tenancy.policy import Policy
from tenancy.ports import RandomBytes
from tenancy.registrar import GATEWAY


async def create_namespace(
    catalog: Catalog,
    keyring: Keyring,
    random_bytes: RandomBytes,
    now_ms: int,
    tenant: UUID,
    name: str,
    policy: Policy,
    actor: str = GATEWAY,
) -> Scope:
    """Make a namespace with keys of its own. Its id is new even if a namespace of this name was there before.

    Raises `RegistryRefused` when the name is taken or is not a name, or the tenant gets no more.
    """
    await catalog.check_new_namespace(tenant, name)  # before keys are made, which would stay in the store
    scope = Scope(tenant, UUID(bytes=random_bytes(16), version=4))
    await catalog.create_namespace(scope, name, policy, await keyring.create(scope), now_ms, actor)
    return scope
