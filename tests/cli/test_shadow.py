"""`forebay shadow` on the log of a running system: output, shutdown and rejected options."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.shadow import DecisionShadowed, ShadowEvent, ShadowStarted
from forebay.events.topics import DECISIONS
from forebay.transport.sqlite.log import SqliteLog
from infra.kafka.kafka import HOST
from tests.cli.in_process import forebay
from tests.cli.up import forebay as process
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY
from tests.harness.local import free_ports
from tests.harness.processes import Processes
from tests.live.shared import valid
from tests.replay.mutations import find, replace_record
from tests.system import System, submitted, until, until_ended

PREFIX = list(range(12))


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path, fork_server.spawn)
    yield running
    running.end_all()


@asynccontextmanager
async def owned(log: SqliteLog) -> AsyncIterator[System]:
    async with System(log).started(workers=2) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 2)
        yield system


async def complete(system: System, *names: str) -> None:
    for number, name in enumerate(names):
        system.send(submitted(name, [*PREFIX, *[number] * 4]))
        await until_ended(system, name)


async def record(path: Path) -> None:
    """Write a log of four requests."""
    log = SqliteLog.open(path)
    async with owned(log) as system:
        await complete(system, "a", "b", "c", "d")
    log.close()


def events(path: Path, kind: type = DecisionShadowed) -> list[ShadowEvent]:
    """Return the events of the complete lines of a shadow's file."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: list[ShadowEvent] = [msgspec.json.decode(line, type=ShadowEvent) for line in lines]
    return [event for event in found if isinstance(event, kind)]


async def end(processes: Processes, name: str, number: signal.Signals) -> str:
    """End a shadow by a signal and return its output."""
    process = processes[name]
    process.signal(number)
    assert await processes.ended(name, within_s=20.0) == 0
    return process.output()


async def test_events_of_a_running_system_are_printed(tmp_path: Path, processes: Processes) -> None:
    path, out, port = tmp_path / "run.db", tmp_path / "out.jsonl", free_ports(1)
    command = [FOREBAY, "shadow", str(path), "--policy", "round-robin", "--json", "--metrics-port", str(port)]
    log = SqliteLog.open(path)
    async with owned(log) as system:
        processes.start("shadow", command, output=out)
        await until(lambda: len(events(out, ShadowStarted)) == 1)
        await complete(system, "a", "b", "c")
        await until(lambda: len(events(out)) == 3)
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{HOST}:{port}/metrics")).text
        assert 'forebay_shadow_decisions_total{pool="default",shadow=' in text
        output = await end(processes, "shadow", signal.SIGINT)
        assert "3 decisions" in output.splitlines()[-1]
        routed = await valid(log, RequestRouted)
    log.close()
    assert [one.request_id for one in events(out) if isinstance(one, DecisionShadowed)] == list("abc")
    assert [one.request_id for one in routed] == list("abc")


async def test_events_are_printed(recorded: Path, tmp_path: Path, processes: Processes) -> None:
    out = tmp_path / "stdout"
    command = [FOREBAY, "shadow", str(recorded), "--set", "temperature=0", "--from-start", "--json"]
    processes.start("shadow", command, output=out)
    await until(lambda: len(events(out)) == 4)
    output = await end(processes, "shadow", signal.SIGTERM)
    assert "4 decisions, 100.0% agree, regret mean 0.00 p99 0.00 blocks, overlap won 0 lost 0 blocks" in output
    assert len(events(out, ShadowStarted)) == 1


async def test_a_divergence_ends_the_shadow(recorded: Path) -> None:
    offset, event = find(
        recorded, DECISIONS, lambda event: isinstance(event, RequestRouted) and event.request_id == "c"
    )
    assert isinstance(event, RequestRouted)
    lie = msgspec.structs.replace(event, terms=msgspec.structs.replace(event.terms, cost=event.terms.cost + 1))
    replace_record(recorded, DECISIONS, offset, lambda _: encode(DECISIONS, lie))
    run = await asyncio.to_thread(process, "shadow", str(recorded), "--policy", "random", "--from-start", "--json")
    assert run.returncode == 1
    assert f"journal record {offset} cannot be derived again (differs in terms)" in run.stderr
    printed = [msgspec.json.decode(line, type=ShadowEvent) for line in run.stdout.splitlines()]
    assert [one.request_id for one in printed if isinstance(one, DecisionShadowed)] == ["a", "b"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "run.db"
    asyncio.run(record(path))
    return path


@pytest.fixture
def recorded(original: Path, tmp_path: Path) -> Path:
    """Return a copy of the log."""
    path = tmp_path / "run.db"
    shutil.copy(original, path)
    return path


REFUSED = [
    (("run.db",), "no change; pass"),
    (("slice.rec", "--policy", "random"), "slice.rec is a recording, which does not grow"),
    (("--policy", "random"), "expected either a log file or --kafka"),
    (("nowhere.db", "--policy", "random"), "no such log file; check the path"),
    (("run.db", "--set", "heat=1"), "unknown field 'heat'"),
    (("run.db", "--set", "other:temperature=1"), "unknown pool 'other'; pools are: default"),
    (("run.db", "--policy", "lucky.Policy"), "lucky.Policy cannot be imported"),
    (("run.db", "--policy", "random", "--id", "a/b"), "1 to 64 letters, digits, dots"),
    (("--kafka", "127.0.0.1:1", "--policy", "random"), "check that it runs and its address"),
]


@pytest.mark.parametrize(("arguments", "why"), REFUSED)
def test_invalid_options_are_rejected(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], why: str
) -> None:
    monkeypatch.chdir(recorded.parent)
    if "slice.rec" in arguments:
        assert forebay("record", "run.db", "slice.rec").returncode == 0
    before = {path: path.read_bytes() for path in recorded.parent.glob("*.db")}
    run = forebay("shadow", *arguments)
    assert run.returncode == 2
    assert why in run.stderr
    assert {path: path.read_bytes() for path in before} == before
