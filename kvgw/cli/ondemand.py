"""A group of commands of which only the one that is run is imported: all of them together take a second."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

PLACES = {
    "serve": "serve:serve",
    "migrate": "catalog:migrate",
    "status": "inspect:status",
    "stats": "inspect:stats",
    "doctor": "doctor:doctor",
    "backup": "upkeep:backup",
    "restore": "upkeep:restore",
    "wipe": "upkeep:wipe",
    "usage": "usage:usage",
    "explain": "usage:explain",
    "recount": "recount:recount",
    "fsck": "fsck:fsck",
    "scrub": "scrub:scrub",
    "bench": "bench:bench",
    "replay": "replay:replay",
    "delete": "deletions:delete",
    "verify-receipt": "deletions:verify_receipt",
    "deletions": "deletions:deletions",
    "tenant": "tenants:tenants",
    "namespace": "namespaces:namespaces",
    "token": "tokens:tokens",
    "keys": "keys:keys",
    "node": "nodes:nodes",
    "audit": "audit:audit",
}
"""Command → module of this package and what in it: a function, or a group of commands."""

OPTIONS: dict[str, Any] = {
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,
    "add_completion": False,
}
"""Of every Typer of ours."""


class OnDemand(TyperGroup):
    """The commands of `PLACES`."""

    def list_commands(self, _context: object) -> list[str]:
        return list(PLACES)

    def get_command(self, _context: object, cmd_name: str) -> Any:
        """The command, imported; None if there is none of that name."""
        place = PLACES.get(cmd_name)
        return None if place is None else _imported(cmd_name, *place.split(":"))


def _imported(name: str, module: str, what: str) -> Any:
    found = getattr(import_module(f"kvgw.cli.{module}"), what)
    outer = typer.Typer(**OPTIONS)
    if isinstance(found, typer.Typer):
        outer.add_typer(found, name=name)
    else:
        outer.command(name)(found)
    return get_group(outer).commands[name]
