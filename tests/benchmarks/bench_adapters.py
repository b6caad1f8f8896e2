"""Placement of 100 adapters on 4 workers with 8 slots each, simulated, and live on mock engines with `--live`.

Requests arrive at random times. Their adapters follow Zipf's law, so that a few are popular. Placements are:

- `owner`: the owner loads an adapter on the worker that it selects for the first request.
- `fixed`: each adapter belongs to one worker, which loads it when a request needs it. Only simulated.
- `static`: the 32 most popular adapters are loaded, and requests for others are rejected.

Columns: the share of requests whose adapter a worker had on arrival, loads per minute, the median and the 99th
percentile of the time to the first token, and the share of requests that were not served.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import extend_chain, hash_seed
from forebay.core.step import AnyDecision, InputEvent, claim
from forebay.core.world import World
from forebay.engine_model.model import EngineModel
from forebay.events.base import pack_u64
from forebay.events.control import Command, PoolConfigured, QueueConfig, RouterConfig, WorkerCommanded
from forebay.events.decisions import AdapterPlaced, JournalRecord
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.progress import CommandDone
from forebay.events.requests import RequestSubmitted, RoutingHints, Sampling
from forebay.events.topics import CONTROL, FLEET, PROGRESS, REQUESTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.simulate.arrivals import Arrival, ListedArrivals
from forebay.simulate.cluster import SimulatedCluster
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import engine_config
from tests.cli.up import ADMIN_TOKEN, running
from tests.workers.adapter_files import files, written

ADAPTERS, WORKERS, SLOTS = 100, 4, 8
PROMPT_BLOCKS, SHARED_BLOCKS, OUTPUT_TOKENS = 8, 4, 64
NAMES = [f"adapter-{number}" for number in range(ADAPTERS)]
S = 1_000_000


class Call(NamedTuple):
    """Request for an adapter, `at_s` seconds after the start."""

    at_s: float
    adapter: str
    number: int


class Row(NamedTuple):
    """Result of one placement."""

    name: str
    hits: float
    loads_per_min: float
    ttft_s: Sequence[float]
    unserved: float

    def __str__(self) -> str:
        cuts = statistics.quantiles(self.ttft_s, n=100)
        return (
            f"{self.name:14} hits {self.hits:6.1%}  loads/min {self.loads_per_min:6.1f}  TTFT p50 {cuts[49]:6.3f} s"
            f"  p99 {cuts[98]:6.3f} s  not served {self.unserved:6.1%}"
        )


def calls(rate: float, seconds: float, skew: float) -> Iterator[Call]:
    chance = random.Random(7)
    weights = list(accumulate((number + 1) ** -skew for number in range(ADAPTERS)))
    at_s = 0.0
    for number in range(round(rate * seconds)):
        at_s += chance.expovariate(rate)
        yield Call(at_s, chance.choices(NAMES, cum_weights=weights)[0], number)


class Cluster(SimulatedCluster):
    """Simulated workers that take `load_us` to load an adapter."""

    def __init__(self, world: World, load_us: int) -> None:
        super().__init__(world, reports=False)
        self.load_us = load_us
        self.hits = self.loads = 0

    def derive(self, topic: Topic, event: InputEvent) -> list[AnyDecision]:
        if isinstance(event, RequestSubmitted):
            self.hits += any(event.lora_name in worker.spec.loras for worker in self.world.fleet.workers())
        return super().derive(topic, event)

    def journal(self, record: JournalRecord) -> None:
        super().journal(record)
        if isinstance(record, AdapterPlaced):
            self.loads += 1
            if record.unloaded:
                self.later(self.now_us, partial(self.obey, record, f"{record.command_id}-unload", ""))
            self.later(self.now_us + self.load_us, partial(self.obey, record, record.command_id, record.lora_name))

    def obey(self, record: AdapterPlaced, command_id: str, loaded: str) -> None:
        worker = self.world.fleet.get(record.target.worker_id)
        assert worker is not None
        done = CommandDone(
            command_id=command_id,
            action="load_lora" if loaded else "unload_lora",
            worker_id=record.target.worker_id,
            worker_epoch=record.target.worker_epoch,
            owner_epoch=0,
            loras=(*worker.spec.loras, *([loaded] if loaded else ())),
        )
        self.apply(PROGRESS, done)


def submitted(call: Call, *, is_fixed: bool) -> RequestSubmitted:
    """Return a request whose first blocks are those of all requests for its adapter."""
    shared = range(SHARED_BLOCKS)
    own = (1_000 + call.number * PROMPT_BLOCKS + at for at in range(PROMPT_BLOCKS - SHARED_BLOCKS))
    blocks = extend_chain(None, [hash_seed(call.adapter, "") + one for one in (*shared, *own)])
    worker = f"w{xxh3_64_intdigest(call.adapter.encode()) % WORKERS}" if is_fixed else ""
    return RequestSubmitted(
        request_id=str(call.number),
        model="m",
        token_ids=bytes(PROMPT_BLOCKS * 64 * 4),
        sequence_hashes=pack_u64(blocks),
        reply_slot=0,
        timeout_us=60 * S,
        tie_seed=call.number,
        sampling=Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        lora_name=call.adapter,
        routing=RoutingHints(worker_id=worker),
    )


def simulated(name: str, planned: Sequence[Call], load_s: float) -> Row:
    world = World()
    cluster = Cluster(world, round(load_s * S))
    claim(world, 0, (), EVENTS_VERSION)
    router = RouterConfig(queue=QueueConfig(run_ahead=0.25))
    cluster.apply(CONTROL, PoolConfigured(pool="default", model="m", block_size=64, router=router))
    config = engine_config()
    for number in range(WORKERS):
        spec = WorkerSpec(
            worker_id=f"w{number}",
            model="m",
            block_size=64,
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_loras=SLOTS,
            loras=tuple(NAMES[number : SLOTS * WORKERS : WORKERS]) if name == "static" else (),
        )
        cluster.add(EngineRank(number, spec, 0, number, EngineModel(config)))
        cluster.apply(FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease=f"w{number}", slot=number, from_offset=0))
    for adapter in NAMES if name != "static" else ():
        command = Command(action="load_lora", lora_name=adapter, lora_path=f"s3://b/{adapter}", placement="auto")
        added = WorkerCommanded(command_id=adapter, model="m", command=command, reply_slot=0, timeout_us=S)
        cluster.apply(CONTROL, added)
    arrivals = [
        Arrival(round(call.at_s * S), REQUESTS, submitted(call, is_fixed=name == "fixed"), call.number)
        for call in planned
    ]
    cluster.play(ListedArrivals(arrivals), lambda _: None)
    served = [one for one in cluster.requests if one.first_us and not one.failure]
    minutes = planned[-1].at_s / 60
    ttft = [(one.first_us - one.arrived_us) / S for one in served]
    return Row(name, cluster.hits / len(planned), cluster.loads / minutes, ttft, 1 - len(served) / len(planned))


async def ask(client: httpx.AsyncClient, call: Call, began_s: float) -> float | None:
    """Send a request at its time, and return its time to the first token; None if it was not served."""
    await asyncio.sleep(began_s + call.at_s - time.monotonic())
    body = {"model": call.adapter, "prompt": f"{call.adapter} {call.number}", "max_tokens": 16, "stream": True}
    sent_s = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        first_s = None
        async for line in response.aiter_lines():
            if first_s is None and line.startswith("data: {"):
                first_s = time.monotonic() - sent_s
        return first_s if response.status_code == 200 else None


async def live(name: str, planned: Sequence[Call], load_s: float, folder: Path) -> Row:
    engine = json.dumps({"max_loras": SLOTS, "lora_load_s": load_s})
    options = ("--workers", str(WORKERS), "--admin-api", "--speedup", "1", "--engine-args", engine)
    cache = ("--lora-cache", str(folder / "cache"))
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    limits = httpx.Limits(max_connections=None)
    with running(*options, *cache) as up:
        async with httpx.AsyncClient(base_url=up.url, timeout=60, limits=limits) as client:
            places = NAMES if name == "owner" else NAMES[: SLOTS * WORKERS]
            for number, adapter in enumerate(places):
                body: dict[str, Any] = {
                    "lora_name": adapter,
                    "lora_path": written(
                        folder / adapter, files(adapter.encode() * 1_000, base_model_name_or_path=None)
                    ),
                }
                body |= {"placement": "auto"} if name == "owner" else {"worker_ids": [f"mock-{number % WORKERS}"]}
                (await client.post("/v1/loras", json=body, headers=headers)).raise_for_status()
            began_s = time.monotonic()
            found = await asyncio.gather(*(ask(client, call, began_s) for call in planned))
        loads = (
            up.metric('forebay_owner_adapters_total{model="forebay-default",reason="loaded"')
            if name == "owner"
            else 0.0
        )
    served = [ttft for ttft in found if ttft is not None]
    hits = sum(ttft < load_s for ttft in served) / len(planned)
    return Row(f"{name} (live)", hits, loads / (planned[-1].at_s / 60), served, 1 - len(served) / len(planned))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=600.0, help="duration (default %(default)s)")
    parser.add_argument("--skew", type=float, default=1.0, help="exponent of Zipf's law (default %(default)s)")
    parser.add_argument("--load-s", type=float, default=0.5, help="seconds to load an adapter (default %(default)s)")
    parser.add_argument("--live", action="store_true", help="run `forebay up` instead of a simulation")
    args = parser.parse_args()
    planned = list(calls(args.rate, args.seconds, args.skew))
    for name in ("owner", "static") if args.live else ("owner", "fixed", "static"):
        if args.live:
            with tempfile.TemporaryDirectory() as folder:
                print(asyncio.run(live(name, planned, args.load_s, Path(folder))), flush=True)
        else:
            print(simulated(name, planned, args.load_s), flush=True)


if __name__ == "__main__":
    main()
