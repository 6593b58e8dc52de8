"""LMCache: an L2 adapter that keeps chunks in a gateway and takes them back in any LMCache server of its kind.

    lmcache server … --l2-adapter '{"type": "plugin", "module_path": "kvgw.engines.lmcache", "class_name": "KvgwL2", …}'

The whole command line is in docs/engines/lmcache.md. Needs LMCache 0.5.6 or newer, which is imported with the adapter
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgw.engines.lmcache.adapter import KvgwL2

__all__ = ["KvgwL2"]


def __getattr__(name: str) -> object:
    if name != "KvgwL2":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvgw.engines.lmcache.adapter import KvgwL2

    return KvgwL2
