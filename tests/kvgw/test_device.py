"""Windows as tensors, gathered and scattered; page-locking as the real CUDA runtime answers it.

The success of page-locking and copies of CUDA tensors need a GPU: tests marked ``gpu``, skipped with the runtime's own
answer where there is none.
"""

from __future__ import annotations

import importlib.util
import mmap
import subprocess
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from kvgw import device
from kvgw.device import DeviceUnavailable
from kvgw.errors import FormatError
from kvgw.kvformat import DTYPE_BYTES

CANARY = b"\xa5" * 64


def memory_of(size: int) -> memoryview:
    """Zeroed, page-aligned host memory of `size` bytes."""
    return memoryview(mmap.mmap(-1, size))


def pattern(size: int) -> bytes:
    return bytes((index * 37 + 11) % 251 for index in range(size))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


class FakeRuntime(types.ModuleType):
    """Stands in for cupy.cuda.runtime: counts registrations, and refuses on demand with a CUDA error code."""

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status: int) -> None:
            super().__init__(f"cudaError {status}")
            self.status = status

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.registered: dict[int, int] = {}
        self.refuse: int | None = None

    def hostRegister(self, address: int, length: int, flags: int) -> None:
        if self.refuse is not None:
            raise self.CUDARuntimeError(self.refuse)
        assert flags == 1
        self.registered[address] = length

    def hostUnregister(self, address: int) -> None:
        if self.refuse is not None:
            raise self.CUDARuntimeError(self.refuse)
        del self.registered[address]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    cuda = types.ModuleType("cupy.cuda")
    cuda.runtime = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return fake


@pytest.fixture
def gpu() -> Iterator[memoryview]:
    """A page-locked window of 1 MiB, or a skip with what the CUDA runtime answered."""
    window = memory_of(1 << 20)
    try:
        region = device.pin(window)
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    with region:
        yield window


def test_importing_the_module_imports_neither_torch_nor_cupy() -> None:
    code = "import sys, kvgw.device; print([name for name in ('torch', 'cupy', 'numpy') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_kv_dtype_is_seen_without_a_copy(dtype: str) -> None:
    size = DTYPE_BYTES[dtype]
    window = memory_of(6 * size)
    tensor = device.tensor_view(window, dtype, (2, 3))
    assert (tuple(tensor.shape), tensor.element_size()) == ((2, 3), size)
    window[:] = pattern(6 * size)
    assert bytes_of(tensor) == pattern(6 * size)
    tensor.view(torch.uint8).zero_()
    assert bytes(window) == bytes(6 * size)


def test_values_of_the_narrow_dtypes_are_the_ones_engines_mean() -> None:
    window = memory_of(2)
    window[:] = bytes([0x38, 0x38])
    assert device.tensor_view(window[:1], "fp8_e4m3", (1,)).item() == 1.0
    assert device.tensor_view(window[:1], "fp8_e5m2", (1,)).item() == 0.5
    window[:] = bytes([0x80, 0x3F])
    assert device.tensor_view(window, "bfloat16", ()).item() == 1.0


def test_a_tensor_keeps_its_memory_mapped() -> None:
    mapping = mmap.mmap(-1, 64)
    with memoryview(mapping) as window:
        tensor = device.tensor_view(window, "float32", (16,))
    with pytest.raises(BufferError):
        mapping.close()
    del tensor
    mapping.close()


