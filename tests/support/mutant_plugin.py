"""Imports one module changed, for the mutant that ``KVGW_MUTANT`` names; see `tests/support/mutants.py`."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from tests.support import aio
from tests.support.mutants import mutated

HANG_S = 15.0
"""Who waits so long waits for ever: what is tested takes seconds."""
MODULE, _, NUMBER = os.environ.get("KVGW_MUTANT", "").partition("#")


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return compile(mutated(Path(path).read_text(encoding="utf-8"), int(NUMBER)), path, "exec")


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.origin is not None
        return importlib.util.spec_from_file_location(name, spec.origin, loader=_Loader(name, spec.origin))


if MODULE:
    assert MODULE not in sys.modules, f"{MODULE} was imported before it could be changed"
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
    aio.run.__defaults__ = (HANG_S,)
