"""SGLang: a HiCache storage backend that keeps pages in a gateway and takes them back in any server of its kind.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config @sglang-hicache.json

The whole command line is in docs/engines/sglang.md. Needs SGLang 0.5.23 or newer, which is imported with the backend
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgw.engines.sglang.backend import KvgwHiCache

__all__ = ["KvgwHiCache"]


def __getattr__(name: str) -> object:
    if name != "KvgwHiCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvgw.engines.sglang.backend import KvgwHiCache

    return KvgwHiCache
