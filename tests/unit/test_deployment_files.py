"""Dockerfile, compose file and manifests: valid, and every flag, port, path, secret and network in them exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import compose_spec
import kubernetes_validate
import pytest
import yaml

from deploy.certificates import make_certificates
from services._server.config import client_tls, read_settings, server_settings
from services.coordinator import __main__ as coordinator
from services.operation_manager import app as operation_manager
from services.session_store import app as session_store

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROGRAMS = {one.name: one for one in (coordinator.PROGRAM, operation_manager.PROGRAM, session_store.PROGRAM)}
SERVICES = sorted(PROGRAMS)
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.name != "kustomization.yaml")
WORKLOADS = {"Deployment", "StatefulSet"}


def compose() -> Any:
    """Return the compose file as it is where no variable is set."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text()))


def manifests(kind: str = "") -> list[Any]:
    documents = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
    return [document for document in documents if kind in ("", document["kind"])]


def pods() -> dict[str, Any]:
    return {one["metadata"]["name"]: one["spec"]["template"] for one in manifests() if one["kind"] in WORKLOADS}


def settings_of(service: str, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Return what a service makes of its flags and variables; fails where it knows one of them not."""
    known = {option.variable for option in PROGRAMS[service].options}
    foreign = {
        name for name in environment if not name.startswith("UNREAL_AGENT_LLM_") and not name.endswith("API_KEY")
    }
    assert foreign <= known
    values = read_settings(service, "", PROGRAMS[service].options, arguments, environment)
    server_settings(values)
    client_tls(values)
    return dict(values)


def check_settings(values: dict[str, dict[str, Any]]) -> None:
    """Check that the services fit each other: names that may call, addresses, TLS on every port."""
    for service, settings in values.items():
        assert settings["listen"] == ("unix:/run/unreal-agent/health.sock", "0.0.0.0:7777")
        assert all(settings[key] for key in ("tls_ca", "tls_certificate", "tls_key"))
        if service != "coordinator":
            assert settings["tls_client_ca"] == settings["tls_ca"]
            assert settings["allow_client"] == ("coordinator",)
    assert values["coordinator"]["authenticate"] == "tokens"
    assert values["coordinator"]["session_store"] == "session-store:7777"
    assert dict(values["coordinator"]["manager"]) == {
        values["operation-manager"]["manager_name"]: "operation-manager:7777"
    }
    assert values["operation-manager"]["isolation"] == "container"


def test_the_compose_file_is_read_as_an_engine_reads_it() -> None:
    read = compose_spec.PyCompose.from_yaml(yaml.safe_dump(compose()))
    read.validate()
    assert sorted(read.service_names()) == SERVICES
    with pytest.raises(ValueError, match="read_olny"):
        compose_spec.PyCompose.from_yaml("services: {one: {image: one, read_olny: true}}")


def test_services_of_the_compose_file_fit_each_other(tmp_path: Path) -> None:
    document = compose()
    make_certificates(tmp_path)
    for secret in document["secrets"].values():
        assert (tmp_path / Path(secret["file"]).name).is_file()
        assert Path(secret["file"]).parent.name == "certs"
    values = {}
    for name, service in document["services"].items():
        values[name] = settings_of(name, service["command"], service["environment"])
        targets = {f"/run/secrets/{secret['target']}" for secret in service["secrets"]}
        assert {str(values[name][key]) for key in ("tls_ca", "tls_certificate", "tls_key")} == targets
        assert {secret["source"] for secret in service["secrets"]} == {"ca", f"{name}-certificate", f"{name}-key"}
        assert service["build"]["target"] == name
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    check_settings(values)


def test_containers_may_do_little() -> None:
    for service in compose()["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"]
        assert service["pids_limit"]
        assert service["user"] == "10001:10001"


def test_the_sandbox_shares_a_network_with_the_coordinator_alone() -> None:
    document = compose()
    members: dict[str, set[str]] = {}
    for name, service in document["services"].items():
        for network in service["networks"]:
            members.setdefault(network, set()).add(name)
    assert members == {
        "records": {"coordinator", "session-store"},
        "sandbox": {"coordinator", "operation-manager"},
        "outside": {"coordinator"},
    }
    internal = {name for name, network in document["networks"].items() if network.get("internal")}
    assert internal == {"records", "sandbox"}
    assert [name for name, service in document["services"].items() if "ports" in service] == ["coordinator"]


def test_keys_of_providers_reach_the_coordinator_alone() -> None:
    for name, service in compose()["services"].items():
        assert any("API_KEY" in variable for variable in service["environment"]) == (name == "coordinator")
    for name, pod in pods().items():
        (container,) = pod["spec"]["containers"]
        assert ("envFrom" in container) == (name == "coordinator")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: cast(Path, path).name)
def test_manifests_are_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_the_kustomization_holds_every_manifest() -> None:
    named = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted(named) == [path.name for path in MANIFESTS]


def test_pods_fit_each_other() -> None:
    values = {}
    for name, pod in pods().items():
        (container,) = pod["spec"]["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        values[name] = settings_of(name, container["args"], environment)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert all(Path(values[name][key]).parent == Path(mounts["tls"]) for key in ("tls_ca", "tls_key"))
        (tls,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls")
        assert tls["secret"]["secretName"] == f"unreal-agent-{name}-tls"
        assert container["image"] == compose()["services"][name]["image"]
        assert container["ports"] == [{"name": "grpc", "containerPort": 7777}]
    assert sorted(values) == SERVICES
    check_settings(values)
    for kind in ("Service", "PodDisruptionBudget"):
        assert sorted(one["metadata"]["name"] for one in manifests(kind)) == SERVICES
    for service in manifests("Service"):
        assert service["spec"]["selector"] == pods()[service["metadata"]["name"]]["metadata"]["labels"]


def test_pods_hold_to_the_restricted_standard() -> None:
    for pod in pods().values():
        (container,) = pod["spec"]["containers"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= container.keys()


def test_policies_let_the_sandbox_reach_nothing() -> None:
    policies = {
        one["metadata"]["name"].removeprefix("unreal-agent-"): one["spec"] for one in manifests("NetworkPolicy")
    }
    assert sorted(policies) == sorted([*SERVICES, "default"])
    assert policies["default"] == {
        "podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "unreal-agent"}},
        "policyTypes": ["Ingress", "Egress"],
    }
    assert policies["operation-manager"]["egress"] == []
    coordinator_pods = {"podSelector": {"matchLabels": pods()["coordinator"]["metadata"]["labels"]}}
    for name in ("operation-manager", "session-store"):
        assert policies[name]["ingress"] == [{"from": [coordinator_pods], "ports": [{"protocol": "TCP", "port": 7777}]}]


def test_the_linter_has_nothing_to_say_of_the_images() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""


def test_images_are_what_the_services_need() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE) == [
        ("${BASE}", "build"),
        ("${BASE}", "runtime"),
        ("runtime", "session-store"),
        ("runtime", "coordinator"),
        ("runtime", "operation-manager"),
    ]
    assert "\nUSER 10001:10001\n" in text
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for name in source.split():
            assert (ROOT / name).exists(), name
    modules = re.findall(r'"-m", "([\w.]+)"(?:, "([\w.]+)")?', text)
    for name in {name for pair in modules for name in pair if name}:
        assert list(ROOT.glob(name.replace(".", "/") + "*")), name


def test_what_the_images_run_is_pinned_to_what_is_tested() -> None:
    def pins(path: Path) -> set[str]:
        return set(re.findall(r"^[\w.-]+==[\w.]+", path.read_text(), re.MULTILINE))

    assert pins(DEPLOY / "requirements.lock") <= pins(ROOT / "requirements.lock")
    entries = re.split(r"\n(?=\w)", (DEPLOY / "requirements.lock").read_text())
    assert all("--hash=sha256:" in entry for entry in entries)
