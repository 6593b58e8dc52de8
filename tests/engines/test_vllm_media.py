"""Prompts with images over the halves of the vLLM connector: equal text with another image is another prompt."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.vllm.media import items_of
from kvgw.errors import FormatError
from tests.engines.fake_vllm import CHUNK, formats
from tests.engines.test_vllm_halves import PROMPT, engine, options_for, serve
from tests.support.aio import aio
from tests.support.gateways import house

AT, LENGTH = 2 * CHUNK + 3, 4
"""An image in the third chunk."""


def image(name: str, offset: int = AT, length: int = LENGTH, *, identity: str | None = None) -> Any:
    """What vLLM says of an item: its hash covers content, processing and model."""
    mm_hash = hashlib.sha256(name.encode()).hexdigest() if identity is None else identity
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(mm_hash=mm_hash, identifier=f"lora:{mm_hash}", mm_position=position, data=None)


@aio
async def test_another_image_in_the_same_text_shares_only_what_stands_before_it(tmp_path: Path) -> None:
    """Law 2. R25."""
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT, mm_features=[image("cat")])
        for features, chunks in (
            ([image("cat")], 5),
            ([image("dog")], 2),
            ([image("cat", AT + 1)], 2),
            ([image("cat"), image("cat", 4 * CHUNK)], 4),
            ([image("cat", 0), image("cat")], 0),
            ([], 2),
        ):
            options = options_for(gateway, store=False)
            async with engine(options, blocks=200) as other:
                assert (await serve(other, PROMPT, mm_features=features)).loaded == chunks * CHUNK, features


@aio
async def test_an_image_across_chunks_is_in_the_keys_of_all_of_them(tmp_path: Path) -> None:
    wide = [image("cat", CHUNK - 2, 2 * CHUNK)]
    async with house("unix", tmp_path) as gateway:
        async with engine(options_for(gateway)) as first:
            await serve(first, PROMPT, mm_features=wide)
        async with engine(options_for(gateway), blocks=200) as other:
            assert (await serve(other, PROMPT, mm_features=[image("dog", CHUNK - 2, 2 * CHUNK)])).loaded == 0
            assert (await serve(other, PROMPT, mm_features=wide)).loaded == 5 * CHUNK


@pytest.mark.parametrize("identity", ["", "image-0", "renderer0-mm-1-image-0", "A" * 64, "g" * 64, "a" * 63, "a" * 65])
@aio
async def test_an_image_that_no_hash_names_is_left_alone(tmp_path: Path, identity: str) -> None:
    """A caller may name an image as it likes, and the same name again with another image."""
    async with house("unix", tmp_path) as gateway, engine(options_for(gateway)) as one:
        served = await serve(one, PROMPT, mm_features=[image("cat", 1), image("", identity=identity)])
        assert (served.waited, served.loaded) == (0, 0)
        assert one.counters.total("requests_not_served") == 1
        assert one.counters.total("tokens_stored") == 0
    with pytest.raises(FormatError, match="no hash of its content"):
        items_of([SimpleNamespace(mm_hash=None, mm_position=SimpleNamespace(offset=0, length=1))])


def test_an_engine_that_makes_other_input_of_images_shares_nothing() -> None:
    names = {form.canonical() for media in (None, b"a" * 32, b"b" * 32) for form in formats(1, media=media)}
    assert len(names) == 3
