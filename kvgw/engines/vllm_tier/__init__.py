"""vLLM's tiered offloading: a secondary tier that keeps chunks in a gateway, for every engine of its kind.

    "secondary_tiers": [{"type": "KvgwTier", "module_path": "kvgw.engines.vllm_tier", …}]

The whole command line is in docs/engines/vllm-tier.md. Needs vLLM 0.33, which is imported with the tier only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgw.engines.vllm_tier.tier import KvgwTier

__all__ = ["KvgwTier"]


def __getattr__(name: str) -> object:
    if name != "KvgwTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvgw.engines.vllm_tier.tier import KvgwTier

    return KvgwTier
