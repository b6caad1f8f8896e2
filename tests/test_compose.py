"""compose.yaml is valid, publishes loopback ports only, and refers to existing files, services and metrics."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forebay.cli.planner.planner_file import read_planner_file
from forebay.cli.planner.services import read_supervise_file
from forebay.processes.planner import ProcessSettings
from tests.command_line import parse
from tests.dashboard import APART, TIERS, metrics, queries

ROOT = Path(__file__).resolve().parent.parent
PORT_MAX = 32_767  # ephemeral ports start above
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = sorted(
    name for name, service in SERVICES.items() if service["image"] in ("forebay", "forebay-nixl", "forebay-vllm")
)


def test_the_file_follows_the_compose_specification() -> None:
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*checker, ROOT / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_defined() -> None:
    assert OURS == [
        "console", "decode-worker", "ingress-1", "ingress-2", "planner", "prefill-worker", "router", "shadow",
        "supervisor", "topics", "vllm-worker", "worker",
    ]  # fmt: skip
    assert sorted(SERVICES.keys() - OURS) == ["grafana", "prometheus", "redis", "redpanda"]


@pytest.mark.parametrize("service", OURS)
def test_forebay_commands_of_services_are_valid(service: str) -> None:
    command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in SERVICES[service]["command"]]
    assert parse(command)["kafka"] == "redpanda:9092"
    assert (SERVICES[service]["read_only"], SERVICES[service]["cap_drop"]) == (True, ["ALL"])


def test_the_supervisor_runs_the_workers_of_the_planned_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    planned = read_planner_file(ROOT / "infra/planner/planner.toml").settings.pools
    supervised = read_supervise_file(ROOT / "infra/planner/supervise.toml")
    assert isinstance(supervised, ProcessSettings)
    assert {(pool.group, pool.pool) for pool in planned} == {(pool.group, pool.pool) for pool in supervised.pools}
    for pool in supervised.pools:
        assert parse(list(pool.command[1:]))


@pytest.mark.parametrize("service", ["ingress-1", "ingress-2"])
def test_the_ingress_has_its_model_names_and_an_admin_api_only_with_a_token(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = SERVICES[service]["environment"]
    assert environment["FOREBAY_ADMIN_API"] == "${FOREBAY_ADMIN_TOKEN:+true}"
    for value, is_on in (("", False), ("true", True)):
        monkeypatch.setenv("FOREBAY_ADMIN_API", value)
        options = parse(SERVICES[service]["command"])
        assert (options["admin_api"], service in options["allow_host"]) == (is_on, True)


@pytest.mark.parametrize(("value", "keys"), [("", []), ("a,b", ["a,b"])])
def test_an_ingress_takes_its_api_keys_from_the_environment(
    value: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in ("ingress-1", "ingress-2"):
        assert SERVICES[service]["environment"]["FOREBAY_API_KEY"] == "${FOREBAY_API_KEY:-}"
        monkeypatch.setenv("FOREBAY_API_KEY", value)
        options = parse(SERVICES[service]["command"])
        assert (list(options["api_key"]), options["allow_anonymous"]) == (keys, True)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_disagg_workers_are_a_profile_and_transfer_kv_by_nixl(role: str) -> None:
    service = SERVICES[f"{role}-worker"]
    options = parse(service["command"])
    assert (options["role"], options["kv_host"]) == (role, None)
    assert (service["profiles"], service["image"], service["build"]["target"]) == (["disagg"], "forebay-nixl", "nixl")
    assert "container_name" not in service, "it is to be scaled"
    assert "ports" not in service
    assert "profiles" not in SERVICES["worker"]


@pytest.mark.parametrize("service", sorted(SERVICES.keys() - {"topics"}))
def test_every_service_has_a_health_check(service: str) -> None:
    assert SERVICES[service]["healthcheck"]["test"][0].startswith("CMD")


def test_published_ports_are_loopback_and_not_ephemeral() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    hosts = []
    for port in published:
        match = re.fullmatch(r"127\.0\.0\.1:(\d+):\d+", port)
        assert match is not None, f"{port} is not on the loopback address"
        hosts.append(int(match[1]))
    assert len(set(hosts)) == len(hosts)
    assert max(hosts) <= PORT_MAX


def test_mounted_and_built_paths_exist() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), f"{name} mounts {source}"
        if "build" in service:
            dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
            assert re.search(rf"^FROM \S+ AS {service['build']['target']}$", dockerfile, re.MULTILINE)


def test_prometheus_scrapes_existing_services() -> None:
    jobs = yaml.safe_load((ROOT / "infra/prometheus/prometheus.yaml").read_text())["scrape_configs"]
    names = {name for job in jobs for found in job.get("dns_sd_configs", []) for name in found["names"]}
    static = {target for job in jobs for found in job.get("static_configs", []) for target in found["targets"]}
    assert names | {target.split(":")[0] for target in static} <= SERVICES.keys()


def test_the_dashboard_uses_existing_metrics() -> None:
    sources = [path for root in ("streams", "services") for path in (ROOT / root).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    # The metrics of disaggregation and of tiers are checked in tests/cli/test_up_pools.py and test_up.py.
    shown = (query for row, found in queries().items() if row not in (APART, TIERS) for query in found)
    names = set().union(*map(metrics, shown))
    # Tables of metrics name them without the prefix of their service.
    stems = {name: re.sub(r"^(forebay|dynamo_frontend)_|_(total|bucket|sum|count)$", "", name) for name in names}
    missing = {name for name, stem in stems.items() if not re.search(rf'"(\w+_)?{stem}"', text)}
    assert names
    assert not missing
