"""Access: tokens and what they allow, and that no secret is written down anywhere."""

from __future__ import annotations

import os
import re
import sqlite3
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw.authenticate import Authenticator, token_row
from kvgw.errors import Code, RequestRefused
from kvgw.runtime import ThreadWorkers
from tenancy import migrate
from tenancy.access import NAME, Caller, Permission, Token, new_token, parse_token, token_digest
from tenancy.catalog import Catalog
from tenancy.engine import SqliteDatabase, sqlite_engine
from tenancy.errors import AccessDenied, RegistryRefused
from tenancy.policy import Policy
from tenancy.timekeeping import CatalogTime
from tests.support.aio import aio
from tests.support.manual_clock import ManualClock
from tests.tenancy.catalog_bench import HERE, NOW, counted_statements

TENANT = UUID(int=7)
PEPPER = b"p" * 32
YEAR_MS = 365 * 86_400_000


def caller(*patterns: str, permissions: frozenset[Permission] = frozenset(Permission)) -> Caller:
    return Caller(TENANT, "c", permissions, patterns, "default")


# Format


def test_a_token_reads_as_documented() -> None:
    token = new_token(os.urandom)
    assert re.fullmatch(r"kvgw_[a-z2-7]{16}_[A-Za-z0-9_-]{43}_[0-9A-Za-z]{6}", token.text)
    assert parse_token(token.text) == token


def test_the_known_answer_of_a_token() -> None:
    token = new_token(lambda size: bytes(range(size)))
    assert token.text == "kvgw_aaaqeayeaudaocaj_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8_3VJ1Ba"
    assert token_digest(bytes(32), token).hex() == ("dc92fed7805a4312f0ff36b44346a6e4965407cc9202f684692fab1b8bf16df6")


def test_tokens_differ_and_so_do_their_digests() -> None:
    tokens = [new_token(os.urandom) for _ in range(100)]
    assert len({token.token_id for token in tokens}) == len({token.secret for token in tokens}) == 100
    digests = {token_digest(PEPPER, token) for token in tokens}
    assert len(digests) == 100
    assert {len(digest) for digest in digests} == {32}
    one = tokens[0]
    assert token_digest(b"q" * 32, one) != token_digest(PEPPER, one), "the digest needs the pepper"
    assert token_digest(PEPPER, Token(one.token_id, tokens[1].secret)) != token_digest(PEPPER, one)


@given(st.integers(0, 10_000), st.characters(codec="ascii"))
def test_one_wrong_character_is_noticed(at: int, wrong: str) -> None:
    text = new_token(lambda size: bytes(size)).text
    at %= len(text)
    altered = text[:at] + wrong + text[at + 1 :]
    assert parse_token(altered) is None or altered == text


@pytest.mark.parametrize("change", ["", " {}", "{} ", "{}\n", "{}x", "Bearer {}"])
def test_nothing_may_be_around_a_token(change: str) -> None:
    text = new_token(os.urandom).text
    assert parse_token(change.format(text)) is None


@given(st.text(max_size=90))
def test_no_text_makes_the_parser_fail(text: str) -> None:
    assert parse_token(text) is None
    assert parse_token(f"kvgw_{text}") is None


def test_a_token_does_not_show_its_secret() -> None:
    token = new_token(os.urandom)
    assert token.secret not in repr(token)
    assert token.secret not in f"{token}"
    assert token.token_id in repr(token)


# Namespaces and permissions


@pytest.mark.parametrize(
    ("patterns", "claim", "given_"),
    [
        (("*",), "", "default"),
        (("*",), "team-a", "team-a"),
        (("team-*",), "team-a", "team-a"),
        (("team-*", "default"), "", "default"),
        (("exactly",), "exactly", "exactly"),
    ],
)
def test_a_claim_that_the_credential_covers(patterns: tuple[str, ...], claim: str, given_: str) -> None:
    assert caller(*patterns).namespace(claim) == given_


@pytest.mark.parametrize(
    ("patterns", "claim"),
    [
        (("team-*",), "other"),
        (("team-*",), ""),
        ((), "default"),
        (("exactly",), "exactly2"),
        (("*",), "../up"),
        (("*",), "UPPER"),
        (("*",), "a" * 65),
        (("*",), "-edge"),
        (("*",), "nul\0"),
        (("*",), "line\n"),
        (("*",), "ünicode"),
        (("*",), "a/b"),
    ],
)
def test_a_claim_that_it_does_not_cover_looks_like_one_that_does_not_exist(
    patterns: tuple[str, ...], claim: str
) -> None:
    with pytest.raises(AccessDenied) as caught:
        caller(*patterns).namespace(claim)
    assert str(caught.value) == "the namespace does not exist, or this credential may not use it"


