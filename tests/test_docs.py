"""The pages, alerts and dashboard say what the code says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvgw.kvformat import LayerGroup
from kvgw.metrics import Metrics
from kvgw.settings import Settings
from tests.kvgw.formats import VECTOR
from tests.support.deployment import COMPOSE, GATEWAYS, ROOT, port, succeeds, tool

DOCS = ROOT / "docs"
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "kvgw.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

OF_PROMETHEUS = {"job", "instance", "le"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


def load_generator() -> ModuleType:
    """docs is a folder of pages and scripts, not a package."""
    spec = importlib.util.spec_from_file_location("kvgw_docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GENERATE = load_generator()


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("page", sorted(GENERATE.PAGES))
def test_a_generated_page_is_what_the_code_says(page: str) -> None:
    assert page not in GENERATE.stale(), f"docs/{page} is old; run: make docs"


def test_a_page_that_was_changed_by_hand_is_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GENERATE, "DOCS", tmp_path)
    assert GENERATE.stale() == ["settings.md", "metrics.md"]
    assert GENERATE.main(["--check"]) == 1
    assert GENERATE.main([]) == 0
    assert GENERATE.main(["--check"]) == 0
    (tmp_path / "metrics.md").write_text("none")
    assert GENERATE.stale() == ["metrics.md"]
    assert GENERATE.main(["--chekc"]) == 2


def test_every_setting_and_every_metric_is_on_its_page() -> None:
    settings = GENERATE.settings_page()
    for section in Settings.__struct_fields__:
        inner = getattr(Settings(), section)
        for key in getattr(inner, "__struct_fields__", ("",)):
            name = "__".join(part.upper() for part in (section, key) if part)
            assert f"| `KVGW__{name}` |" in settings
    scrape = {line.split()[2] for line in Metrics().exposition().decode().splitlines() if line.startswith("# TYPE")}
    page = set(re.findall(r"(?m)^\| `(\w+)` \|", GENERATE.metrics_page()))
    assert page == {name for name in scrape if not name.endswith("_created")}


def shapes() -> Iterator[tuple[str, tuple[int, ...], list[str]]]:
    """The rows of the sizing table: its words, the numbers in them, and what it says."""
    for row in re.findall(r"(?m)^\| (\d+ layers, .*) \|$", (DOCS / "deployment.md").read_text(encoding="utf-8")):
        words, *said = [cell.strip() for cell in row.split("|")]
        yield words, tuple(map(int, re.findall(r"\d+", words))), said


@pytest.mark.parametrize(("words", "numbers", "said"), list(shapes()))
def test_the_sizes_are_those_of_the_formats(words: str, numbers: tuple[int, ...], said: list[str]) -> None:
    layers, first, second, bits = numbers
    latent = "latent" in words
    group = (
        LayerGroup("mla", layers, latent_dim=first, rope_dim=second)
        if latent
        else LayerGroup("mha", layers, kv_heads=first, head_dim=second)
    )
    assert bits == 16
    form = replace(VECTOR, attention=(group,), kv_dtype="bfloat16", tokens_per_chunk=256)
    token = form.chunk_bytes // form.tokens_per_chunk
    assert said == [str(token), _size(256 * token, "MiB", 2**20), _size(131072 * token, "GiB", 2**30)]


def _size(count: int, name: str, unit: int) -> str:
    return f"{count // unit} {name}" if count % unit == 0 else f"{count / unit:.1f} {name}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line) for line in re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", ["deployment.md", "operations.md"])
def test_links_lead_somewhere_and_settings_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        assert not anchor or anchor in anchors(DOCS / (file or page)), target
        assert (DOCS / (file or page)).is_file(), target
    known = GENERATE.settings_page()
    sections = set(Settings.__struct_fields__) - {"node"}
    for section, key in re.findall(rf"`({'|'.join(sections)})\.([a-z0-9_]+)`", text):
        if f"{section}.{key}" == "catalog.db":
            continue  # a file
        assert f"`KVGW__{section.upper()}__{key.upper()}`" in known, f"{section}.{key} is no setting"
    for path in re.findall(r"`(deploy/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


# ---------------------------------------------------------------- alerts and dashboard


def series() -> dict[str, set[str]]:
    """Labels by the name of each series of a scrape."""
    found: dict[str, set[str]] = {"up": set()}
    for name, kind, labels, _ in GENERATE.metric_rows(Metrics()):
        for suffix in SUFFIXES.get(kind, ("",)):
            # Prometheus keeps `job` for itself.
            found[name + suffix] = {"exported_job" if label == "job" else label for label in labels}
    return found


SERIES = series()


def check_expression(expression: str) -> None:
    """Raises `AssertionError` unless all series and labels of a PromQL expression are a gateway's."""
    plain = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expression)
    names = re.findall(r"\b(up|kvgw_\w+)\b", plain)
    assert names, f"{expression}: names no metric"
    assert set(names) <= SERIES.keys(), f"{expression}: no such metric {sorted(set(names) - SERIES.keys())}"
    for name, selector in re.findall(r"\b(up|kvgw_\w+)\{([^}]*)\}", plain):
        asked = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert asked <= SERIES[name] | OF_PROMETHEUS, f"{expression}: {name} has no label {sorted(asked)}"
    grouped = {
        label.strip()
        for labels in re.findall(r"\b(?:by|without|ignoring|on)\s*\(([^)]*)\)", plain)
        for label in labels.split(",")
    }
    there = OF_PROMETHEUS.union(*(SERIES[name] for name in names))
    assert grouped <= there, f"{expression}: no such label {sorted(grouped - there)}"


