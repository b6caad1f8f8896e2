"""The Helm chart names options, ports, probes and permissions that forebay has, and its values files are valid.

The tests of rendered objects need helm, which `make chart` builds. Without it they are skipped.
"""

import asyncio
import copy
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from forebay.cli.planner.planner_file import read_planner_file
from forebay.cli.planner.services import read_supervise_file
from forebay.ingress.access_log import PROBES
from forebay.planner.actuators.kubernetes import KubernetesActuator, PodSet, connect
from forebay.processes.planner import KubernetesSettings
from forebay.processes.shutdown import CLOSE_S, REPORT_S, STOP_S
from forebay.transport.kafka.acls import ROLES
from forebay.workers.runtime.worker import ENGINE_STOP_S
from tests.command_line import commands, options, parse
from tests.harness.local import free_ports
from tests.harness.stub_servers import kubernetes_stub

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "infra/helm/forebay"
HELM = ROOT / ".tools/bin/helm"
EXAMPLES = sorted(path.name for path in CHART.glob("values-*.yaml"))
FILES = ["values.yaml", *EXAMPLES]
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
COMMANDS = {" ".join(words): command for words, command in commands()}
VARIABLES = {  # that Kubernetes replaces in arguments
    "POD_NAME": "forebay-worker-a-7c9f",
    "POD_IP": "10.0.0.7",
    "LWS_WORKER_INDEX": "0",
    "LWS_LEADER_ADDRESS": "large-0.large",
}
Settings = dict[str, Any]


def merged(base: Settings, changes: Settings) -> Settings:
    """Return what helm reads from two values files, of which the second one overrides the first one."""
    result = copy.deepcopy(base)
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = value
    return result


def load(name: str) -> Settings:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return merged(values, yaml.safe_load((CHART / name).read_text()))


def processes(values: Settings) -> dict[str, Settings]:
    """Return the settings of all roles, also of disabled ones, and of all workers."""
    workers = {f"worker-{name}": merged(values["worker"], worker) for name, worker in values["workers"].items()}
    return {**values["roles"], **workers, "topics": values["topics"]}


def arguments(process: Settings) -> list[str]:
    """Return the arguments of a process as the template `forebay.options` writes them."""
    given = list(process["command"])
    for name, value in process["options"].items():
        if isinstance(value, bool):
            given.append(f"--{'' if value else 'no-'}{name}")
            continue
        values = value if isinstance(value, list) else [value]
        given += [f"--{name}={one if isinstance(one, str) else json.dumps(one)}" for one in values]
    return given


def expanded(argument: str) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: VARIABLES[found[1]], argument)


@pytest.mark.parametrize("name", FILES)
def test_values_files_are_valid(name: str) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    Draft7Validator.check_schema(schema)
    assert [f"{fault.json_path}: {fault.message}" for fault in Draft7Validator(schema).iter_errors(load(name))] == []


def test_each_role_is_in_an_example() -> None:
    roles = [load(name)["roles"] for name in EXAMPLES]
    assert [role for role in roles[0] if not any(one[role]["enabled"] for one in roles)] == []


@pytest.mark.parametrize("name", FILES)
def test_options_are_those_of_the_command_line(name: str) -> None:
    for process, settings in processes(load(name)).items():
        parsed = parse([expanded(one) for one in arguments(settings)])
        assert parsed, process


def test_variables_of_pods_are_options() -> None:
    names = set(re.findall(r"name: FOREBAY_(\w+),", TEMPLATES["_helpers.tpl"]))
    assert names == {"KAFKA", "KAFKA_CONFIG", "NAMESPACE", "REDIS"}
    for process, settings in processes(load("values.yaml")).items():
        words = " ".join(word for word in settings["command"] if not word.startswith("/"))
        known = {one.name for one in options(COMMANDS[words])} | {"redis"}  # unused variables have no effect
        assert {name.lower() for name in names} <= known, process


def test_probes_and_ports_exist() -> None:
    for process, settings in processes(load("values.yaml")).items():
        given = settings["options"]
        ports = {settings.get("portName"): given.get("port"), "metrics": given.get("metrics-port")}
        for probe in [settings[name] for name in ("live", "ready") if name in settings]:
            ((kind, target),) = probe.items()
            assert ports[target["port"]], process
            assert kind == "tcpSocket" or target["path"] in (PROBES if process != "console" else {"/"}), process
        assert ports[settings.get("metricsPort", "metrics")] or process in ("console", "topics"), process


def test_kafka_users_are_those_of_the_acls() -> None:
    values = load("values.yaml")
    roles = {settings.get("kafkaRole", name) for name, settings in values["roles"].items()}
    assert {*roles, values["topics"]["role"], "worker"} <= set(ROLES)