@given(st.from_regex(NAME, fullmatch=True))
def test_every_name_is_plain(text: str) -> None:
    assert re.fullmatch(r"[a-z0-9._-]{1,64}", text)
    assert text[0].isalnum()
    assert text[-1].isalnum()


@pytest.mark.parametrize("permission", list(Permission))
def test_a_permission_that_is_lacking_is_named(permission: Permission) -> None:
    with pytest.raises(AccessDenied, match=re.escape(permission.value)):
        caller("*", permissions=frozenset(Permission) - {permission}).require(permission)
    caller("*", permissions=frozenset({permission})).require(permission)


@pytest.mark.parametrize(
    "changes",
    [
        {"default_ttl_ms": 0},
        {"limit_bytes": -1},
        {"limit_bytes": 2**63},
        {"limit_objects": True},
        {"limit_objects": 1.5},
        {"default_ttl_ms": 10, "max_ttl_ms": 9},
        {"durability": "forever"},
    ],
)
def test_Q05_a_policy_that_cannot_be_is_refused_by_name(changes: dict[str, object]) -> None:
    with pytest.raises(RegistryRefused, match=next(iter(changes))):
        Policy(**changes)  # type: ignore[arg-type]


# In the catalog


async def authenticator(file: Path, workers: ThreadWorkers) -> tuple[SqliteDatabase, Catalog, Authenticator]:
    database = SqliteDatabase(file, workers)
    catalog = Catalog(database, HERE)
    await catalog.create_tenant(TENANT, "t", NOW)
    clock = ManualClock(NOW)
    return database, catalog, Authenticator(catalog, clock, CatalogTime(clock, NOW), PEPPER, TENANT)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    engine = sqlite_engine(tmp_path / "catalog.db")
    with engine.begin() as connection:
        migrate.upgrade(connection)
    engine.dispose()
    return tmp_path / "catalog.db"


@aio
async def test_I17_the_catalog_holds_no_secret_and_a_malformed_token_asks_it_nothing(file: Path) -> None:
    workers = ThreadWorkers(1)
    database, catalog, authenticate = await authenticator(file, workers)
    try:
        tokens = [new_token(os.urandom) for _ in range(20)]
        for token in tokens:
            row = token_row(token, PEPPER, TENANT, frozenset({Permission.GET}), "team-* default", NOW + YEAR_MS)
            assert token.secret not in repr(row)
            await catalog.add_token(row, NOW)
        known = await authenticate.token(tokens[0].text)
        assert known.permissions == {Permission.GET}
        assert known.namespaces == ("team-*", "default")
        for wrong in ("", "kvgw_", tokens[0].text[:-1], tokens[0].text[:-1] + "-", tokens[0].text.upper()):
            with counted_statements() as seen, pytest.raises(RequestRefused) as caught:
                await authenticate.token(wrong)
            assert caught.value.code is Code.UNAUTHENTICATED
            assert seen == []
        with counted_statements() as seen:
            await authenticate.token(tokens[0].text)
        assert seen == [], "a token that was just seen is not looked up"
    finally:
        await database.aclose()
        workers.close()
    dump = sqlite3.connect(file)
    text = "\n".join(dump.iterdump()) + file.read_bytes().decode("latin-1")
    dump.close()
    for token in tokens:
        assert token.token_id in text
        assert token.secret not in text
        assert token.text not in text
    assert PEPPER.decode() not in text


@aio
async def test_every_wrong_token_gets_the_same_answer(file: Path) -> None:
    workers = ThreadWorkers(1)
    database, catalog, authenticate = await authenticator(file, workers)
    try:
        good, expired, revoked = (new_token(os.urandom) for _ in range(3))
        for token, until in ((good, NOW + YEAR_MS), (expired, NOW), (revoked, NOW + YEAR_MS)):
            await catalog.add_token(token_row(token, PEPPER, TENANT, frozenset(Permission), "*", until), NOW)
        assert await catalog.revoke_token(TENANT, revoked.token_id, NOW)
        assert not await catalog.revoke_token(TENANT, revoked.token_id, NOW)
        assert not await catalog.revoke_token(UUID(int=8), good.token_id, NOW), "another tenant's"
        await authenticate.token(good.text)
        stranger = new_token(os.urandom)
        forged = Token(good.token_id, stranger.secret)
        answers = set()
        for token in (expired, revoked, stranger, forged):
            with pytest.raises(RequestRefused) as caught:
                await authenticate.token(token.text)
            answers.add((str(caught.value), caught.value.code))
        assert len(answers) == 1
    finally:
        await database.aclose()
        workers.close()
