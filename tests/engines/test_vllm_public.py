"""Public prompts through vLLM's connector: what the operator published is read by all, and written by nobody else."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.lmcache.options import parse_lmcache_options
from kvgw.engines.tenants import OWN, PUBLIC_SALT, Credential, read_tenants
from kvgw.errors import FormatError
from tests.engines.fake_vllm import CHUNK, FakeVllm
from tests.engines.test_vllm_halves import engine, options_for, serve
from tests.support.admin import Admin
from tests.support.aio import aio
from tests.support.gateways import House, house

SYSTEM = list(range(3, 3 + 3 * CHUNK))
"""Three whole chunks that all prompts begin with."""
PUBLISHER = "publisher-secret"
PERMISSIONS = ["chunk:get", "chunk:put", "chunk:delete", "ns:read"]


def prompt(user: int, chunks: int = 2) -> list[int]:
    """The system prompt, and whole chunks and a half of one user's."""
    return [*SYSTEM, *range(1000 * user, 1000 * user + chunks * CHUNK + CHUNK // 2)]


async def town(gateway: House, folder: Path, readers: list[str]) -> Path:
    """Tenants red and blue, and the operator's with a public namespace; the file that maps their values."""
    admin = Admin(gateway.opened)
    tenants: dict[str, dict[str, Any]] = {}
    for name in ("red", "blue", "operator"):
        await admin.own("POST", "/tenants", {"name": name})
        made = await admin.own("POST", f"/tenants/{name}/tokens", {"name": "t", "permissions": PERMISSIONS})
        (folder / name).write_text(made["token"])
        tenants[f"{name}-secret"] = {"token_file": name}
    policy = {"name": "prompts", "visibility": "public", "readers": readers}
    await admin.own("POST", "/tenants/operator/namespaces", policy)
    tenants[PUBLISHER] = {"token_file": "operator", "namespace": "prompts", "publishes": True}
    path = folder / "tenants.json"
    path.write_text(json.dumps({"public": ["operator/prompts"], "tenants": tenants}))
    return path


@asynccontextmanager
async def served_to(folder: Path, readers: list[str]) -> AsyncIterator[tuple[House, FakeVllm]]:
    async with house("tcp", folder / "data") as gateway:
        tenants = await town(gateway, folder, readers)
        token = folder / "own"
        token.write_text((await gateway.new_token())[0])
        options = options_for(gateway, tenants_file=str(tenants), token_file=str(token))
        async with engine(options, blocks=800) as one:
            yield gateway, one


def counts(one: FakeVllm) -> tuple[int, int]:
    return one.counters.total("tokens_public"), one.counters.total("tokens_stored")


@aio
async def test_two_tenants_begin_with_the_public_prompt_and_go_on_with_their_own(tmp_path: Path) -> None:
    """Law 6: the operator's value alone publishes."""
    async with served_to(tmp_path, ["*"]) as (_, one):
        await serve(one, [*SYSTEM, 1], cache_salt=PUBLISHER)
        assert counts(one) == (0, 3 * CHUNK)
        for number, name in enumerate(("red", "blue"), 1):
            assert (await serve(one, prompt(number), cache_salt=f"{name}-secret")).loaded == 3 * CHUNK
            assert counts(one) == (number * 3 * CHUNK, (3 + number * 2) * CHUNK), (
                "only what is the tenant's own is stored"
            )
        for number, name in enumerate(("red", "blue"), 1):
            assert (await serve(one, prompt(number), cache_salt=f"{name}-secret")).loaded == 5 * CHUNK
            assert (await serve(one, prompt(3 - number), cache_salt=f"{name}-secret")).loaded == 3 * CHUNK
        assert (await serve(one, prompt(9), cache_salt="stranger")).loaded == 3 * CHUNK
        assert counts(one)[0] == 7 * 3 * CHUNK
        assert one.counters.total("tokens_loaded") == (7 * 3 + 2 * 2) * CHUNK


@pytest.mark.parametrize("local", [4, CHUNK, 2 * CHUNK + 8, 4 * CHUNK])
def test_what_the_engine_has_itself_is_not_loaded_from_the_public_namespace(tmp_path: Path, local: int) -> None:
    @aio
    async def run() -> None:
        async with served_to(tmp_path, ["*"]) as (_, one):
            await serve(one, [*SYSTEM, 1], cache_salt=PUBLISHER)
            await serve(one, prompt(1), cache_salt="red-secret")
            before = counts(one)[0]
            assert (await serve(one, prompt(1), cache_salt="red-secret", local=local)).loaded == 5 * CHUNK - local
            assert counts(one)[0] - before == max(0, 3 * CHUNK - local)

    run()


@aio
async def test_a_tenant_that_may_not_read_keeps_the_prompt_itself(tmp_path: Path) -> None:
    """Law 6: the gateway asks who the readers are; an engine's map opens nothing."""
    async with served_to(tmp_path, ["red"]) as (_, one):
        await serve(one, [*SYSTEM, 1], cache_salt=PUBLISHER)
        assert (await serve(one, prompt(1), cache_salt="blue-secret")).loaded == 0
        assert (await serve(one, prompt(1), cache_salt="blue-secret")).loaded == 5 * CHUNK
        assert counts(one)[0] == 0
        assert (await serve(one, prompt(2), cache_salt="red-secret")).loaded == 3 * CHUNK
        assert counts(one)[0] == 3 * CHUNK


@aio
async def test_nothing_that_a_tenant_or_a_stranger_sends_is_published(tmp_path: Path) -> None:
    """Law 6. The owner's own tenant neither, except under the publisher's value."""
    async with served_to(tmp_path, ["*"]) as (gateway, one):
        for salt in ("red-secret", "operator-secret", "stranger", "publisher", "operator/prompts", None):
            await serve(one, prompt(1), cache_salt=salt)
        assert (await serve(one, prompt(1), cache_salt="blue-secret")).loaded == 0
        owner = gateway.client("prompts", token=(tmp_path / "operator").read_text())
        assert (await owner.stat()).entries == 0
        assert counts(one)[0] == 0


@aio
async def test_a_public_prompt_that_is_gone_is_computed_and_the_suffix_found_again(tmp_path: Path) -> None:
    """Law 2. What the owner deletes is missed, behind the lookup and before it."""
    async with served_to(tmp_path, ["*"]) as (gateway, one):
        await serve(one, [*SYSTEM, 1], cache_salt=PUBLISHER)
        await serve(one, prompt(1), cache_salt="red-secret")
        owner, loop = gateway.client("prompts", token=(tmp_path / "operator").read_text()), asyncio.get_running_loop()
        registered = await owner.register(one.formats[0])
        keys = registered.keys(SYSTEM, salt=PUBLIC_SALT)

        def between() -> None:
            deleted = asyncio.run_coroutine_threadsafe(owner.delete(registered, keys[1:]), loop)
            assert deleted.result(10) == 2

        assert (await serve(one, prompt(1), cache_salt="red-secret", between=between)).loaded == CHUNK
        assert one.counters.total("tokens_lost") == 4 * CHUNK, "what was found behind the gap too"
        assert (await serve(one, prompt(1), cache_salt="red-secret")).loaded == 5 * CHUNK, (
            "the gap is the tenant's own now"
        )
        assert (await serve(one, prompt(2), cache_salt="red-secret")).loaded == 3 * CHUNK
        assert (await serve(one, prompt(2), cache_salt="blue-secret")).loaded == CHUNK
        assert counts(one)[0] == (3 + 1 + 1 + 1 + 1) * CHUNK


def test_the_map_says_what_is_public(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    entry = {"token_file": "t", "namespace": "prompts", "publishes": True}
    path.write_text(
        json.dumps(
            {"by": "kv_transfer_params.who", "public": ["a/b"], "tenants": {"p": entry, "q": {"token_file": "t"}}}
        )
    )
    tenants = read_tenants(str(path), Credential())
    assert tenants.public == ("a/b",)
    assert [tenants.reads_public(name) for name in ("p", "q", OWN)] == [False, True, True]
    assert tenants.resolve("user", {"who": "p"}) == ("p", PUBLIC_SALT)
    salts = [tenants.resolve(salt, {"who": "q"})[1] for salt in ("", "public", PUBLIC_SALT.decode(), None)]
    salts += [tenants.resolve(salt, {"who": "public"})[1] for salt in ("", "public")]
    assert PUBLIC_SALT not in salts


def test_the_map_of_the_documentation_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "engines" / "vllm.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"(?s)```json\n(.*?)```", page) if '"public"' in block]
    assert len(blocks) == 1
    path = tmp_path / "tenants.json"
    path.write_text(blocks[0], encoding="utf-8")
    tenants = read_tenants(str(path), Credential())
    assert tenants.public == ("acme/prompts",)
    assert [one.namespace for one in tenants.tenants.values() if one.publishes] == ["prompts"]


@pytest.mark.parametrize(
    ("changes", "entry", "reason"),
    [
        ({"public": "a/b"}, {}, "'public' in .* must be a list"),
        ({"public": [1]}, {}, "'public' in .* must be a list"),
        ({"public": ["prompts"]}, {}, "write tenant/namespace"),
        ({"public": ["a/b"] * 5}, {}, "at most 4"),
        ({}, {"publishes": True}, "true needs a namespace"),
        ({}, {"publishes": "yes", "namespace": "prompts"}, "true or false"),
    ],
)
def test_a_map_whose_public_part_is_not_right_is_refused(
    tmp_path: Path, changes: dict[str, Any], entry: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": {"p": {"token_file": "t", **entry}}, **changes}))
    with pytest.raises(FormatError, match=reason):
        read_tenants(str(path), Credential())


def test_lmcache_refuses_a_map_with_a_public_part(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"public": ["a/b"], "tenants": {}}))
    models = {"m": {"weights": "w", "tokenizer": "t", "compatibility": "c"}}
    with pytest.raises(FormatError, match="names public namespaces"):
        parse_lmcache_options({"endpoint": "unix:/x", "models": models, "tenants_file": str(path)})
