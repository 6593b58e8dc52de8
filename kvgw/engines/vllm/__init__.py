"""vLLM: a KV connector that keeps the KV cache of prompts in a gateway and takes it back in any engine of its kind.

    --kv-transfer-config '{"kv_connector": "KvgwConnector", "kv_connector_module_path": "kvgw.engines.vllm", …}'

The whole command line is in docs/engines/vllm.md. Needs vLLM 0.32 or newer, which is imported with the connector only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgw.engines.vllm.connector import KvgwConnector

__all__ = ["KvgwConnector"]


def __getattr__(name: str) -> object:
    if name != "KvgwConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvgw.engines.vllm.connector import KvgwConnector

    return KvgwConnector
