"""The Kubernetes actuator sets replicas through the scale subresource, with the official client and a stub server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.live.planner.actuator import ActuatorError
from forebay.planner.actuators import kubernetes
from forebay.planner.actuators.kubernetes import KubernetesActuator, PodSet, connect
from forebay.runtime.errors import ConfigError
from tests.harness.local import free_ports
from tests.harness.stub_servers import HANG, KubernetesStub, kubernetes_stub

pytestmark = pytest.mark.asyncio

PREFILL, DECODE = ("llama", "prefill"), ("llama", "decode")
POD_SETS = {PREFILL: PodSet("deployment", "serving", "prefill"), DECODE: PodSet("statefulset", "serving", "decode")}
PREFILL_KEY, DECODE_KEY = "deployments/serving/prefill", "statefulsets/serving/decode"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAUSE_S", 0.0)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesStub]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with kubernetes_stub({PREFILL_KEY: 2, DECODE_KEY: 1}, free_ports(1)) as serving:
        yield serving


@pytest.fixture
def kubeconfig(stub: KubernetesStub, tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    stub.write_kubeconfig(path)
    return str(path)


def actuator_for(kubeconfig: str) -> KubernetesActuator:
    return KubernetesActuator(POD_SETS, connect(kubeconfig))


async def test_deployments_and_stateful_sets_get_their_replicas(stub: KubernetesStub, kubeconfig: str) -> None:
    actuator = actuator_for(kubeconfig)
    assert actuator.pools == {PREFILL, DECODE}
    reached = await actuator.scale({PREFILL: 5, DECODE: 0})
    assert (reached.sizes, reached.message) == ({PREFILL: 5, DECODE: 0}, "")
    assert stub.replicas == {PREFILL_KEY: 5, DECODE_KEY: 0}
    assert stub.content_types == {"application/merge-patch+json"}


async def test_a_repeated_call_changes_nothing(stub: KubernetesStub, kubeconfig: str) -> None:
    actuator = actuator_for(kubeconfig)
    for _ in range(2):
        assert (await actuator.scale({PREFILL: 3})).sizes == {PREFILL: 3}
    assert [one for one in stub.requests if one.startswith("PATCH")] == [f"PATCH {PREFILL_KEY}"]


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_temporary_errors_are_retried(stub: KubernetesStub, kubeconfig: str, status: int) -> None:
    stub.faults = {f"GET {PREFILL_KEY}": [status], f"PATCH {PREFILL_KEY}": [status, status]}
    assert (await actuator_for(kubeconfig).scale({PREFILL: 4})).sizes == {PREFILL: 4}
    assert len(stub.requests) == 2 + 3


async def test_a_conflict_that_lasts_is_an_error_after_a_bounded_number_of_tries(
    stub: KubernetesStub, kubeconfig: str
) -> None:
    stub.faults = {f"PATCH {PREFILL_KEY}": [409] * 10}
    with pytest.raises(ActuatorError, match="deployment serving/prefill: HTTP 409 fault 409"):
        await actuator_for(kubeconfig).scale({PREFILL: 4})
    assert stub.requests == [f"GET {PREFILL_KEY}", *[f"PATCH {PREFILL_KEY}"] * kubernetes.TRIES]


@pytest.mark.parametrize(
    ("status", "remedy"), [(403, "allow `get` and `patch`"), (404, "check its namespace and name"), (401, "fault 401")]
)
async def test_permanent_errors_are_not_retried_and_change_no_pool(
    stub: KubernetesStub, kubeconfig: str, status: int, remedy: str
) -> None:
    stub.faults = {f"GET {DECODE_KEY}": [status]}
    with pytest.raises(ActuatorError, match=f"statefulset serving/decode: HTTP {status} ") as raised:
        await actuator_for(kubeconfig).scale({PREFILL: 4, DECODE: 4})
    assert remedy in str(raised.value)
    assert stub.requests == [f"GET {PREFILL_KEY}", f"GET {DECODE_KEY}"]


async def test_a_pool_that_cannot_be_changed_keeps_its_size_in_the_reply(stub: KubernetesStub, kubeconfig: str) -> None:
    stub.faults = {f"PATCH {DECODE_KEY}": [403]}
    reached = await actuator_for(kubeconfig).scale({PREFILL: 4, DECODE: 4})
    assert reached.sizes == {PREFILL: 4, DECODE: 1}
    assert "statefulset serving/decode: HTTP 403" in reached.message


async def test_a_size_that_the_server_changes_is_reported(stub: KubernetesStub, kubeconfig: str) -> None:
    stub.replicas_max = 3
    reached = await actuator_for(kubeconfig).scale({PREFILL: 8})
    assert reached.sizes == {PREFILL: 3}
    assert "has 3 replicas instead of 8" in reached.message


async def test_a_missing_object_is_named(kubeconfig: str) -> None:
    actuator = KubernetesActuator({PREFILL: PodSet("deployment", "serving", "typo")}, connect(kubeconfig))
    with pytest.raises(ActuatorError, match=r'deployment serving/typo: HTTP 404 deployments.apps "typo" not found'):
        await actuator.scale({PREFILL: 1})


async def test_a_server_that_does_not_respond_is_an_error_and_the_loop_continues(
    stub: KubernetesStub, kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.faults = {f"GET {PREFILL_KEY}": [HANG] * kubernetes.TRIES}
    monkeypatch.setattr(kubernetes, "READ_S", 0.2)
    scaling = asyncio.create_task(actuator_for(kubeconfig).scale({PREFILL: 4}))
    turns = 0
    while not scaling.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100
    with pytest.raises(ActuatorError, match="does not respond"):
        await scaling


async def test_an_unreachable_api_server_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    KubernetesStub({}, free_ports(1)).write_kubeconfig(path)
    with pytest.raises(ActuatorError, match="does not respond"):
        await actuator_for(str(path)).scale({PREFILL: 4})


@pytest.mark.parametrize("content", [None, "", "[1]", "a: b: c", "{}", '{"current-context": "x"}'])
async def test_an_unusable_kubeconfig_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot connect to Kubernetes with .*kubeconfig: "):
        connect(str(path))


async def test_a_process_outside_of_a_pod_has_no_service_account() -> None:
    with pytest.raises(ConfigError, match="service account"):
        connect(None)
