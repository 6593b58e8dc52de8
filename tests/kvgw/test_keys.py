"""Prefix keys: equal exactly when format, salt, tokens and items are equal from the first token on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgw.errors import FormatError
from kvgw.keys import MultimodalItem, prefix_keys
from tests.kvgw.formats import VECTOR

FOUR = replace(VECTOR, tokens_per_chunk=4)

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=24)


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def test_vector_keys() -> None:
    assert [key.hex() for key in prefix_keys(VECTOR, range(512))] == [
        "7a7acef7ef73cbce02dd3dcc2636dc39a844bced021c289c9bf0e70278332bd5",
        "b3b1b18a0ccbd6f1e99eaa1fd30434d158db9b063cf2b4cc0335a0bbe5f8982e",
    ]
    assert prefix_keys(VECTOR, range(256), salt=b"tenant-salt")[0].hex() == (
        "981a2a0898697107752ae8ec45cfc9a57286b7da20c5fc909724d1f63d2c20dc"
    )


@pytest.mark.parametrize(("tokens", "keys"), [(0, 0), (1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_a_chunk_that_is_not_full_has_no_key(tokens: int, keys: int) -> None:
    assert len(prefix_keys(FOUR, range(tokens))) == keys


@given(tokens_of, tokens_of)
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(head: list[int], tail: list[int]) -> None:
    short, long = prefix_keys(FOUR, head), prefix_keys(FOUR, head + tail)
    assert long[: len(short)] == short
    assert len(set(long)) == len(long)
    assert all(len(key) == 32 for key in long)


@given(tokens_of, st.data())
def test_one_other_token_changes_every_key_from_its_chunk_on(tokens: list[int], data: st.DataObject) -> None:
    if not tokens:
        return
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    before, after = prefix_keys(FOUR, tokens), prefix_keys(FOUR, changed)
    assert before[: at // 4] == after[: at // 4]
    assert not set(before[at // 4 :]) & set(after)


def test_equal_chunks_in_other_places_have_other_keys() -> None:
    assert len(set(prefix_keys(FOUR, [7] * 400))) == 100


@given(st.lists(st.binary(max_size=6), min_size=2, max_size=6, unique=True))
def test_each_salt_has_keys_of_its_own(salts: list[bytes]) -> None:
    assert len({key for salt in salts for key in prefix_keys(FOUR, range(8), salt=salt)}) == 2 * len(salts)


def test_salt_and_tokens_do_not_run_into_each_other() -> None:
    """The salt's last bytes and the first token: a boundary that a key without lengths would not see."""
    first = prefix_keys(FOUR, [0x61616161, 1, 2, 3], salt=b"aaaa")
    second = prefix_keys(FOUR, [0x61616161, 0x61616161, 1, 2, 3], salt=b"")
    assert not set(first) & set(second)


@pytest.mark.parametrize("token", [-1, 2**32, 2**64, 1.0, "1", None])
def test_tokens_outside_32_bits_are_refused(token: object) -> None:
    with pytest.raises(FormatError, match=r"from 0 to 2\*\*32-1"):
        prefix_keys(FOUR, [0, 0, 0, token])  # type: ignore[list-item]


def test_the_largest_token_is_taken() -> None:
    assert prefix_keys(FOUR, [2**32 - 1] * 4) != prefix_keys(FOUR, [2**32 - 2] * 4)


# ---------------------------------------------------------------------- R25 multimodal items

IDENTITIES = [
    *map(digest, ("image-0", "image-1", "IMAGE-0", "Image-0", "x" * 4096, "x" * 4095 + "y")),
    *(bytes([first]) + digest("")[1:] for first in (0, 1)),  # equal but for the first byte
    *(digest("") + bytes([last]) for last in (0, 1)),  # equal but for a byte behind the 32nd
    *(digest("")[:16], digest("")),  # one the beginning of the other
]


def two_items(first: bytes, second: bytes, offsets: tuple[int, int] = (5, 300)) -> list[MultimodalItem]:
    return [MultimodalItem(offset, 10, identity) for offset, identity in zip(offsets, (first, second), strict=True)]


def test_R25_each_list_of_items_has_its_own_keys_from_the_first_chunk_it_covers_on() -> None:
    per_chunk = replace(VECTOR, tokens_per_chunk=64)
    lists = [two_items(first, second) for first in IDENTITIES for second in IDENTITIES]
    lists += [two_items(one, digest("image-1"), offsets) for one in IDENTITIES for offsets in ((6, 300), (5, 301))]
    lists += [two_items(one, one)[:1] for one in IDENTITIES] + [[]]
    keys_of_seen: dict[tuple[int, tuple[tuple[int, bytes], ...]], bytes] = {}
    for items in lists:
        for chunk, key in enumerate(prefix_keys(per_chunk, range(512), items=items)):
            seen = tuple((item.offset, item.digest) for item in items if item.offset < 64 * (chunk + 1))
            assert keys_of_seen.setdefault((chunk, seen), key) == key
    assert len(set(keys_of_seen.values())) == len(keys_of_seen)


def test_R25_swapped_items_differ_and_their_order_in_the_call_does_not_matter() -> None:
    one, two = digest("image-0"), digest("image-1")
    first, second = two_items(one, two, (5, 30)), two_items(two, one, (5, 30))
    assert prefix_keys(VECTOR, range(512), items=first)[0] != prefix_keys(VECTOR, range(512), items=second)[0]
    assert prefix_keys(VECTOR, range(512), items=first) == prefix_keys(VECTOR, range(512), items=first[::-1])


@pytest.mark.parametrize(
    ("offset", "length", "first_covered"),
    [(0, 1, 0), (3, 1, 0), (3, 2, 0), (4, 1, 1), (7, 9, 1), (8, 1, 2), (12, 4, None)],
)
def test_R25_an_item_changes_the_chunks_it_covers_and_all_after(
    offset: int, length: int, first_covered: int | None
) -> None:
    bare = prefix_keys(FOUR, range(12))
    shown = prefix_keys(FOUR, range(12), items=[MultimodalItem(offset, length, digest("image-0"))])
    unchanged = 3 if first_covered is None else first_covered
    assert shown[:unchanged] == bare[:unchanged]
    assert not set(shown[unchanged:]) & set(bare)


def test_R25_an_item_across_a_boundary_enters_both_chunks() -> None:
    """Were it only in the first chunk, the second would still differ by the chain; so compare with the second alone."""
    across = prefix_keys(FOUR, range(8), items=[MultimodalItem(3, 2, digest("image-0"))])
    within = prefix_keys(FOUR, range(8), items=[MultimodalItem(3, 1, digest("image-0"))])
    assert across[0] == within[0]
    assert across[1] != within[1]


@pytest.mark.parametrize("bad", [b"", b"image-0", bytes(15), bytes(65), bytes(4096), "image-0" * 3, None, 7])
def test_R25_identities_that_are_no_content_hash_are_refused(bad: object) -> None:
    with pytest.raises(FormatError, match="digest must be 16 to 64 bytes"):
        MultimodalItem(5, 10, bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (2**32, 1), (0, 0), (0, -1), (0, 2**32), (True, 1), (0.0, 1)])
def test_R25_positions_that_no_token_has_are_refused(offset: int, length: int) -> None:
    with pytest.raises(FormatError, match=r"multimodal (offset|length)"):
        MultimodalItem(offset, length, digest("image-0"))
