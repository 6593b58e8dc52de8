"""SGLang's real host pools on a machine without a GPU.

They copy between GPU and host memory, which is not done here; what a storage backend uses of them is all host memory:
their buffers, `get_page_buffer_meta` and the flat pages. To be imported they need torchvision, whose package loads with
PyTorch for CPUs as soon as the names of its operators are known.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch


def _name_torchvisions_operators() -> torch.library.Library:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError("torchvision is not installed")
    source = Path(spec.origin).with_name("_meta_registrations.py").read_text(encoding="utf-8")
    library = torch.library.Library("torchvision", "DEF")
    for names in set(re.findall(r'register_meta\("(\w+)"\)|register_fake\("torchvision::(\w+)"\)', source)):
        library.define(f"{''.join(names)}(Tensor a) -> Tensor")
    return library


if torch.version.cuda is None:
    OPERATORS = _name_torchvisions_operators()

from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

TOKENS = 1024
"""Of a pool in host memory."""


def _pointers(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _shared(layers: int, page_size: int, layout: str) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 1.0,
        "host_size": 0,
        "page_size": page_size,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": TOKENS // 2,
        "start_layer": 0,
        "end_layer": layers,
        "host_token_capacity": TOKENS,
    }


def mha_pool(
    *,
    layout: str = "page_first",
    layers: int = 3,
    heads: int = 2,
    head_dim: int = 16,
    page_size: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> MHATokenToKVPoolHost:
    device = [torch.zeros((page_size, heads, head_dim), dtype=dtype) for _ in range(2 * layers)]
    keys, values = device[:layers], device[layers:]
    buffers = KVBuffers(
        k=tuple(keys),
        v=tuple(values),
        k_data_ptrs=_pointers(keys),
        v_data_ptrs=_pointers(values),
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page_size,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(info, **_shared(layers, page_size, layout))


def mla_pool(
    *,
    layout: str = "page_first",
    layers: int = 3,
    rank: int = 32,
    page_size: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> MLATokenToKVPoolHost:
    device = [torch.zeros((page_size, 1, rank + 8), dtype=dtype) for _ in range(layers)]
    info = MLABufferInfo(
        buffers=tuple(device),
        data_ptrs=_pointers(device),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=rank,
        qk_rope_head_dim=8,
        kv_cache_dim=rank + 8,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(info, target_layer_num=layers, **_shared(layers, page_size, layout))
