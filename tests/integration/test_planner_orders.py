"""An operator sets sizes, pauses and resumes a running planner on Kafka, and reads its decisions."""

import functools
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.planner.actuators.os_processes import kill_session, recorded_identity
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.integration.conftest import RUN

POOL = f"{GROUP}/default"
WITHIN_S = 60.0
# Method `load` never has enough observations, so only an operator changes sizes.
PLANNER = f"""interval_s = 0.5
method = "load"
min_observations = 1000
[[pools]]
group = "{GROUP}"
pool = "default"
max_size = 4
startup_s = 0
"""

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder. Workers of the supervisor in it, which outlive the supervisor, are killed at the end."""
    yield tmp_path
    for path in tmp_path.glob("state/*/*.process"):
        identity = recorded_identity(path)
        if identity is not None:
            kill_session(identity)


class Operator:
    """Runs commands of `forebay planner` on the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._where = ("--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace)

    async def order(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command, and return its exit code, output and errors."""
        name = arguments[0]
        code, out = await self._cluster.command(name, "planner", *arguments, *self._where, within_s=2 * WITHIN_S)
        return code, out, (self._cluster.processes.folder / f"{name}.log").read_text()

    async def read(self, *arguments: str) -> Any:
        """Run a reading command that succeeds, and return its JSON output."""
        code, out, errors = await self.order(*arguments, "--json")
        assert code == 0, out + errors
        return json.loads(out)

    def start(self, name: str, file: Path, content: str) -> None:
        """Start the service `forebay planner NAME FILE`."""
        file.write_text(content)
        self._cluster.processes.start(name, [FOREBAY, "planner", name, str(file), *self._where])


def supervise_file(cluster: Cluster, redis_url: str) -> str:
    where = ["--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace, "--redis", redis_url]
    command = json.dumps([FOREBAY, "worker", *where])
    pools = f'[[pools]]\ngroup = "{GROUP}"\npool = "default"\ncommand = {command}\n'
    return f'actuator = "processes"\nstate = "state"\n{pools}'


async def test_orders_of_an_operator_take_effect_and_their_decisions_are_derived_again(
    kafka: str, redis_url: str, folder: Path
) -> None:
    async with Cluster(kafka, redis_url, f"{RUN}-orders", folder, spawn=fork_server.spawn) as cluster:
        operator = Operator(cluster)
        code, _, errors = await operator.order("set", POOL, "2")
        assert (code, "no planner has claimed the topic scaling" in errors) == (2, True)
        cluster.router("r1")
        cluster.worker("first")  # so that a router places the group, and the planner observes the pool
        await cluster.until_serving(1)
        operator.start("run", folder / "planner.toml", PLANNER)

        async def observed() -> bool:
            code, out, _ = await operator.order("status", "--json")
            return code == 0 and json.loads(out)["pools"][0]["ready"] is not None

        await cluster.processes.until("the planner has observed the pool", observed)
        code, _, errors = await operator.order("set", f"{GROUP}/defaults", "2")
        assert (code, f"did you mean {POOL}?" in errors) == (2, True)
        code, out, errors = await operator.order("set", POOL, "2", "--timeout-s", "2")
        assert (code, "1 -> 2 (manual)" in out) == (1, True), out + errors
        assert f"no actuator of {POOL} has replied to decision" in errors
        operator.start("supervise", folder / "supervise.toml", supervise_file(cluster, redis_url))
        code, out, errors = await operator.order("set", POOL, "3", "--operator", "alice")
        assert code == 0, out + errors
        assert "2 -> 3 (manual)" in out
        assert f"applied by processes: {POOL} has 3 workers" in out

        async def members(count: int) -> bool:
            return len(await cluster.members()) == count

        await cluster.processes.until("three workers were started", functools.partial(members, 4))
        assert "recorded   pause the planner, at offset" in (await operator.order("set", "--pause"))[1]
        code, out, errors = await operator.order("set", POOL, "auto")
        assert (code, "3 (paused)" in out) == (0, True), out + errors
        status = await operator.read("status")
        assert (status["paused"], status["problems"], status["pools"][0]["size"]) == (True, [], 3)
        assert (await operator.order("set", "--resume"))[0] == 0
        history = await operator.read("status", "--history", "--verify", "--changes")
        assert [(one["outcome"], one["pools"][0]["reason"]) for one in history["decisions"]] == [
            ("applied", "manual")
        ] * 2
        change = history["decisions"][-1]
        verification = history["verification"]
        assert verification["equal"] + verification["stale"] == verification["decisions"] > 3
        explained = await operator.read("status", "--decision", str(change["offset"]))
        assert explained["decision"]["verification"] == "equal"
        cluster.processes["run"].signal(signal.SIGTERM)
        assert await cluster.processes.ended("run", within_s=WITHIN_S) == 0
        code, _, errors = await operator.order("set", POOL, "1")
        assert (code, "no planner is active; the next one follows the record" in errors) == (1, True)
        assert (await operator.order("status"))[0] == 1
        operator.start("run", folder / "planner.toml", PLANNER)

        async def one_of_the_supervisor() -> bool:
            return set(await cluster.members()) == {"first", "default-0"}

        await cluster.processes.until("the next planner follows the order", one_of_the_supervisor)