def test_grace_periods_exceed_the_drains() -> None:
    values = load("values.yaml")
    margin = re.search(r"terminationGracePeriodSeconds: .* (\d+) }}", TEMPLATES["_helpers.tpl"])
    assert margin is not None
    assert float(margin[1]) >= max(STOP_S, ENGINE_STOP_S) + CLOSE_S + REPORT_S
    for words, settings in (("ingress", values["roles"]["ingress"]), ("worker", values["worker"])):
        defaults = {one.name: one.default for one in options(COMMANDS[words])}
        assert settings["options"]["drain-s"] == defaults["drain_s"]


def test_the_supervisor_may_do_what_its_actuator_does(tmp_path: Path) -> None:
    objects = {("m", "a"): PodSet("deployment", "n", "a"), ("m", "b"): PodSet("statefulset", "n", "b")}
    with kubernetes_stub({"deployments/n/a": 1, "statefulsets/n/b": 1}, free_ports(1)) as stub:
        stub.write_kubeconfig(tmp_path / "config")
        actuator = KubernetesActuator(objects, connect(str(tmp_path / "config")))
        asyncio.run(actuator.scale(dict.fromkeys(objects, 2)))
    verbs = re.search(r"verbs: \[(.*)\]", TEMPLATES["planner.yaml"])
    assert verbs is not None
    assert set(verbs[1].split(", ")) == {request.split()[0].lower() for request in stub.requests}
    assert "resources: [{{ lower $kind }}s/scale]" in TEMPLATES["planner.yaml"]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("alerts.yaml", "infra/prometheus/alerts.yaml"),
        ("dashboard.json", "infra/grafana/dashboards/forebay.json"),
        ("redpanda.yaml", "infra/kafka/redpanda.yaml"),
        ("redis.conf", "infra/redis/redis.conf"),
    ],
)
def test_files_exist_once(name: str, source: str) -> None:
    assert (CHART / "files" / name).resolve() == ROOT / source
    assert any(f"files/{name}" in text for text in TEMPLATES.values())


def test_jobs_of_alerts_are_roles() -> None:
    jobs = re.findall(r'job=~"([^"]+)"', (CHART / "files/alerts.yaml").read_text())
    roles = {*load("values.yaml")["roles"], "worker", "shadow", "up"}  # the last two are not of the chart
    assert {job for found in jobs for job in found.split("|")} <= roles


def test_the_versions_are_those_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_images_have_the_user_and_the_cache_of_the_chart() -> None:
    stages = (ROOT / "infra/docker/Dockerfile").read_text()
    (user,) = set(re.findall(r"runAsUser: (\d+)", TEMPLATES["_helpers.tpl"]))
    cache = load("values.yaml")["worker"]["volumes"]["hub"]["mountPath"]
    assert re.findall(r"^USER (.*)$", stages, re.MULTILINE) == [f"{user}:{user}"] * 2
    assert re.findall(r"HF_HOME=(\S+)", stages) == [cache] * 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_rendered_processes_run(name: str, tmp_path: Path) -> None:
    """The arguments parse, files are read by their readers, and Services and policies name ports of containers."""
    objects = rendered(name)
    seen = 0
    for one in objects:
        for container in containers(one):
            if container.get("args", [""])[0] in {words.split()[0] for words in COMMANDS}:
                assert parse([expanded(argument) for argument in container["args"]])
                seen += 1
    assert seen >= 3
    ports = {
        port["containerPort"] for one in objects for container in containers(one) for port in container.get("ports", [])
    }
    for one in objects:
        if one["kind"] == "Service":
            assert {port.get("targetPort", port["port"]) for port in one["spec"]["ports"]} <= ports
        if one["kind"] == "NetworkPolicy":
            rules = one["spec"].get("ingress", [])
            assert {port["port"] for rule in rules for port in rule.get("ports", [])} <= ports
    for file, text in {
        file: text for one in objects if one["kind"] == "ConfigMap" for file, text in one["data"].items()
    }.items():
        (tmp_path / file).write_text(text)
    if (tmp_path / "planner.toml").exists():
        planned = {(pool.group, pool.pool) for pool in read_planner_file(tmp_path / "planner.toml").settings.pools}
        supervised = read_supervise_file(tmp_path / "supervise.toml")
        assert isinstance(supervised, KubernetesSettings)
        assert planned == set(supervised.pools)
        names = {one["metadata"]["name"] for one in objects if one["kind"] == "Deployment"}
        assert {name for _, _, name in supervised.pools.values()} <= names


def rendered(name: str) -> list[Settings]:
    """Return the objects of the chart with a values file, or skip the test without helm."""
    if not HELM.exists():
        pytest.skip("no helm; `make chart` builds it")
    where = ("--values", CHART / name, "--namespace", "serving", "--kube-version", "1.37")
    done = subprocess.run([HELM, "template", "forebay", CHART, *where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def containers(resource: Settings) -> list[Settings]:
    spec = resource.get("spec", {})
    spec = spec.get("leaderWorkerTemplate", {}).get("leaderTemplate", spec.get("template", {})).get("spec", {})
    return [*spec.get("initContainers", []), *spec.get("containers", [])]
