"""Readers of what is deployed: the compose file, Dockerfile, manifests; and tools to check them with."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
import yaml
from typer.core import TyperGroup

from kvgw.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = f"kvgw:{PYPROJECT['project']['version']}"
UID = 12345

VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?:(:[-?])([^}]*))?\}")
SECRET_LIKE = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL|PRIVATE", re.IGNORECASE)


def interpolated(value: Any) -> Any:
    """As Compose reads it when no variable is set: defaults taken, required ones as ``required:NAME``."""

    def one(found: re.Match[str]) -> str:
        name, kind, text = found[1], found[2], found[3]
        assert kind is not None, f"${{{name}}} has neither a default nor :? with a sentence"
        return text if kind == ":-" else f"required:{name}"

    if isinstance(value, str):
        return VARIABLE.sub(one, value)
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    return {key: interpolated(item) for key, item in value.items()} if isinstance(value, dict) else value


COMPOSE = interpolated(yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = {name: service for name, service in SERVICES.items() if service["image"].startswith("kvgw:")}
GATEWAYS = {name: service for name, service in OWN.items() if service["command"][0] == "serve"}

MANIFESTS: dict[str, list[dict[str, Any]]] = {
    path.name: list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    for path in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
}
RESOURCES = [item for name, items in MANIFESTS.items() if name != "kustomization.yaml" for item in items]


def resource(kind: str) -> dict[str, Any]:
    (found,) = [item for item in RESOURCES if item["kind"] == kind]
    return found


def pods() -> list[dict[str, Any]]:
    return [resource(kind)["spec"]["template"]["spec"] for kind in ("StatefulSet", "Job")]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def dockerfile() -> Iterator[tuple[str, str]]:
    """Instruction and arguments; comments gone, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for line in re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", text)).splitlines():
        if line.strip():
            instruction, _, arguments = line.strip().partition(" ")
            yield instruction, arguments.strip()


def last(instruction: str) -> str:
    return [arguments for name, arguments in dockerfile() if name == instruction][-1]


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def check_command(arguments: list[str]) -> None:
    """Raises `AssertionError` unless `kvgw` has this command with these options."""
    command = typer.main.get_command(app)
    words = list(arguments)
    while isinstance(command, TyperGroup):
        name = words.pop(0)
        found = command.get_command(typer.Context(command), name)
        assert found is not None, f"kvgw has no command {name!r} (in: kvgw {shlex.join(arguments)})"
        command = found
    known = {option for parameter in command.params for option in parameter.opts}
    asked = {word for word in words if word.startswith("-")}
    assert asked <= known, f"kvgw {arguments[0]} has no option {sorted(asked - known)}"


def tool(name: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def surroundings(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: this one without whatever of kvgw's is set in it, and `variables`."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVGW_")} | dict(variables)


def succeeds(*command: str, **variables: str) -> None:
    """Raises `AssertionError` with the command's output unless it ends well."""
    run = subprocess.run(
        command, cwd=ROOT, env=surroundings(variables), capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


def dockerfile_arguments() -> Iterator[tuple[str, str]]:
    for name, arguments in dockerfile():
        if name == "ARG" and "=" in arguments:
            yield tuple(arguments.split("=", 1))  # type: ignore[misc]
