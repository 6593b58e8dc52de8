"""Whose branches guide the fuzzer: known before any of them is imported."""

from __future__ import annotations

from typing import Final

INSTRUMENTED: Final = ("kvgw.wire", "kvgw.model", "kvgw.canonical", "kvgw.kvformat", "kvgw.settings", "tenancy.sealing",
                       "tenancy.keys.wrapping", "tenancy.keys.keystore", "tomllib")  # fmt: skip
