"""The recurrent and convolution states of one layer on one tensor-parallel rank, in bytes.

A layer keeps one snapshot: the recurrent state, then the last columns of the convolution before it. Their element types
and the number of columns are the engine's and come from the `Deployment`.
"""

from __future__ import annotations

from kvgw.hfconfig.layers import rank_heads, rank_part
from kvgw.hfconfig.reading import Reading
from kvgw.kvformat import DTYPE_BYTES, LayerGroup


def mamba1_layer(reading: Reading) -> LayerGroup:
    """Mamba: inner × d_state elements, and a convolution over the inner channels."""
    fields = reading.fields
    inner = fields.integer("mamba_expand") * fields.integer("hidden_size")
    inner = rank_part("the inner size of Mamba", inner, reading.deployment.tp_size)
    return _layer(reading, inner * fields.integer("mamba_d_state"), inner, fields.integer("mamba_d_conv"))


def mamba2_layer(reading: Reading) -> LayerGroup:
    """Mamba 2: heads × head_dim × state elements; the convolution also covers the groups' B and C."""
    fields, tp_size = reading.fields, reading.deployment.tp_size
    heads = rank_part("mamba_num_heads", fields.integer("mamba_num_heads"), tp_size)
    inner = heads * fields.integer("mamba_head_dim")
    state = fields.integer("ssm_state_size")
    groups = rank_heads("Mamba groups", fields.integer("n_groups", "mamba_n_groups"), tp_size)
    channels = inner + 2 * groups * state
    return _layer(reading, inner * state, channels, fields.integer("conv_kernel", "mamba_d_conv"))


def gated_delta_layer(reading: Reading) -> LayerGroup:
    """Gated DeltaNet: a key_dim × value_dim matrix per value head, and a convolution over queries, keys and values."""
    fields, tp_size = reading.fields, reading.deployment.tp_size
    key_heads = rank_part("linear_num_key_heads", fields.integer("linear_num_key_heads"), tp_size)
    value_heads = rank_part("linear_num_value_heads", fields.integer("linear_num_value_heads"), tp_size)
    key_dim, value_dim = fields.integer("linear_key_head_dim"), fields.integer("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return _layer(reading, value_heads * key_dim * value_dim, channels, fields.integer("linear_conv_kernel_dim"))


def kimi_delta_layer(reading: Reading) -> LayerGroup:
    """Kimi Delta Attention: a square matrix per head, and one convolution each over queries, keys and values."""
    fields = reading.fields.mapping_or_none("linear_attn_config") or reading.fields
    prefix = "" if fields is not reading.fields else "linear_"
    heads = rank_part(f"{prefix}num_heads", fields.integer(f"{prefix}num_heads"), reading.deployment.tp_size)
    size = fields.integer(f"{prefix}head_dim")
    kernel = fields.integer("short_conv_kernel_size", "linear_conv_kernel_dim")
    return _layer(reading, heads * size * size, 3 * heads * size, kernel)


def _layer(reading: Reading, elements: int, channels: int, kernel: int) -> LayerGroup:
    recurrent = elements * DTYPE_BYTES[reading.state_dtype()]
    convolution = channels * reading.conv_columns(kernel) * DTYPE_BYTES[reading.conv_dtype()]
    return LayerGroup("state", 1, state_bytes=recurrent + convolution)
