"""Mutants of the modules that nothing may be wrong in, and whether the tests notice them (L07).

python -m tests.support.mutants                                 a sample of all modules
python -m tests.support.mutants --module tenancy.sealing --all  every mutant of one

A mutant is one small change: another comparison, `and` for `or`, a condition turned round, a number one larger, a
statement left out. No file is touched: a process of its own imports the changed module (`mutant_plugin.py`). What is
known to survive, and why, is in `mutants_known.py`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
ARGUMENTS = ("-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "tests.support.mutant_plugin",
             "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip
FOREIGN = ("hypothesis.stateful", "sqlalchemy.ext.asyncio", "msgspec", "cryptography.hazmat.primitives.ciphers.aead",
           "blake3", "psutil", "prometheus_client", "asyncio", "numpy")  # fmt: skip
"""Libraries that every run would import; none of ours, or it could not be changed any more."""

_CATALOG = (
    "tests/tenancy/test_mutex.py",
    "tests/tenancy/test_quota_machine.py",
    "tests/tenancy/test_catalog_sqlite.py",
)
_STAGING = ("tests/storage/test_staging_windows.py", "tests/storage/test_staging_residents.py",
            "tests/storage/test_staging_waiting.py", "tests/storage/test_staging_groups.py")  # fmt: skip
SUITES: dict[str, tuple[str, ...]] = {
    "tenancy.sealing": ("tests/tenancy/test_sealing_faults.py", "tests/tenancy/test_sealing_arguments.py",
                        "tests/tenancy/test_sealing_ranges.py", "tests/tenancy/test_sealing_vectors.py"),
    "tenancy.naming": ("tests/tenancy/test_naming.py",),
    "tenancy.keys.wrapping": ("tests/tenancy/test_wrapping.py", "tests/tenancy/test_wrapping_remote.py"),
    "tenancy.quota": ("tests/tenancy/test_quota.py", *_CATALOG),
    "tenancy.putting": _CATALOG,
    "tenancy.births": _CATALOG,
    "tenancy.removal": ("tests/tenancy/test_quota.py", "tests/tenancy/test_removal.py", *_CATALOG),
    "tenancy.placements": _CATALOG,
    "tenancy.sweep": _CATALOG,
    "storage.pool": ("tests/storage/test_pool.py", "tests/storage/test_pool_groups.py", *_STAGING),
    "storage.shares": ("tests/storage/test_shares.py", "tests/storage/test_pool.py", *_STAGING),
    "storage.staging": _STAGING,
    "storage.residents": _STAGING,
}  # fmt: skip
"""Modules and the tests that have to notice."""

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one module, by its number."""

    module: str
    number: int
    line: int
    change: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} #{self.number} {self.change}"


def source_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node that can be changed with what becomes of it, always in the same order."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[op]) if type(op) in _COMPARED:
                yield node, f"{type(op).__name__} → {_COMPARED[type(op)].__name__}"
            case ast.BoolOp(op=op):
                yield node, "or" if isinstance(op, ast.And) else "and"
            case ast.UnaryOp(op=ast.Not()):
                yield node, "without not"
            case ast.BinOp(op=op) if type(op) in _CALCULATED and not _is_type(node):
                yield node, f"{type(op).__name__} → {_CALCULATED[type(op)].__name__}"
            case ast.If():
                yield node, "if not"
            case ast.Constant(value=value) if type(value) is int:
                yield node, f"{value} → {value + 1}"
            case ast.Expr(value=ast.Call()):
                yield node, "left out"
            case ast.AugAssign():
                yield node, "left out"


def _is_type(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right))


def mutants_of(module: str) -> list[Mutant]:
    tree = ast.parse(source_of(module).read_text(encoding="utf-8"))
    return [
        Mutant(module, number, getattr(node, "lineno", 0), change)
        for number, (node, change) in enumerate(changes(tree))
    ]  # fmt: skip


def mutated(source: str, number: int) -> ast.Module:
    """The module with one change made."""
    tree = ast.parse(source)
    node = [one for one, _ in changes(tree)][number]
    changed = copy.copy(node)
    match changed:
        case ast.Compare(ops=[op]):
            changed.ops = [_COMPARED[type(op)]()]
        case ast.BoolOp(op=op):
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(operand=operand):
            changed = operand
        case ast.BinOp(op=op):
            changed.op = _CALCULATED[type(op)]()
        case ast.If(test=test):
            changed.test = ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=value):
            changed.value = value + 1  # type: ignore[operator]
        case _:
            changed = ast.Pass()
    return ast.fix_missing_locations(_Put(node, ast.copy_location(changed, node)).visit(tree))


class _Put(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def passes(module: str, change: str = "", limit_s: int = LIMIT_S) -> bool:
    """Whether the module's tests pass, in a process that begins as a copy of this one: that saves most imports."""
    child = os.fork()
    if child == 0:
        _be_the_tests(module, change, limit_s)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _be_the_tests(module: str, change: str, limit_s: int) -> NoReturn:
    """Run the module's tests and end; whoever does not end in time is ended by its alarm, which is a failure too."""
    signal.alarm(limit_s)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.environ["KVGW_MUTANT"] = change
    code = 3
    try:
        code = int(pytest.main([*ARGUMENTS, *SUITES[module]]))
    finally:
        os._exit(code)


def survivors(wanted: Sequence[Mutant]) -> list[Mutant]:
    """Those that no test noticed; each is printed as it is tried. Raises `SystemExit` if tests fail by themselves."""
    found: list[Mutant] = []
    limits: dict[str, int] = {}
    for mutant in wanted:
        if mutant.module not in limits:
            started = time.monotonic()
            if not passes(mutant.module):
                raise SystemExit(f"the tests of {mutant.module} fail without a mutant")
            limits[mutant.module] = 10 + int(2 * (time.monotonic() - started))  # who waits for ever is noticed
        alive = passes(mutant.module, f"{mutant.module}#{mutant.number}", limits[mutant.module])
        print(f"{'SURVIVED' if alive else 'killed  '} {mutant}", flush=True)
        if alive:
            found.append(mutant)
    return found


def sample(count: int, seed: int, modules: Sequence[str] = tuple(SUITES)) -> list[Mutant]:
    every = [mutant for module in modules for mutant in mutants_of(module)]
    return random.Random(seed).sample(every, min(count, len(every)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutants")
    parser.add_argument("--module", action="append", choices=sorted(SUITES))
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample")
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="FROM-TO", default="", help="of those, some by their place in the list")
    chosen = parser.parse_args()
    modules = chosen.module or list(SUITES)
    wanted = [mutant for module in modules for mutant in mutants_of(module)] if chosen.all else None
    wanted = wanted or sample(chosen.sample, chosen.seed, modules)
    if chosen.only:
        first, last = map(int, chosen.only.split("-"))
        wanted = wanted[first:last]
    for library in FOREIGN:
        importlib.import_module(library)
    left = survivors(wanted)
    print(f"{len(wanted) - len(left)} of {len(wanted)} killed ({1 - len(left) / len(wanted):.0%}), seed {chosen.seed}")
    return int(len(left) > 0.15 * len(wanted))


if __name__ == "__main__":
    sys.exit(main())
