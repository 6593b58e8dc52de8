"""Writes the pages that follow from the code: ``settings.md`` from the settings, ``metrics.md`` from the metrics.

python docs/generate.py           write them
python docs/generate.py --check   write nothing; exit code 1 if one is not what the code says
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import inspect as types
from prometheus_client.metrics import MetricWrapperBase

from kvgw.metrics import Metrics
from kvgw.settings import Settings

DOCS: Final = Path(__file__).parent
UNITS: Final = ((1024**6, "EiB"), (1024**5, "PiB"), (1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))

SETTINGS_HEAD: Final = """\
# Settings

<!-- Written by docs/generate.py from kvgw/settings.py; change that, then run: python docs/generate.py -->

A gateway reads its settings once, when it starts: first the file, then the environment, which wins. The file is
`--config`, else `$KVGW_CONFIG`, else `kvgw.toml` in the data folder if there is one. Every setting is also a variable
`KVGW__SECTION__KEY`, with two underscores each. A setting that is unknown, of the wrong kind or out of range stops the
start and names itself. `kvgw doctor` examines all of them without starting anything.

Secrets are never settings themselves: a setting names the file that holds one.

Variables with one underscore are no settings: `KVGW_DATA` names the data folder, `KVGW_CONFIG` the settings file,
`KVGW_ENDPOINT` and `KVGW_TOKEN` the gateway and token of clients. Any other `KVGW_…` stops the start as misspelt, but
for those that Kubernetes makes from the names of services, which are noted and ignored.
"""

METRICS_HEAD: Final = """\
# Metrics

<!-- Written by docs/generate.py from kvgw/metrics.py; change that, then run: python docs/generate.py -->

`GET /metrics` on the address of `server.http`, with a bearer token that has the permission `metrics:read`, answers in
Prometheus' text format. Label values come from closed lists, so the number of series is bounded: it grows neither with
tenants nor with keys. Alerts over these metrics are in `deploy/prometheus/alerts.yml`, a dashboard in
`deploy/grafana/kvgw.json`.

Prometheus renames a label `job` of a metric to `exported_job`, because it adds a `job` of its own.
"""


def settings_page() -> str:
    """The page of all settings, a section for each section of the file."""
    top = _struct(Settings)
    own = [field for field in top.fields if _section(field) is None]
    parts = [SETTINGS_HEAD, "## At the top of the file\n\n" + _settings_table("", own)]
    for field in top.fields:
        section = _section(field)
        if section is not None:
            said = inspect.cleandoc(section.cls.__doc__ or "")
            parts.append(f"## [{field.name}]\n\n{said}\n\n" + _settings_table(field.name, section.fields))
    return "\n".join(parts)


def metrics_page() -> str:
    """The page of all metrics, as a scrape names them."""
    rows = [
        "| metric | kind | labels | what |",
        "|---|---|---|---|",
    ]
    for name, kind, labels, what in sorted(metric_rows(Metrics())):
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {_cell(what)} |")
    return METRICS_HEAD + "\n" + "\n".join(rows) + "\n"


def metric_rows(metrics: Metrics) -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Name in a scrape, kind, labels and help of each metric."""
    for collector in vars(metrics).values():
        if isinstance(collector, MetricWrapperBase) and not collector._labelvalues:  # else one series of a metric
            for family in collector.describe():
                name = f"{family.name}_total" if family.type == "counter" else family.name
                # The library has no public way to ask a metric for its label names.
                yield name, family.type, tuple(collector._labelnames), family.documentation


def _struct(struct: type[msgspec.Struct]) -> types.StructType:
    found = types.type_info(struct)
    assert isinstance(found, types.StructType)
    return found


def _section(field: types.Field) -> types.StructType | None:
    return field.type if isinstance(field.type, types.StructType) else None


def _settings_table(section: str, fields: tuple[types.Field, ...] | list[types.Field]) -> str:
    rows = ["| key | variable | value | default | what |", "|---|---|---|---|---|"]
    for field in fields:
        variable = "KVGW__" + "__".join(part.upper() for part in (section, field.name) if part)
        size = field.name.endswith("bytes")
        kind, what = _kind(field.type, size), _description(field.type)
        assert what, f"the setting {section}.{field.name} has no description: give its Meta one"
        rows.append(f"| `{field.name}` | `{variable}` | {_cell(kind)} | {_default(field, size)} | {_cell(what)} |")
    return "\n".join(rows) + "\n"


def _description(kind: types.Type) -> str:
    """What the outermost `Meta` says: a type with limits of its own may be used by several settings."""
    if isinstance(kind, types.Metadata):
        return str((kind.extra_json_schema or {}).get("description", "")) or _description(kind.type)
    return ""


def _kind(kind: types.Type, size: bool) -> str:
    if isinstance(kind, types.Metadata):
        return _kind(kind.type, size)
    if isinstance(kind, types.UnionType):
        return " or ".join("none" if isinstance(one, types.NoneType) else _kind(one, size) for one in kind.types)
    if isinstance(kind, types.LiteralType):
        return " or ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, types.BoolType):
        return "`true` or `false`"
    if isinstance(kind, types.IntType | types.FloatType):
        name = "whole number" if isinstance(kind, types.IntType) else "number"
        return f"{name}{_range(kind, size)}"
    if isinstance(kind, types.StrType):
        return "text" if kind.max_length is None else f"text of at most {kind.max_length} characters"
    raise TypeError(f"docs/generate.py does not know how to describe a setting of type {kind!r}; teach _kind()")


def _range(kind: types.IntType | types.FloatType, size: bool) -> str:
    limits = [
        f"{sign} {_number(value, size)}"
        for sign, value in (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
        if value is not None
    ]
    return f", {', '.join(limits)}" if limits else ""


def _default(field: types.Field, size: bool) -> str:
    value = field.default
    if value is msgspec.NODEFAULT:
        return "must be given"
    if value is None or value == "":
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if isinstance(value, str) else _number(value, size)


def _number(value: float, size: bool) -> str:
    """A number; a size also in the largest binary unit that it is a whole number of."""
    for unit, name in UNITS:
        if size and isinstance(value, int) and value >= unit and value % unit == 0:
            return f"{value} ({value // unit} {name})"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


PAGES: Final[dict[str, Callable[[], str]]] = {"settings.md": settings_page, "metrics.md": metrics_page}


def stale() -> list[str]:
    """Names of pages that are not what the code says."""
    return [
        name
        for name, page in PAGES.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != page()
    ]


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    if arguments not in ([], ["--check"]):
        print(f"docs/generate.py takes nothing or --check, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    names = stale()
    for name in names:
        if arguments:
            print(f"docs/{name} is not what the code says; run: python docs/generate.py", file=sys.stderr)
        else:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
            print(f"wrote docs/{name}")
    return 1 if arguments and names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
