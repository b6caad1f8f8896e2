"""Jobs whose results must not depend on the order of sets or on string hashes.

`main` runs each job and prints a JSON object of the results. `tests/test_hash_seeds.py` runs it with two values of
PYTHONHASHSEED.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from contextlib import chdir, closing
from hashlib import sha256
from pathlib import Path

import pytest

from forebay.events.control import RouterConfig
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.journal.records import decode_or_none
from forebay.transport.base import records_of
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import scaling_log
from tests.cli.in_process import forebay, fork_from_a_server
from tests.core.worlds import Driver, perform_all
from tests.faults.plan import DEPTHS, draw_plan
from tests.faults.simulation import simulate
from tests.ingress.renderings import drawn_response, rendered
from tests.logs.record import FOLDER, SUFFIX
from tests.logs.scaling import recorded_records
from tests.replay.mutations import find
from tests.replay.recorded import write as write_log
from tests.replay.simulated import played
from tests.simulate.scene import conversations, eventful, write

Job = Callable[[], str]
POLICY = "tests.logs.own_policy.CheapestTwo"
FLEET = ("--prefill-workers", "2", "--decode-workers", "1")
SWEEP = ("--set", "workers=1,2", "--set", "temperature=0,0.5", "--policy", "kv", "--policy", "round-robin")


def command(*arguments: str) -> Job:
    """Return a job that runs `forebay` in a folder with a trace and a log, and returns the output."""

    def run() -> str:
        ran = forebay(*arguments)
        assert ran.returncode == 0, ran.stderr
        return str(ran.stdout)

    return run


def verified() -> str:
    """Verify each recording of `tests/logs`."""
    found = {}
    for path in sorted(FOLDER.glob(f"*{SUFFIX}")):
        verify = command("verify", str(path), "--json", "--allow", "foreign-records", "--allow-policy", POLICY)
        found[path.name] = json.loads(verify())
    return json.dumps(found)


def scaling() -> str:
    """Derive the recorded decisions of planners again, and explain the latest."""
    log = str(scaling_log.write_log(Path("scaling.db"), recorded_records()))
    history = command("planner", "status", log, "--history", "--limit", "1000", "--json")()
    return history + command("planner", "status", log, "--decision", "latest", "--json")()


def explained() -> str:
    """Explain the first request of a recording with prefill and decode workers."""
    recording = FOLDER / f"disaggregation{SUFFIX}"
    _, submitted = find(recording, REQUESTS, lambda event: isinstance(event, RequestSubmitted))
    assert isinstance(submitted, RequestSubmitted)
    return command("explain", str(recording), submitted.request_id, "--json")()


def world() -> str:
    """Apply a random history to a world. Return its digest and decisions."""
    rng = random.Random(5)
    kinds = ["first", "finish", "stored", "stored", "removed", "report", "cancel", "wait", "join", "lose"]
    kinds += ["request"] * 6
    history = [(rng.choice(kinds), (rng.randrange(10), rng.randrange(9), rng.randrange(3))) for _ in range(3000)]
    drive = perform_all(Driver().fleet("a", "b"), history)
    assert len(drive.decided) > 500
    return f"{drive.world.digest()} {sha256(repr(drive.decided).encode()).hexdigest()}"


def faults() -> str:
    """Simulate services under faults, at both depths of the log."""
    return " ".join(simulate(draw_plan(seed, depth=depth)).trace_hash for depth in DEPTHS for seed in (5, 6))


async def requests_of(path: Path) -> list[RequestSubmitted]:
    """Return the requests of a recording."""
    with closing(SqliteLog.open(path, readonly=True)) as log:
        begin, end = await log.begin(REQUESTS.name, 0), await log.end(REQUESTS.name, 0)
        events = [decode_or_none(REQUESTS, one.value) async for one in records_of(log, REQUESTS, 0, begin, end)]
    return [event for event in events if isinstance(event, RequestSubmitted)]


def renderings() -> str:
    """Render a response to each request of the recordings. The deliveries depend on the process, and must not matter.

    The recordings have no output, so it is derived from the requests.
    """
    delivery = random.Random(os.environ["PYTHONHASHSEED"])
    model, found = Model(DEFAULT_MODEL), {}
    for path in sorted(FOLDER.glob(f"*{SUFFIX}")):
        hashed = sha256()
        for event in asyncio.run(requests_of(path)):
            first, records = drawn_response(random.Random(event.request_id), model, event)
            cuts = delivery.choices(range(len(records)), k=delivery.randrange(9))
            for one in rendered(model, first, records, cuts):
                hashed.update(one.encoded())
        found[path.name] = hashed.hexdigest()
    return json.dumps(found)


JOBS: dict[str, Job] = {
    "world": world,
    "faults": faults,
    "verify": verified,
    "renderings": renderings,
    "explain": explained,
    "scaling": scaling,
    "diff": command("replay", "diff", "run.db", "--set", "temperature=0.4", "--json"),
    "fidelity": command("simulate", "--against", "run.db", "--json"),
    "simulation": eventful,
    "simulate": command("simulate", "trace.jsonl", "--json", "--workers", "4"),
    "simulate with prefill workers and faults": command(
        *("simulate", "trace.jsonl", "--json", *FLEET, "--delays", "kafka"),
        *("--kill", "mock-1@1+1", "--lease-ttl-s", "1"),
    ),
    "sweep": command("sweep", "trace.jsonl", *SWEEP, "--json", "--slo", "ttft=80"),
}


def prepare() -> None:
    """Write `trace.jsonl` and `run.db` into the current folder."""
    write(Path("trace.jsonl"), conversations(sessions=5, turns=4))
    router = RouterConfig()
    simulated = played(conversations(sessions=11, turns=6, every_ms=2_000), router, workers=3, blocks=1_024)
    asyncio.run(write_log(simulated.log, Path("run.db")))


def main() -> None:
    """Run every job and print the results."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        prepare()
        with pytest.MonkeyPatch.context() as patch:
            fork_from_a_server(patch)
            found = {name: job() for name, job in JOBS.items()}
    json.dump({"hash seed": os.environ["PYTHONHASHSEED"], **found}, sys.stdout)
