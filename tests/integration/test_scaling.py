"""A planner scales worker processes up and down on Kafka, and is killed in between. Its standby goes on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import fork_server
from tests.harness.cluster import Cluster
from tests.harness.scaling import SteppedLoad, scaling_of, start_planner, supervised
from tests.integration.conftest import RUN

ISL, OSL = 64, 4
RATE = 20.0  # requests per second
LARGEST = 3
# A worker carries one request per second, so the rate needs far more workers than the largest size.
PROFILE = {
    "prefill": [{"isl": ISL, "ttft_ms": 10.0, "tokens_per_s": ISL}],
    "decode": [{"context": ISL + OSL / 2, "concurrency": 8, "itl_ms": 5.0, "tokens_per_s": 1e6}],
}
SETTINGS = {"interval_s": 2.0, "gpu_budget": 0}
POOL = {"max_size": LARGEST, "startup_s": 5.0, "profile": "profile.json"}
PATIENCE_S = 90.0

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]


async def test_a_load_step_scales_up_and_down_although_the_planner_is_killed(
    kafka: str, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    async with (
        Cluster(kafka, redis_url, f"{RUN}-scaling", tmp_path, spawn=fork_server.spawn) as cluster,
        scaling_of(cluster) as scaling,
        supervised(cluster, "s", redis_url, "--speedup", "10"),
    ):

        async def until(what: str, condition: Callable[[], bool]) -> None:
            async def holds() -> bool:
                return condition()

            await cluster.processes.until(what, holds, within_s=PATIENCE_S)

        async def until_members(count: int) -> None:
            async def are() -> bool:
                return len(await cluster.members()) == count

            await cluster.processes.until(f"{count} workers are members", are, within_s=PATIENCE_S)

        def is_decided(size: int) -> bool:
            return bool(scaling.changes) and scaling.changes[-1].to_size == size

        cluster.router("r1")
        url = cluster.ingress("i1")
        start_planner(cluster, "p1", SETTINGS, POOL)
        await until("p1 claims the topic", lambda: bool(scaling.claims))
        start_planner(cluster, "p2", SETTINGS, POOL)
        await scaling.set_size(1)
        await cluster.until_serving(1)
        await scaling.set_size(None)
        load = SteppedLoad(url, isl=ISL, osl=OSL, seed=7)
        async with load.running():
            load.rate = RATE
            await until("the largest size is decided", lambda: is_decided(LARGEST))
            await until_members(LARGEST)
            # On a busy machine the planner that started first may have been replaced already.
            claims, (_, active) = len(scaling.claims), scaling.claims[-1]
            cluster.kill(active)
            load.rate = 0.0
            await until("the standby claims the topic", lambda: len(scaling.claims) > claims)
            await until("the smallest size is decided", lambda: is_decided(1))
            await until_members(1)
        decisions = await scaling.decisions()
        (_, standby) = scaling.claims[-1]
        await cluster.stop(standby)
        await until("it records that it has stopped", lambda: scaling.state.claim is None)
    assert {active, standby} == {"p1", "p2"}
    assert [one.problem for one in load.sent if not one.ended] == []
    assert len(load.sent) > 0
    sizes = [one.to_size for one in scaling.changes]
    assert (sizes[0], max(sizes), sizes[-1]) == (1, LARGEST, 1)
    effective = [one for one in decisions if one.outcome == "applied"]
    assert [one.offset for one in effective if not one.is_verified] == []
    assert sum(bool(one.replies) for one in effective) == len(sizes)
