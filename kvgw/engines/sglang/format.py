"""The KV format of one rank's pages: from its place in the deployment and the host pool that it registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvgw.engines.sglang.options import SglangOptions
from kvgw.errors import FormatError
from kvgw.kvformat import KVFormat, LayerGroup

PAGE_FIRST: Final = ("page_first", "page_first_direct")
"""Layouts whose pages lie together in memory."""

_TORCH_NAMES: Final = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's place. KV that is the same on all tensor-parallel ranks (MLA) has no rank: one writes, all read."""

    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    replicated: bool

    @property
    def parallel(self) -> tuple[int, int, int, int, int, int]:
        """As in `KVFormat`."""
        return (self.tp_size, 0 if self.replicated else self.tp_rank, self.pp_size, self.pp_rank, 1, 0)


def rank_of(config: Any) -> Rank:
    """The place of a rank. `config`: SGLang's ``HiCacheStorageConfig``. Raises `FormatError` for what is not served."""
    if config.attn_cp_size > 1 or config.dcp_size > 1:
        raise FormatError("context parallelism spreads the tokens of a page over ranks; kvgw does not serve it")
    if config.should_split_heads:
        raise FormatError("kvgw does not split pages by heads: leave tp_lcm_size out of the extra config")
    return Rank(config.tp_size, config.tp_rank, config.pp_size, config.pp_rank, config.is_mla_model)


def format_of(
    pool: Any, rank: Rank, options: SglangOptions, model: str | None, abi: Sequence[tuple[str, str]]
) -> KVFormat:
    """Everything that must be equal before this rank may use a page.

    `pool`: the ``HostKVCache`` that SGLang registered. `abi`: versions and hardware. Raises `FormatError` for a pool
    whose pages kvgw does not keep.
    """
    if options.interface_v1 and pool.layout not in PAGE_FIRST:
        raise FormatError(
            f"the host pool's layout is {pool.layout!r}; start SGLang with --hicache-mem-layout page_first_direct or "
            "page_first"
        )
    name = options.model or (model or "").rstrip("/").rsplit("/", 1)[-1]
    if not name:
        raise FormatError("SGLang tells no model name; set 'model' in the extra config")
    tag = getattr(pool, "storage_format_tag", None)
    layout = ";".join([pool.layout, type(pool).__name__, *([f"tag={tag}"] if tag else [])])
    return KVFormat(
        model=name,
        weights=options.weights or "",
        tokenizer=options.tokenizer or "",
        kv_dtype=_kv_dtype(pool, options),
        kv_quantisation=None,
        adapter=None,  # SGLang's page keys are seeded with the adapter's name
        adapter_digest=None,
        positions=("kind", "of the weights"),
        attention=(_layers(pool, rank.replicated),),
        layout=layout,
        tokens_per_chunk=pool.page_size,
        engine="sglang",
        engine_abi=";".join(f"{part}={value}" for part, value in abi),
        parallel=rank.parallel,
        multimodal=None,
        extra=(("compatibility", options.compatibility), ("layers", f"{pool.start_layer}-{pool.end_layer}")),
    )


def check_page(kv_format: KVFormat, sizes: Sequence[int]) -> None:
    """Raise `FormatError` unless the buffers of one page, of `sizes` bytes, hold what the format says."""
    wanted = 1 if kv_format.attention[0].kind == "mla" else 2
    if len(sizes) != wanted or sum(sizes) != kv_format.chunk_bytes:
        raise FormatError(
            f"a page of the host pool has {len(sizes)} buffers with {sum(sizes)} bytes, and its dimensions give "
            f"{wanted} with {kv_format.chunk_bytes}; kvgw does not keep pools with scales or indices beside them"
        )


def _layers(pool: Any, replicated: bool) -> LayerGroup:
    names = ("layer_num", "kv_cache_dim") if replicated else ("layer_num", "head_num", "head_dim")
    missing = [name for name in names if not isinstance(getattr(pool, name, None), int)]
    if missing:
        raise FormatError(
            f"the host pool {type(pool).__name__} has no {', '.join(missing)}; kvgw keeps pages of MHA and MLA pools"
        )
    if replicated:
        return LayerGroup("mla", pool.layer_num, latent_dim=pool.kv_cache_dim, rope_dim=0)
    values = getattr(pool, "v_head_dim", pool.head_dim)
    return LayerGroup(
        "mha",
        pool.layer_num,
        kv_heads=pool.head_num,
        head_dim=pool.head_dim,
        v_head_dim=None if values == pool.head_dim else values,
    )


def _kv_dtype(pool: Any, options: SglangOptions) -> str:
    """The element type: the pool's, or the setting where the pool keeps bare bytes and several types look alike."""
    name = str(pool.dtype).removeprefix("torch.")
    name = _TORCH_NAMES.get(name, name)
    if name not in ("uint8", "int8"):
        if options.kv_dtype not in (None, name):
            raise FormatError(f"kv_dtype is {options.kv_dtype!r} in the extra config, and the host pool has {name!r}")
        return name
    if options.kv_dtype is None:
        raise FormatError(f"the host pool has {name}, which says not which fp8 it is; set 'kv_dtype'")
    return options.kv_dtype
