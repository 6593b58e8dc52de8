"""Host memory and the GPU: page-lock windows, see them as tensors, gather and scatter KV blocks.

The only room of kvgw, beside the engine adapters, that imports torch or cupy. Both are imported by the functions that
need them, so that importing this module costs nothing where neither is installed. A *window* is contiguous, writable
host memory; everything here works on it whether or not it is page-locked, which only changes the speed.

What holds without a GPU (host tensors, bounds, errors) is tested wherever kvgw is tested. The GPU paths (`pin` that
succeeds, copies of CUDA tensors) have tests marked ``gpu`` and are unverified where those were skipped.

Raises `FormatError` for memory or tensors that do not fit, before any byte moves, and `DeviceUnavailable` where the
machine lacks what was asked for.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Final

from kvgw.errors import Code, FormatError, KvgwError
from kvgw.kvformat import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

_TORCH_NAMES: Final = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""torch's names of the KV dtypes that it calls otherwise; e4m3 is the finite-only kind that engines use."""

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every CUDA context of the process, not only the current one."""

_DRIVER_ADVICE: Final = "install an NVIDIA driver that serves this CUDA version, or go on without page-locking"

_ADVICE: Final = {
    2: "lower the size, or raise the limit of locked memory (ulimit -l)",  # cudaErrorMemoryAllocation
    712: "it is, or overlaps, memory that is page-locked already; close that region first",  # …AlreadyRegistered
}
"""What to do about a CUDA error code; for any other `_DRIVER_ADVICE`."""


class DeviceUnavailable(KvgwError):
    """This machine or environment lacks the GPU, driver or library that was asked for.

    Carries the CUDA runtime's own answer. It never travels on the wire, and a retry changes nothing.
    """

    code = Code.BAD_REQUEST


class PinnedRegion:
    """Page-locked host memory; unlocked by `close` or at the end of its ``with`` block.

    It keeps the memory mapped until then. The caller closes it only after the last device copy that uses the memory
    has finished.
    """

    def __init__(self, runtime: ModuleType, window: memoryview) -> None:
        self.address = _address(window)
        self.length = window.nbytes
        self._runtime = runtime
        self._window: memoryview | None = window
        try:
            runtime.hostRegister(self.address, self.length, _PORTABLE)
        except runtime.CUDARuntimeError as error:
            self._window = None
            raise self._unavailable("page-lock", error) from error

    def close(self) -> None:
        """Unlock the memory. A second call does nothing."""
        if self._window is None:
            return
        try:
            self._runtime.hostUnregister(self.address)
        except self._runtime.CUDARuntimeError as error:
            raise self._unavailable("unlock", error) from error
        self._window = None

    def _unavailable(self, act: str, error: Exception) -> DeviceUnavailable:
        advice = _ADVICE.get(getattr(error, "status", 0), _DRIVER_ADVICE)
        return DeviceUnavailable(f"cannot {act} {self.length} bytes at {self.address:#x}: {error}; {advice}")

    def __enter__(self) -> PinnedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def pin(memory: memoryview) -> PinnedRegion:
    """Page-lock `memory` (any length; the driver rounds to whole pages) so that the GPU can copy it directly.

    Blocks, for seconds where the memory has tens of GiB: call it in a worker thread, after touching every page.
    Memory that shares a page with a region that is locked already is refused by the driver.
    """
    window = _window(memory)
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise DeviceUnavailable(
            f"page-locking needs cupy, which cannot be imported ({error}); pip install 'kvgw[gpu]'"
        ) from error
    return PinnedRegion(runtime, window)


def tensor_view(memory: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """`memory` as a tensor of KV dtype `dtype` (a key of `DTYPE_BYTES`), row-major, without a copy.

    The shape must fill the memory exactly. The tensor keeps the memory mapped, but not its owner's promise: it is
    valid as long as the window belongs to the operation.
    """
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailable(
            f"tensors need torch, which cannot be imported ({error}); pip install 'kvgw[torch]'"
        ) from error
    window = _window(memory)
    if dtype not in DTYPE_BYTES:
        raise FormatError(f"kv_dtype {dtype!r} is unknown; use one of {', '.join(DTYPE_BYTES)}")
    size = DTYPE_BYTES[dtype]
    if any(length < 1 for length in shape):
        raise FormatError(f"shape {tuple(shape)} holds no element; every dimension must be at least 1")
    needed = math.prod(shape) * size
    if needed != window.nbytes:
        raise FormatError(f"{dtype} of shape {tuple(shape)} takes {needed} bytes, and the window has {window.nbytes}")
    _check_aligned(_address(window), size, "the window")
    flat = torch.frombuffer(window, dtype=getattr(torch, _TORCH_NAMES.get(dtype, dtype)))
    return flat.view(tuple(shape))


def copy_to_window(tensors: Sequence[torch.Tensor], memory: memoryview) -> None:
    """Gather `tensors`, on the host or a GPU, one after the other and row-major, into `memory`; they must fill it.

    Each byte is copied once, after the work that was queued on the current stream; on return all of it is there.
    """
    _copy(list(zip(_places(tensors, memory), tensors, strict=True)))


def copy_from_window(memory: memoryview, tensors: Sequence[torch.Tensor]) -> None:
    """Scatter `memory` over `tensors`: the reverse of `copy_to_window`, with the same bounds."""
    _copy(list(zip(tensors, _places(tensors, memory), strict=True)))


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy (target, source) pairs; returns, or raises, only when no device touches the memory any more (law 7)."""
    import torch

    devices = {tensor.device for pair in pairs for tensor in pair if tensor.is_cuda}
    try:
        # Inference mode, because caches of engines are inference tensors, which nothing else may write.
        with torch.inference_mode():
            for target, source in pairs:
                # All copies are queued and then waited for once; other accelerators than CUDA copy one by one.
                target.copy_(source, non_blocking=target.is_cuda or source.is_cuda)
    finally:
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def _places(tensors: Sequence[torch.Tensor], memory: memoryview) -> list[torch.Tensor]:
    """For each tensor a view of its own bytes in `memory`, of the same dtype and shape."""
    import torch

    window = _window(memory)
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if sum(sizes) != window.nbytes:
        raise FormatError(f"the {len(sizes)} tensors take {sum(sizes)} bytes, and the window has {window.nbytes}")
    if 0 in sizes:
        raise FormatError(f"tensor {sizes.index(0)} of {len(sizes)} holds no element")
    start = _address(window)
    offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
    for index, (tensor, offset) in enumerate(zip(tensors, offsets, strict=True)):
        _check_aligned(start + offset, tensor.element_size(), f"tensor {index} at byte {offset} of the window")
    return [
        torch.frombuffer(window, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _window(memory: memoryview) -> memoryview:
    """`memory` as plain bytes, in a view of our own: while it lives nobody can unmap what lies under it."""
    if memory.readonly or not memory.c_contiguous or not memory.nbytes:
        kind = "read-only" if memory.readonly else "empty" if not memory.nbytes else "not contiguous"
        raise FormatError(f"a window is writable, contiguous memory of at least 1 byte, and this view is {kind}")
    return memory.cast("B")


def _address(window: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(window))


def _check_aligned(address: int, size: int, what: str) -> None:
    if address % size:
        raise FormatError(f"{what} starts at {address:#x}, which is no multiple of its {size}-byte elements")
