"""What is deployed: the compose file and the image name only what the product has, and keep their promises."""

from __future__ import annotations

import importlib.metadata
import json
import re
import stat
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvgw.admin.app import OPEN_ROUTES
from kvgw.settings import Settings, SettingsError, load
from tests.support.deployment import (
    COMPOSE,
    GATEWAYS,
    IMAGE,
    OWN,
    PYPROJECT,
    ROOT,
    SECRET_LIKE,
    SERVICES,
    UID,
    check_command,
    containers,
    dockerfile,
    dockerfile_arguments,
    interpolated,
    last,
    pods,
    port,
    succeeds,
    tool,
)

POSTGRES = ("asyncpg", "sqlalchemy[asyncio]")
"""What a catalog on PostgreSQL runs with."""


@pytest.mark.parametrize("words", [["serv"], ["serve", "--wate", "30"], ["namespace", "destroy"]])
def test_a_wrong_command_is_seen(words: list[str]) -> None:
    with pytest.raises(AssertionError, match="kvgw"):
        check_command(words)


def test_a_variable_without_default_is_seen() -> None:
    with pytest.raises(AssertionError, match="neither"):
        interpolated({"a": ["${PASSWORD}"]})
    assert interpolated("${A:-x}${B:?why}$${C}") == "xrequired:B$${C}"


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_settings_of_a_service_are_settings(name: str) -> None:
    given = OWN[name].get("environment", {})
    settings, notes = load(None, given)
    assert notes == []
    assert settings != Settings()
    with pytest.raises(SettingsError, match="nonsense"):
        load(None, given | {"KVGW__SERVER__NONSENSE": "1"})


@pytest.mark.parametrize("name", sorted(OWN))
def test_the_command_of_a_service_exists(name: str) -> None:
    check_command(OWN[name]["command"])


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_container_of_ours_can_do_little(name: str) -> None:
    service = OWN[name]
    assert service["image"] == IMAGE
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    assert service["mem_limit"]
    assert "privileged" not in service


def test_there_are_two_gateways_over_the_same_catalog_bucket_and_root_key() -> None:
    assert len(GATEWAYS) == 2
    read = [load(None, service["environment"])[0] for service in GATEWAYS.values()]
    assert len({(one.catalog.url, one.s3.bucket, one.s3.endpoint, one.keys.dir) for one in read}) == 1
    assert {one.keys.store for one in read} == {"s3"}
    assert len({one.node for one in read}) == 2
    data = [volume for service in GATEWAYS.values() for volume in service["volumes"] if "-data:" in volume]
    assert len(set(data)) == 2
    assert all("keys:/var/lib/kvgw-keys:ro" in service["volumes"] for service in GATEWAYS.values())
    # The one-shot makes the key where the gateways look for it.
    assert load(None, SERVICES["keys"]["environment"])[0].keys.dir == read[0].keys.dir


@pytest.mark.parametrize("name", sorted(GATEWAYS))
def test_a_gateway_waits_for_what_it_needs(name: str) -> None:
    done = {"condition": "service_completed_successfully"}
    assert GATEWAYS[name]["depends_on"] == {"bucket": done, "keys": done, "migrate": done}
    assert SERVICES["migrate"]["depends_on"] == {"db": {"condition": "service_healthy"}}
    assert SERVICES["bucket"]["depends_on"] == {"minio": {"condition": "service_healthy"}}
    assert GATEWAYS[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}


@pytest.mark.parametrize("name", sorted(GATEWAYS))
def test_published_and_examined_ports_are_those_listened_on(name: str) -> None:
    service = GATEWAYS[name]
    server = load(None, service["environment"])[0].server
    inside = {int(entry.rpartition(":")[2]) for entry in service["ports"]}
    assert inside == {port(server.listen), port(server.http)}
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", service["healthcheck"]["test"][-1])
    assert (int(url[0]), url[1] in OPEN_ROUTES) == (port(server.http), True)


def test_ports_are_published_on_this_machine_only_and_once() -> None:
    published = [entry for service in SERVICES.values() for entry in service.get("ports", [])]
    assert published
    assert [entry for entry in published if not entry.startswith("127.0.0.1:")] == []
    assert len({entry.split(":")[1] for entry in published}) == len(published)


def test_the_owner_of_the_tables_is_known_to_the_migration_alone() -> None:
    holders = {name for name, service in SERVICES.items() if "db-owner-password" in service.get("secrets", [])}
    assert holders == {"db", "migrate"}
    migration = load(None, SERVICES["migrate"]["environment"])[0].catalog
    assert (migration.owner_url, migration.url) == (
        "postgresql://kvgw_owner@db:5432/kvgw",
        "postgresql://kvgw_app@db:5432/kvgw",
    )


def test_secrets_are_files_without_a_default() -> None:
    for name, secret in COMPOSE["secrets"].items():
        assert secret == {"file": f"required:KVGW_COMPOSE_SECRETS/{name}"}
    for service in SERVICES.values():
        given = service.get("secrets", [])
        assert set(given) <= set(COMPOSE["secrets"])
        for variable, value in service.get("environment", {}).items():
            if SECRET_LIKE.search(variable):
                assert variable.endswith("_FILE"), f"{variable} holds a secret itself"
            if str(value).startswith("/run/secrets/"):
                assert Path(value).name in given, f"{variable} names a secret that the service is not given"


