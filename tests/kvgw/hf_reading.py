"""Reading configs in tests: what callers state, and parts of the resulting format."""

from __future__ import annotations

from dataclasses import replace

from kvgw.canonical import Value
from kvgw.hfconfig import AS_MODEL, Deployment
from kvgw.kvformat import DTYPE_BYTES, KVFormat
from tests.kvgw.hf_configs import DEPLOYMENT, Config

STATES = replace(DEPLOYMENT, state_dtype="float32", conv_dtype=AS_MODEL, conv_columns=3)
"""For models with recurrent layers, as engines run them that keep all columns of a convolution but one."""

ONCE = replace(DEPLOYMENT, k_eq_v_stored_once=True)
TWICE = replace(DEPLOYMENT, k_eq_v_stored_once=False)


def read(config: Config, deployment: Deployment = DEPLOYMENT) -> KVFormat:
    return KVFormat.from_hf_config(config, deployment)


def full_bytes(kv_format: KVFormat) -> int:
    """Bytes per token of the layers with full attention."""
    return kv_format.token_bytes


def part_bytes(kv_format: KVFormat, kind: str, tokens: int) -> int:
    size = DTYPE_BYTES[kv_format.kv_dtype]
    return sum(group.run_bytes(tokens, size) for group in kv_format.attention if group.kind == kind)


def position(kv_format: KVFormat, name: str) -> Value:
    return dict(zip(kv_format.positions[::2], kv_format.positions[1::2], strict=True))[name]


def tensor_parallel(deployment: Deployment, size: int) -> Deployment:
    return replace(deployment, parallel=(size, 0, 1, 0, 1, 0))
