"""The rules of the house, checked like everything else: layers, lint, types, sizes, and what no file may do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvgw", "tenancy", "storage")

GATEWAY_HALF = frozenset(
    {
        "admin",
        "authenticate",
        "bench",
        "chance",
        "cli",
        "datadir",
        "embedded",
        "examine",
        "fence",
        "gateway",
        "kms",
        "maintenance",
        "metrics",
        "replay",
        "server",
        "settings",
        "sharedkeys",
        "verify",
        "wiring",
        "witness",
    }
)
"""Modules of kvgw that only run where `kvgw[gateway]` is installed; every other one belongs to the SDK."""

KEYWORDS_DEMANDED = frozenset({"kvgw/engines/vllm_tier/tier.py", "storage/s3/client.py"})
"""Where an engine hands on its operator's settings as keywords, whatever they are; the file refuses unknown ones. And
where botocore, which refuses handlers of events that do not take any keyword, calls one.
"""

FILE_LINES_MAX = 320
TEST_LINES_MAX = 500
FUNCTION_LINES_MAX = 70

UNSAFE_MODULES = frozenset({"_pickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
UNSAFE_NAMES = frozenset(
    {"eval", "exec", "numpy.load", "torch.load", "yaml.full_load", "yaml.load", "yaml.load_all", "yaml.unsafe_load"}
)
"""What can run code, or build any object, from the bytes it is given."""

Breach = tuple[int, str]
"""Line and sentence."""


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def run_tool(*command: str) -> None:
    """Run a tool at the top of the checkout; its output is the failure's message."""
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{' '.join(command)}:\n{run.stdout}{run.stderr}"


def breaches(check: Callable[[ast.Module], Iterator[Breach]], *folders: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in python_files(*folders)
        for line, sentence in check(ast.parse(path.read_text(encoding="utf-8")))
    ]


def long_functions(tree: ast.Module) -> Iterator[Breach]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines, over {FUNCTION_LINES_MAX}: give it one job"


def keyword_catch_alls(tree: ast.Module) -> Iterator[Breach]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.kwarg is not None:
            yield node.lineno, f"takes **{node.args.kwarg.arg}: name the parameters"


def swallowed_errors(tree: ast.Module) -> Iterator[Breach]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield node.lineno, "bare except: name the errors"
            elif is_any_error(node.type) and all(is_nothing(statement) for statement in node.body):
                yield node.lineno, f"except {ast.unparse(node.type)} that does nothing: name the errors"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            wide = [argument for argument in node.args if is_any_error(argument)]
            yield from ((node.lineno, f"suppress({ast.unparse(argument)}): name the errors") for argument in wide)


def is_any_error(node: ast.expr) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(isinstance(part, ast.Name) and part.id in ("Exception", "BaseException") for part in parts)


def is_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass | ast.Continue)


def unsafe_loading(tree: ast.Module) -> Iterator[Breach]:
    full_names: dict[str, str] = {}  # what each imported name stands for, wherever in the file it was imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            full_names.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            full_names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        else:
            continue
        yield from ((node.lineno, f"imports {name}") for name in modules if name.split(".")[0] in UNSAFE_MODULES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, *rest = ast.unparse(node).split(".")
            name = ".".join([full_names.get(first, first), *rest])
            if name in UNSAFE_NAMES:
                yield node.lineno, f"uses {name}"


def test_layers_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports"))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_module_of_kvgw_is_the_gateways_or_light() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {contract["name"]: contract for contract in config["tool"]["importlinter"]["contracts"]}
    light = {name.removeprefix("kvgw.") for name in contracts["the SDK is light"]["source_modules"]}
    there = {
        path.stem for path in (ROOT / "kvgw").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    undecided = there - light - GATEWAY_HALF - {"__init__", "__main__"}
    assert not undecided, (
        f"kvgw modules {sorted(undecided)} are new: name each in the contract 'the SDK is light' in pyproject.toml, "
        "or in GATEWAY_HALF here if it needs kvgw[gateway]"
    )
    assert not light & GATEWAY_HALF


def test_lint_is_clean() -> None:
    run_tool("ruff", "check", ".")


def test_format_is_clean() -> None:
    run_tool("ruff", "format", "--check", ".")


@pytest.mark.timeout(600)
def test_types_are_clean() -> None:
    run_tool("mypy")


def test_files_are_small() -> None:
    # A migration is one list of statements and never changes again: its length says nothing.
    limits = dict.fromkeys(python_files(*PACKAGES, "docs"), FILE_LINES_MAX)
    limits |= dict.fromkeys(python_files("tests"), TEST_LINES_MAX)
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in limits}
    assert [f"{path.relative_to(ROOT)}: {lengths[path]}" for path in limits if lengths[path] > limits[path]] == []


def test_functions_are_small() -> None:
    assert breaches(long_functions, *PACKAGES, "docs") == []


def test_no_signature_takes_any_keyword() -> None:
    found = breaches(keyword_catch_alls, *PACKAGES)
    assert {breach.split(":")[0] for breach in found} == KEYWORDS_DEMANDED, found
    assert len(found) == len(KEYWORDS_DEMANDED), found


def test_no_error_is_swallowed() -> None:
    assert breaches(swallowed_errors, *PACKAGES, "migrations", "docs") == []


def test_F03_nothing_unpickles_or_evaluates() -> None:
    assert breaches(unsafe_loading, *PACKAGES, "migrations") == []


def test_nothing_is_left_to_do() -> None:
    notes = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert [str(path) for path in python_files(*PACKAGES, "migrations", "docs") if notes.search(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from shelve import open",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch as t\nload = t.load",
        "from torch import load as read\nread(path)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "eval('1')",
        "list(map(exec, lines))",
    ],
)
def test_F03_the_check_sees(source: str) -> None:
    assert list(unsafe_loading(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "connection.exec_driver_sql('BEGIN IMMEDIATE')",
        "import yaml\nyaml.safe_load(text)",
        "import json\njson.load(file)",
        "import torch\ntorch.frombuffer(window)",
        "def load(): ...\nload()",
    ],
)
def test_F03_the_check_passes(source: str) -> None:
    assert not list(unsafe_loading(ast.parse(source)))


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (long_functions, "async def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
        (keyword_catch_alls, "class A:\n    def f(self, **options): ..."),
        (keyword_catch_alls, "f = lambda **options: None"),
        (swallowed_errors, "try:\n    f()\nexcept:\n    raise"),
        (swallowed_errors, "try:\n    f()\nexcept Exception:\n    pass"),
        (swallowed_errors, "for x in y:\n    try:\n        f()\n    except (ValueError, Exception):\n        continue"),
        (swallowed_errors, "import contextlib\nwith contextlib.suppress(Exception):\n    f()"),
    ],
)
def test_the_checks_see(check: Callable[[ast.Module], Iterator[Breach]], source: str) -> None:
    assert list(check(ast.parse(source)))
