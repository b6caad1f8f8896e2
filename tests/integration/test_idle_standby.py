"""A standby that was idle for six minutes takes over. Runs last, see `idle_cluster`."""

import asyncio
import re
import time

import httpx
import pytest

from tests.harness.cluster import FOREBAY, GROUP
from tests.integration.conftest import IDLE_STANDBY, IdleCluster

IDLE_S = 360.0  # aiokafka's members leave after 300 s without a poll, some seconds after they joined
PATIENCE_S = 120.0
REQUESTS = 20
OWNER = re.compile(rf"{GROUP}, partition 0: owner (\w+), (\d) standbys(?: (\w+))?")

pytestmark = [getattr(pytest.mark, IDLE_STANDBY), pytest.mark.timeout(IDLE_S + 2 * PATIENCE_S)]


async def test_a_standby_idle_for_six_minutes_takes_over_from_a_killed_owner(idle_cluster: IdleCluster) -> None:
    processes = idle_cluster.processes
    await asyncio.sleep(max(0.0, idle_cluster.began_s + IDLE_S - time.monotonic()))
    owner, count, standby = await groups(idle_cluster)
    assert (owner, count) in {("r1", "1"), ("r2", "1")}
    assert {owner, standby} == {"r1", "r2"}
    async with httpx.AsyncClient(base_url=idle_cluster.url, timeout=PATIENCE_S) as client:
        assert (await client.get("/ready")).status_code == httpx.codes.OK
        assert f'forebay_group_standbys{{group="{GROUP}"}} 1.0' in (await client.get("/metrics")).text
        processes.kill(owner)
        # The standby claims before the ingress misses the owner, unless the machine is busy.
        refused = await client.post("/v1/completions", json={"model": GROUP, "prompt": [1, 2, 3]})
        if refused.status_code != httpx.codes.OK:
            assert refused.json()["error"]["code"] == "no_owner"
            assert "retry-after" in refused.headers
        await processes.until("the standby owns", lambda: has_status(client, httpx.codes.OK), within_s=PATIENCE_S)
        for number in range(REQUESTS):
            body = {"model": GROUP, "prompt": [number + 1, 2, 3], "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == httpx.codes.OK
    assert (await groups(idle_cluster))[:2] == (standby, "0")


async def groups(cluster: IdleCluster) -> tuple[str, str, str]:
    """Return owner, count of standbys and the first standby, as `forebay topics list --lag` prints them."""
    output = cluster.processes.folder / "lag.out"
    output.unlink(missing_ok=True)
    cluster.processes.start("lag", [FOREBAY, "topics", "list", "--lag", *cluster.where], ends=True, output=output)
    assert await cluster.processes.ended("lag", within_s=PATIENCE_S) == 0
    found = OWNER.search(output.read_text())
    assert found is not None, output.read_text()
    return found[1], found[2], found[3] or ""


async def has_status(client: httpx.AsyncClient, status: int) -> bool:
    """Return whether `/ready` and `/health` have this status and `/live` is OK."""
    assert (await client.get("/live")).status_code == httpx.codes.OK
    answers = [await client.get(path) for path in ("/ready", "/health")]
    return [answer.status_code for answer in answers] == [status, status]
