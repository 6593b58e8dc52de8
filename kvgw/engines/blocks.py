"""Between the blocks of a paged KV cache and the bytes of chunks.

A cache is one tensor per layer whose first dimension counts the engine's blocks. A chunk holds, for each layer in
order, its blocks in order, each row-major: whatever the engine keeps inside a block travels as it is.

On a CPU every path is tested. `gather` and `scatter` of CUDA tensors have tests marked ``gpu`` and are unverified
where those were skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvgw.device import copy_to_window
from kvgw.errors import FormatError

if TYPE_CHECKING:
    import torch


class Paged:
    """The caches of one worker, one tensor per layer, as rows of bytes [blocks, bytes of a block]."""

    def __init__(self, caches: Sequence[torch.Tensor], blocks: int) -> None:
        """`blocks`: how many the engine counts. A cache may have each of them in several parts, one behind the other.

        Raises `FormatError` for tensors that are not of that kind.
        """
        self._caches = [_rows(index, cache, blocks) for index, cache in enumerate(caches)]
        if not self._caches:
            raise FormatError("the engine registered no KV cache")
        self.blocks = blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(cache[0].numel() for cache in self._caches)

    def gather(self, blocks: Sequence[int], window: memoryview) -> Callable[[], None]:
        """Copy `blocks` of every layer into a chunk, behind the work that is queued on their device.

        The blocks may be overwritten as soon as this returns; the window is filled when the function that it returns
        has run, in any thread, which it blocks as long as the device needs.
        """
        import torch

        device = self._caches[0].device
        with torch.inference_mode():
            index = torch.tensor(blocks, dtype=torch.long, device=device)
            if device.type != "cuda":
                for cache, part in zip(self._caches, self._parts(window, len(blocks)), strict=True):
                    torch.index_select(cache, 0, index, out=part)
                return lambda: None
            copies = [cache.index_select(0, index) for cache in self._caches]
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(device))

        def fill() -> None:
            copied.synchronize()
            copy_to_window(copies, window)

        return fill

    def scatter(self, window: memoryview, blocks: Sequence[int], skip: int = 0) -> None:
        """Overwrite `blocks` of every layer, but for the first `skip`, from a chunk; on return all of it is there."""
        import torch

        device = self._caches[0].device
        with torch.inference_mode():
            index = torch.tensor(blocks[skip:], dtype=torch.long, device=device)
            for cache, part in zip(self._caches, self._parts(window, len(blocks)), strict=True):
                cache.index_copy_(0, index, part[skip:].to(device))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _parts(self, window: memoryview, blocks: int) -> list[torch.Tensor]:
        """For each layer, a view [blocks, block of that layer] of its bytes in `window`."""
        import torch

        flat = torch.frombuffer(window, dtype=torch.uint8)
        if flat.numel() != blocks * self.block_bytes:
            raise FormatError(
                f"{blocks} blocks take {blocks * self.block_bytes} bytes, and the window has {flat.numel()}"
            )
        sizes = [blocks * cache[0].numel() for cache in self._caches]
        ends = list(itertools.accumulate(sizes))
        return [
            flat[end - size : end].view(blocks, *cache.shape[1:])
            for cache, size, end in zip(self._caches, sizes, ends, strict=True)
        ]


def _rows(index: int, cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """`cache` as bytes, with the engine's blocks in its first dimension; a view of the same memory."""
    import torch

    parts, rest = divmod(cache.shape[0], blocks)
    if parts < 1 or rest or cache.stride(-1) != 1:
        raise FormatError(
            f"the KV cache of layer {index} has shape {list(cache.shape)} and strides {list(cache.stride())}; its "
            f"first dimension must count the engine's {blocks} blocks, and its last lie together in memory"
        )
    flat = cache.view(torch.uint8)
    return flat.view(blocks, parts, *flat.shape[1:]) if parts > 1 else flat
