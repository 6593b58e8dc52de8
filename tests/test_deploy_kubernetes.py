"""The Kubernetes manifests: valid, restricted, and about the gateway that is built here."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvgw.admin.app import OPEN_ROUTES
from kvgw.runtime import SystemRng, ThreadWorkers
from kvgw.settings import load
from tenancy.keys.rootkey import FileRootKey
from tests.support.aio import run as run_async
from tests.support.deployment import (
    MANIFESTS,
    RESOURCES,
    SECRET_LIKE,
    UID,
    check_command,
    containers,
    pods,
    port,
    resource,
    succeeds,
)

GIB = 1024**3
UNITS = {"Mi": 1024**2, "Gi": GIB}


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