@pytest.mark.parametrize(
    ("dtype", "shape", "sentence"),
    [
        ("float32", (3, 5), r"takes 60 bytes, and the window has 64"),
        ("float32", (4, 5), r"takes 80 bytes, and the window has 64"),
        ("float32", (0, 16), r"shape \(0, 16\) holds no element"),
        ("float32", (-4, -4), r"shape \(-4, -4\) holds no element"),
        ("auto", (16,), r"kv_dtype 'auto' is unknown"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(dtype: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        device.tensor_view(memory_of(64), dtype, shape)


def test_memory_that_is_no_window_is_refused() -> None:
    window = memory_of(64)
    with pytest.raises(FormatError, match="this view is read-only"):
        device.tensor_view(window.toreadonly(), "uint8", (64,))
    with pytest.raises(FormatError, match="this view is not contiguous"):
        device.tensor_view(window[::2], "uint8", (32,))
    with pytest.raises(FormatError, match="this view is empty"):
        device.pin(window[:0])
    with pytest.raises(FormatError, match="no multiple of its 4-byte elements"):
        device.tensor_view(window[2:6], "float32", (1,))


def test_a_window_of_rows_is_taken_as_an_engine_hands_it_over() -> None:
    rows = memory_of(32).cast("b", (4, 8))
    assert device.tensor_view(rows, "float16", (4, 4)).nbytes == 32


def some_tensors() -> list[torch.Tensor]:
    """Blocks as caches give them: contiguous, transposed, every other row, and of several dtypes."""
    base = torch.arange(240, dtype=torch.float32)
    return [
        base[:32].view(2, 4, 4),
        base[32:64].view(4, 8).t(),
        base[64:128].view(8, 8)[::2],
        base[:8].to(torch.bfloat16),
        base[:16].to(torch.float8_e4m3fn),
        torch.tensor(7.0),
    ]


def test_gather_and_scatter_are_inverse_and_bit_equal() -> None:
    tensors = some_tensors()
    expected = b"".join(map(bytes_of, tensors))
    around = memory_of(len(expected) + 2 * len(CANARY))
    around[: len(CANARY)] = around[-len(CANARY) :] = CANARY
    window = around[len(CANARY) : -len(CANARY)]
    device.copy_to_window(tensors, window)
    assert bytes(window) == expected
    restored = some_tensors()
    for tensor in restored:
        tensor.fill_(0)
    device.copy_from_window(window, restored)
    assert [bytes_of(tensor) for tensor in restored] == [bytes_of(tensor) for tensor in tensors]
    assert bytes(around[: len(CANARY)]) == bytes(around[-len(CANARY) :]) == CANARY


def test_a_scatter_touches_nothing_between_the_rows_of_a_target() -> None:
    cache = torch.zeros(4, 4, dtype=torch.uint8)
    window = memory_of(8)
    window[:] = b"\xff" * 8
    device.copy_from_window(window, [cache[::2]])
    assert cache.sum(dim=1).tolist() == [1020, 0, 1020, 0]


@pytest.mark.parametrize("size", [56, 60, 68, 128])
def test_R17_tensors_that_do_not_fill_the_window_move_no_byte(size: int) -> None:
    window = memory_of(size)
    window[:] = pattern(size)
    tensors = [torch.zeros(8), torch.zeros(8)]
    with pytest.raises(FormatError, match=f"the 2 tensors take 64 bytes, and the window has {size}"):
        device.copy_to_window(tensors, window)
    with pytest.raises(FormatError, match=f"the 2 tensors take 64 bytes, and the window has {size}"):
        device.copy_from_window(window, tensors)
    assert bytes(window) == pattern(size)
    assert all(bytes_of(tensor) == bytes(32) for tensor in tensors)


def test_tensors_without_a_place_of_their_own_are_refused_before_any_byte_moves() -> None:
    window = memory_of(16)
    with pytest.raises(FormatError, match=r"tensor 1 at byte 1 of the window starts at .* no multiple of its 4-byte"):
        device.copy_to_window(
            [torch.ones(1, dtype=torch.uint8), torch.ones(3), torch.ones(3, dtype=torch.int8)], window
        )
    with pytest.raises(FormatError, match="tensor 1 of 2 holds no element"):
        device.copy_to_window([torch.ones(4), torch.ones(0)], window)
    assert bytes(window) == bytes(16)


def test_caches_made_in_inference_mode_or_with_gradients_are_written() -> None:
    with torch.inference_mode():
        cache = torch.zeros(4)
    weight = torch.nn.Parameter(torch.zeros(4))
    window = memory_of(32)
    device.copy_to_window([torch.full((8,), 3.0)], window)
    device.copy_from_window(window, [cache, weight])
    assert cache.tolist() == weight.tolist() == [3.0] * 4


def test_a_pinned_region_is_registered_once_and_unregistered_once(runtime: FakeRuntime) -> None:
    mapping = mmap.mmap(-1, 8192)
    with memoryview(mapping) as window, device.pin(window[4096:]) as region:
        assert runtime.registered == {region.address: 4096}
        assert region.address % 4096 == 0
    assert runtime.registered == {}
    region.close()
    mapping.close()


def test_a_pinned_region_keeps_its_memory_mapped_and_unlocks_when_its_body_fails(runtime: FakeRuntime) -> None:
    mapping = mmap.mmap(-1, 4096)
    with memoryview(mapping) as window:
        region = device.pin(window)
    with pytest.raises(BufferError):
        mapping.close()
    with pytest.raises(ZeroDivisionError), region:
        raise ZeroDivisionError
    assert runtime.registered == {}
    mapping.close()


@pytest.mark.parametrize(("status", "advice"), [(2, "ulimit -l"), (712, "close that region first"), (100, "driver")])
def test_a_refusal_says_size_cause_and_remedy(runtime: FakeRuntime, status: int, advice: str) -> None:
    runtime.refuse = status
    with pytest.raises(
        DeviceUnavailable, match=rf"cannot page-lock 4096 bytes at 0x\w+: cudaError {status}; .*{advice}"
    ):
        device.pin(memory_of(4096))


def test_a_failed_unlock_is_an_error_and_can_be_tried_again(runtime: FakeRuntime) -> None:
    region = device.pin(memory_of(4096))
    runtime.refuse = 999
    with pytest.raises(DeviceUnavailable, match="cannot unlock 4096 bytes"):
        region.close()
    runtime.refuse = None
    region.close()
    assert runtime.registered == {}


@pytest.mark.parametrize(("name", "extra"), [("torch", "torch"), ("cupy", "gpu")])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DeviceUnavailable, match=rf"{name}.*pip install 'kvgw\[{extra}\]'") as caught:
        if name == "torch":
            device.tensor_view(memory_of(4), "uint8", (4,))
        else:
            device.pin(memory_of(4))
    assert not caught.value.retryable


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed: pip install 'kvgw[gpu]'")
def test_without_a_gpu_the_cuda_runtimes_own_answer_is_reported() -> None:
    import cupy

    if cupy.is_available():
        pytest.skip("this machine has a GPU; the refusal needs one without")
    with pytest.raises(DeviceUnavailable, match=r"cannot page-lock 4096 bytes at 0x\w+: cudaError\w+: .*; install"):
        device.pin(memory_of(4096))


@pytest.mark.gpu
def test_a_pinned_window_is_pinned_for_torch(gpu: memoryview) -> None:
    assert device.tensor_view(gpu, "uint8", (len(gpu),)).is_pinned()
    with pytest.raises(DeviceUnavailable, match="close that region first"):
        device.pin(gpu)


@pytest.mark.gpu
def test_blocks_of_a_gpu_cache_go_to_a_pinned_window_and_back(gpu: memoryview) -> None:
    cache = torch.randint(-128, 128, (32, 2, 8, 4096), dtype=torch.int8, device="cuda")
    blocks = [cache[index] for index in (3, 0, 17, 31)]
    window = gpu[: 4 * 2 * 8 * 4096]
    for _ in range(50):
        cache.add_(1)  # queued work: the gather must see its result
        device.copy_to_window(blocks, window)
        assert bytes(window) == b"".join(map(bytes_of, blocks))
    targets = [torch.zeros_like(block).transpose(0, 1) for block in blocks]
    device.copy_from_window(window, [target.transpose(0, 1) for target in targets])
    assert [bytes_of(target.transpose(0, 1)) for target in targets] == [bytes_of(block) for block in blocks]
