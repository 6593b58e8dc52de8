"""Blocks of paged caches in and out of chunks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvgw[torch]'")

from kvgw.engines.blocks import Paged  # noqa: E402  # needs torch
from kvgw.errors import FormatError  # noqa: E402

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def cache(device: str = "cpu", blocks: int = 10, seed: int = 0) -> torch.Tensor:
    """[blocks, heads, tokens, elements] as vLLM registers them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(blocks, 2, 4, 8, generator=generator).to(torch.bfloat16).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_go_into_a_chunk_and_into_other_blocks(device: str) -> None:
    layers = [cache(device, seed=layer) for layer in range(3)]
    paged = Paged(layers, 10)
    window = memoryview(bytearray(3 * paged.block_bytes))
    fill = paged.gather([7, 0, 3], window)
    fill()
    others = [torch.zeros_like(layer) for layer in layers]
    Paged(others, 10).scatter(window, [1, 2, 9])
    for layer, other in zip(layers, others, strict=True):
        assert torch.equal(other[[1, 2, 9]], layer[[7, 0, 3]])
        assert not other[[0, 3, 4, 5, 6, 7, 8]].any()
    assert bytes(window[:128]) == layers[0][7].cpu().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_is_what_the_blocks_held_when_it_was_taken(device: str) -> None:
    """The engine overwrites a block as soon as it is freed."""
    layer = cache(device)
    before = layer[[4]].clone()
    paged = Paged([layer], 10)
    window = memoryview(bytearray(paged.block_bytes))
    fill = paged.gather([4], window)
    layer[4] = 0
    fill()
    paged.scatter(window, [5])
    assert torch.equal(layer[[5]], before)


def test_the_first_blocks_can_be_left_alone() -> None:
    layer = cache()
    paged = Paged([layer], 10)
    window = memoryview(bytearray(b"\1" * (4 * paged.block_bytes)))
    before = layer.clone()
    paged.scatter(window, [1, 2, 3, 4], skip=3)
    assert torch.equal(layer[[0, 1, 2, 3, 5, 6, 7, 8, 9]], before[[0, 1, 2, 3, 5, 6, 7, 8, 9]])
    assert bool((layer[4].view(torch.uint8) == 1).all())


def test_an_engines_block_may_be_several_in_its_kernels() -> None:
    layer = cache(blocks=20)
    paged = Paged([layer], 10)
    window = memoryview(bytearray(2 * paged.block_bytes))
    paged.gather([6, 1], window)()
    assert bytes(window) == layer[[12, 13, 2, 3]].view(torch.uint8).numpy().tobytes()


def test_a_cache_whose_heads_lie_apart_is_copied_right() -> None:
    layer = cache().transpose(1, 2)
    paged = Paged([layer], 10)
    window = memoryview(bytearray(paged.block_bytes))
    paged.gather([2], window)()
    other = torch.zeros_like(layer)
    Paged([other], 10).scatter(window, [2])
    assert torch.equal(other[2], layer[2])


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "registered no KV cache"),
        ([torch.zeros(2, 10, 8)], "must count the engine's 10 blocks"),
        ([torch.zeros(15, 8)], "must count the engine's 10 blocks"),
        ([torch.zeros(8, 10).t()], "lie together in memory"),
    ],
)
def test_tensors_of_another_kind_are_refused(layers: list[torch.Tensor], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        Paged(layers, 10)


def test_a_window_of_another_length_is_refused() -> None:
    paged = Paged([cache()], 10)
    with pytest.raises(FormatError, match="2 blocks take 256 bytes, and the window has 128"):
        paged.scatter(memoryview(bytearray(128)), [1, 2])
