"""`GET /v1/requests/{id}/explain`, which a process of its own computes from the log."""

import asyncio
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.progress import FirstTokenEmitted
from forebay.ingress.child_process import CALLERS_MAX
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.ingress.http.app import build_app
from forebay.ingress.served import OneModel
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, request
from tests.ingress.conftest import Scene
from tests.replay.recorder import Recorder
from tests.system import until

LIMIT_S = 0.5  # for what never ends


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    return await written(tmp_path / "log.db")


async def written(path: Path, custom: CustomPolicies = ONLY_BUILT_IN, **router: Any) -> Path:
    made = Recorder(custom)
    made.fleet("a", "b", **router)
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", FirstTokenEmitted)
    (await made.log(path)).close()
    return path


@pytest.fixture
def silence() -> Iterator[LogSource]:
    """Yield the address of a broker that accepts connections and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        yield LogSource(kafka=KafkaSettings(f"127.0.0.1:{port}"))


@asynccontextmanager
async def pending(scene: Scene, source: LogSource | None, **options: Any) -> AsyncIterator[tuple[Explainer, Any]]:
    """Yield an explainer, and a function that requests an explanation over HTTP."""
    explainer = Explainer(source, **options)
    app = build_app(OneModel(scene.ingress), CollectorRegistry(), explainer)
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test", timeout=60
        ) as client:

            async def start_request(name: str) -> httpx.Response:
                return await client.get(f"/v1/requests/{name}/explain")

            yield explainer, start_request
    finally:
        await explainer.close()


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_explanations_equal_those_of_this_process_and_share_one_worker(
    scene: Scene, log: Path, processes: list[Process]
) -> None:
    opened = SqliteLog.open(log, readonly=True)
    here = await explain(opened, 0, "r", thorough=False)
    opened.close()
    async with pending(scene, LogSource(path=str(log))) as (_, start_request):
        responses = await asyncio.gather(*(start_request("r") for _ in range(3)))
        assert [reply.status_code for reply in responses] == [200] * 3
        again = await start_request("r")
    assert len(processes) == 1
    assert msgspec.json.decode(again.content, type=Explanation) == here
    assert (here.state, here.earlier_uses) == ("decode", None)
    labels = 'endpoint="explain",model="test-model",request_type="unary",status="success"'
    assert scene.metric(f"dynamo_frontend_requests_total{{{labels}}} 4.0")


async def test_an_unknown_id_is_a_404(scene: Scene, log: Path) -> None:
    async with pending(scene, LogSource(path=str(log))) as (_, start_request):
        missing = await start_request("q")
        assert code(missing) == (404, "request_not_found")
        assert missing.json()["error"]["message"] == "unknown request 'q'; check the ID"
        slashes = await start_request("q/1%2F2")
        assert code(slashes) == (404, "request_not_found")
        assert slashes.json()["error"]["message"] == "unknown request 'q/1/2'; check the ID"


async def test_a_log_in_memory_is_rejected_with_the_remedy(scene: Scene) -> None:
    async with pending(scene, None) as (_, start_request):
        refused = await start_request("r")
        assert code(refused) == (501, "not_recorded")
        assert "--log FILE" in refused.json()["error"]["message"]
    assert code(await scene.client.get("/v1/requests/r/explain")) == (501, "not_recorded")


@pytest.mark.slow
async def test_unreadable_logs_and_policies_of_users_are_rejected(scene: Scene, tmp_path: Path) -> None:
    async with pending(scene, LogSource(path=str(tmp_path / "none.db"))) as (_, start_request):
        refused = await start_request("r")
        assert code(refused) == (503, "log_unavailable")
        assert "none.db" in refused.json()["error"]["message"]
    mode = f"{__name__}.Here"
    log = await written(tmp_path / "log.db", {mode: Here}, mode=mode)
    async with pending(scene, LogSource(path=str(log))) as (_, start_request):
        refused = await start_request("r")
        assert code(refused) == (501, "policy_not_here")
        assert f"pass --allow-policy {mode}; restart the ingress" in refused.json()["error"]["message"]
    async with pending(scene, LogSource(path=str(log), policies=(mode,))) as (_, start_request):
        assert (await start_request("r")).json()["routings"][0]["reason"] == "policy"


class Here:
    """A user's policy, whose output must not mix with explanations."""

    def decide(self, world: Any, request: Any) -> int:
        print("deciding")
        return 0


async def test_a_timeout_fails_the_queued_explanations_too(
    scene: Scene, silence: LogSource, processes: list[Process]
) -> None:
    async with pending(scene, silence, limit_s=LIMIT_S) as (_, start_request):
        waiting = [asyncio.create_task(start_request("r")) for _ in range(CALLERS_MAX)]
        await asyncio.sleep(0)  # all of them begin before the next request
        refused = await start_request("r")
        assert code(refused) == (503, "explain_busy")
        assert f"{CALLERS_MAX} requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        responses = [code(reply) for reply in await asyncio.gather(*waiting)]
        assert responses[0] == (504, "explain_timeout")
        assert set(responses[1:]) <= {(503, "explain_busy"), (504, "explain_timeout")}
        assert "forebay explain" in (await waiting[0]).json()["error"]["message"]
        assert {process.returncode for process in processes} == {-signal.SIGKILL}


async def test_a_process_that_dies_is_replaced(scene: Scene, log: Path, processes: list[Process]) -> None:
    async with pending(scene, LogSource(path=str(log))) as (_, start_request):
        assert (await start_request("r")).status_code == 200
        (process,) = processes
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert (await start_request("r")).status_code == 200


async def test_a_crash_is_reported_and_no_process_starts_after_close(
    scene: Scene, silence: LogSource, processes: list[Process]
) -> None:
    async with pending(scene, silence) as (explainer, start_request):
        waiting = asyncio.create_task(start_request("r"))
        await until(lambda: processes)
        os.kill(processes[0].pid, signal.SIGKILL)
        assert code(await waiting) == (503, "explain_failed")
        waiting = asyncio.create_task(start_request("r"))
        await until(lambda: len(processes) == 2)
        await explainer.close()
        assert code(await waiting) == (503, "explain_failed")
        assert code(await start_request("r")) == (503, "explain_failed")
    assert [process.returncode is None for process in processes] == [False, False]