def test_images_are_pinned() -> None:
    images = {service["image"] for service in SERVICES.values()}
    images |= {container["image"] for pod in pods() for container in containers(pod)}
    images |= {f"python:{default}" for name, default in dockerfile_arguments() if name == "PYTHON"}
    assert len(images) >= 5
    assert [
        image for image in images if not re.fullmatch(r"[\w./-]+:[\w.-]*\d+\.\d+[\w.-]*|.+RELEASE\.2\S+", image)
    ] == []
    assert {image for image in images if image.startswith("kvgw")} == {IMAGE}


def test_the_secrets_script_makes_what_is_missing_and_keeps_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    succeeds("sh", "deploy/secrets.sh", str(folder))
    made = {path.name: path.read_text() for path in folder.iterdir()}
    assert made.keys() == COMPOSE["secrets"].keys() - {"metrics-token"}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{32}", text) for text in made.values())
    assert len(set(made.values())) == len(made)
    (folder / "minio-password").unlink()
    succeeds("sh", "deploy/secrets.sh", str(folder))
    again = {path.name: path.read_text() for path in folder.iterdir()}
    assert again.pop("minio-password") != made.pop("minio-password")
    assert again == made


def test_compose_understands_the_file(tmp_path: Path) -> None:
    binary = tool("docker-compose")
    succeeds(binary, "--profile", "monitoring", "config", "--quiet", KVGW_COMPOSE_SECRETS=str(tmp_path))
    with pytest.raises(AssertionError, match="KVGW_COMPOSE_SECRETS"):
        succeeds(binary, "config", "--quiet", KVGW_COMPOSE_SECRETS="")


def test_the_image_runs_as_a_number_and_starts_no_shell() -> None:
    assert last("USER") == f"{UID}:0"
    assert last("STOPSIGNAL") == "SIGTERM"
    assert len([1 for name, _ in dockerfile() if name == "FROM"]) == 2
    for name in ("CMD", "ENTRYPOINT"):
        assert isinstance(json.loads(last(name)), list), f"{name} is in shell form"
    health = re.search(r"CMD (\[.*\])", last("HEALTHCHECK"))
    assert health is not None
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", json.loads(health[1])[-1])
    assert (int(url[0]), url[1] in OPEN_ROUTES) == (port(Settings().server.http), True)
    assert json.loads(last("ENTRYPOINT")) == ["kvgw"]
    check_command(json.loads(last("CMD")))


def test_the_image_has_ports_labels_and_a_data_folder_of_its_own() -> None:
    gateway = load(None, next(iter(GATEWAYS.values()))["environment"])[0].server
    assert {int(one) for one in last("EXPOSE").split()} == {port(gateway.listen), port(gateway.http)}
    assert f'org.opencontainers.image.version="{PYPROJECT["project"]["version"]}"' in last("LABEL")
    variables = dict(part.split("=", 1) for part in last("ENV").split())
    (volume,) = json.loads(last("VOLUME"))
    assert Path(variables["KVGW_DATA"]).parent == Path(volume)
    mounts = {entry.split(":")[1] for service in OWN.values() for entry in service.get("volumes", [])}
    made = [arguments for name, arguments in dockerfile() if name == "RUN"][-1]
    assert f"--owner={UID} --group=0 --mode=0770" in made
    assert mounts <= set(made.split())


def test_the_image_is_built_from_files_that_are_sent() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        source
        for name, arguments in dockerfile()
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    }
    assert copied == sent
    assert [name for name in sent if not (ROOT / name).exists()] == []


def test_hadolint_has_nothing_to_say() -> None:
    succeeds(tool("hadolint"), "Dockerfile")


def pins(name: str) -> dict[str, str]:
    lines = (
        line.split("#")[0].split(";")[0].strip() for line in (ROOT / "requirements" / name).read_text().splitlines()
    )
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if line}


def test_the_gateways_lock_is_what_it_needs_and_agrees_with_the_developers() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    asked = [Requirement(line) for line in PYPROJECT["project"]["dependencies"] + extras["gateway"]]
    asked += [need for need in map(Requirement, [*extras["postgres"], *POSTGRES]) if need.name != "kvgw"]
    needed: dict[str, list[Requirement]] = {}
    while asked:
        need = asked.pop()
        name = canonicalize_name(need.name)
        if need in needed.setdefault(name, []):
            continue
        needed[name].append(need)
        for line in importlib.metadata.requires(need.name) or []:
            below = Requirement(line)
            worlds = [
                {"extra": extra, "python_version": version, "python_full_version": f"{version}.5"}
                for extra in ("", *need.extras)
                for version in ("3.11", "3.12", "3.13")
            ]
            if below.marker is None or any(below.marker.evaluate(world) for world in worlds):
                asked.append(below)
    gateway, developers = pins("gateway.lock"), pins("dev.lock")
    assert gateway.keys() == needed.keys()
    assert gateway == {name: developers[name] for name in gateway}
    assert [str(need) for name in needed for need in needed[name] if not need.specifier.contains(gateway[name])] == []
    assert not gateway.keys() & {"torch", "cupy-cuda13x", "transformers", "numpy", "pytest"}
