"""Stand-ins for SGLang's host pools, which need a GPU's kernels to be imported.

They follow what ``mem_cache/pool_host/mha.py`` and ``mla.py`` of SGLang 0.5.23 say: the dimensions of ``kv_buffer`` for
each layout, ``get_page_buffer_meta`` (addresses and sizes of each page: K, then V; one buffer for MLA), the flat pages
of the older interface, and the attributes that a backend may read.
"""

from __future__ import annotations

from typing import Any

import torch


class _Pool:
    layer_num: int
    page_size: int
    layout: str
    dtype: torch.dtype
    kv_buffer: torch.Tensor
    storage_format_tag: str | None = None
    start_layer = 0

    @property
    def end_layer(self) -> int:
        return self.layer_num

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


class MHATokenToKVPoolHost(_Pool):
    def __init__(self, layout: str = "page_first", **changes: Any) -> None:
        self.layer_num, self.head_num, self.head_dim, self.page_size = 3, 2, 16, 8
        self.dtype, self.size, self.layout = torch.bfloat16, 1024, layout
        vars(self).update(changes)
        self.v_head_dim = self.head_dim
        pages, inner = self.size // self.page_size, (self.head_num, self.head_dim)
        dims = {
            "layer_first": (2, self.layer_num, self.size, *inner),
            "page_first": (2, self.size, self.layer_num, *inner),
            "page_first_direct": (2, pages, self.layer_num, self.page_size, *inner),
        }[layout]
        self.kv_buffer = torch.zeros(dims, dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        assert self.layout != "layer_first"
        token = self.layer_num * self.head_num * self.head_dim * self.itemsize
        v_offset = token * self.size
        pointers = []
        for index in indices.tolist()[:: self.page_size]:
            k = self.kv_buffer.data_ptr() + index * token
            pointers += [k, k + v_offset]
        return pointers, [token * self.page_size] * len(pointers)

    def get_data_page(self, index: int) -> torch.Tensor:
        page = index // self.page_size
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, index : index + self.page_size].flatten()
        if self.layout == "page_first":
            return self.kv_buffer[:, index : index + self.page_size].flatten()
        return self.kv_buffer[:, page : page + 1].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(
            (2, self.layer_num, self.page_size, self.head_num, self.head_dim), dtype=self.dtype
        ).flatten()


class MLATokenToKVPoolHost(_Pool):
    def __init__(self, layout: str = "page_first", **changes: Any) -> None:
        self.layer_num, self.kv_cache_dim, self.page_size = 3, 40, 8
        self.dtype, self.size, self.layout = torch.bfloat16, 1024, layout
        vars(self).update(changes)
        pages = self.size // self.page_size
        dims = {
            "page_first": (self.size, self.layer_num, 1, self.kv_cache_dim),
            "page_first_direct": (pages, self.layer_num, self.page_size, 1, self.kv_cache_dim),
        }[layout]
        self.kv_buffer = torch.zeros(dims, dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        token = self.layer_num * self.kv_cache_dim * self.itemsize
        pointers = [self.kv_buffer.data_ptr() + index * token for index in indices.tolist()[:: self.page_size]]
        return pointers, [token * self.page_size] * len(pointers)

    def get_data_page(self, index: int) -> torch.Tensor:
        page = index // self.page_size
        if self.layout == "page_first":
            return self.kv_buffer[index : index + self.page_size].flatten()
        return self.kv_buffer[page : page + 1].flatten()

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros((self.layer_num, self.page_size, 1, self.kv_cache_dim), dtype=self.dtype).flatten()