@pytest.mark.parametrize(
    "expression",
    [
        "1 + 1",
        "rate(kvgw_request_total[5m])",
        'kvgw_tier_up{teir="nvme"}',
        "sum by (tenant) (kvgw_requests_total)",
        'kvgw_maintenance_failures_total{name="sweep"}',
    ],
)
def test_a_wrong_expression_is_seen(expression: str) -> None:
    with pytest.raises(AssertionError, match="no"):
        check_expression(expression)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_about_metrics_that_exist_and_says_what_to_do(rule: dict[str, Any]) -> None:
    check_expression(rule["expr"])
    assert rule["labels"]["severity"] in {"critical", "warning"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors(ROOT / page)
    assert rule["alert"] in (ROOT / page).read_text(encoding="utf-8")
    labels = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert labels <= OF_PROMETHEUS.union(*SERIES.values())
    connections = re.search(r"kvgw_connections > (\d+)", rule["expr"])
    assert connections is None or 0.8 < int(connections[1]) / Settings().server.connections < 1


def test_every_alert_is_tried_when_it_should_be_silent_and_when_not() -> None:
    silent, loud = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    names = {rule["alert"] for rule in ALERTS}
    assert {one["alertname"] for one in silent["alert_rule_test"] if "exp_alerts" not in one} == names
    assert {one["alertname"] for one in loud["alert_rule_test"] if one["exp_alerts"]} == names


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "deploy/prometheus/alerts.yml"),
        ("test", "rules", "deploy/prometheus/alerts_test.yml"),
        ("check", "config", "--syntax-only", "deploy/prometheus/prometheus.yml"),
    ],
    ids=["rules", "tests", "config"],
)
def test_prometheus_agrees(arguments: tuple[str, ...]) -> None:
    succeeds(tool("promtool"), *arguments)


def test_the_gateways_of_the_compose_file_are_scraped() -> None:
    (scrape,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (static,) = scrape["static_configs"]
    ports = {port(service["environment"]["KVGW__SERVER__HTTP"]) for service in GATEWAYS.values()}
    assert {tuple(target.split(":")) for target in static["targets"]} == {(name, str(*ports)) for name in GATEWAYS}
    assert scrape["metrics_path"] == "/metrics"
    service = COMPOSE["services"]["prometheus"]
    assert service["profiles"] == ["monitoring"]
    assert Path(scrape["authorization"]["credentials_file"]).name in service["secrets"]
    assert "credentials" not in scrape["authorization"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_is_about_metrics_that_exist(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        check_expression(target["expr"].replace("$__rate_interval", "5m"))
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert legend <= OF_PROMETHEUS.union(*SERIES.values())
        assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24


def test_the_dashboard_shows_every_metric_once_laid_out() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    expressions = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    shown = set(re.findall(r"\bkvgw_\w+", expressions))
    assert {name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for name in SERIES} - {
        name.removesuffix("_bucket") for name in shown
    } == {"up"}
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}


def test_prometheus_reads_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [
        {"record": f"kvgw:panel:{number}", "expr": text.replace("$__rate_interval", "5m").replace("$instance", ".*")}
        for number, text in enumerate(expressions)
    ]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    succeeds(tool("promtool"), "check", "rules", str(file))
