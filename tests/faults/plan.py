"""Plan of one simulation: its requests and its faults, drawn from a seed.

Theory of operation. Each seed draws which kinds of faults are enabled and how many of each there are (swarm testing).
So some simulations concentrate on a few kinds. A plan is data: the shrinker removes faults and requests from it and
runs the rest again with the same seed.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal, get_args

import msgspec

PROCESS_KINDS = (
    "kill", "loss", "stop", "pause", "slow_process", "network_split", "lease_split", "deaf", "slow_network",
    "slow_reader", "truncated_fetch", "append_rejected", "append_without_ack", "ack_late", "log_full", "read_failed",
    "lease_error", "lease_response_lost", "spurious_wake", "clock_jump", "clock_drift",
)  # fmt: skip
SYSTEM_KINDS = (
    "broker_down", "disk_full", "lease_store_down", "lease_flush", "lease_expiry", "lease_clock_jump",
    "foreign_record",
)  # fmt: skip
CLIENT_KINDS = ("disconnect", "repeated_id", "read_elsewhere", "external", "moved")
KAFKA_KINDS = ("leader_change", "stale_metadata", "group_rebalance")
ROUTER_KINDS = ("upgrade",)
JOURNAL_KINDS = ("repeated_record", "foreign_decision")
OPERATOR_KINDS = ("command", "route_query", "stale_owner")
INDEXER_KINDS = ("faust_rebalance", "retention")
KINDS = (
    *PROCESS_KINDS, *SYSTEM_KINDS, *CLIENT_KINDS, *KAFKA_KINDS, *ROUTER_KINDS, *JOURNAL_KINDS, *OPERATOR_KINDS,
    *INDEXER_KINDS,
)  # fmt: skip
# Kinds of faults of processes that an instance of the indexer gets.
INSTANCE_KINDS = (
    "kill", "stop", "pause", "network_split", "slow_network", "truncated_fetch", "read_failed", "spurious_wake",
    "clock_jump",
)  # fmt: skip
Depth = Literal["log", "kafka"]

# A slow engine takes seconds for a response, so faults hit its requests in the middle. Fast ones serve many requests.
SPEEDUPS = (0.2, 16.0, 32.0)
DEPTHS: tuple[Depth, ...] = get_args(Depth)
FIRST_MS = 1_500  # faults may hit the start of the system, but most seeds should have a system to break
INDEXED = 0.3  # share of the seeds that have instances of the indexer
SPAN_MS = 10_000  # requests and faults begin within this time


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        target: service that it hits; empty for the broker and the lease store.
        duration_ms: how long it lasts, or how long a killed process stays down. A `loss` has no end. An `upgrade` stops
            a router in order, and starts it with the other decision rules after this time.
        amount: strength: number of failing calls, factor of a slowdown, or size of a clock jump in milliseconds. Of a
            repeated or foreign journal record, the distance of its original from the end of the journal.
    """

    at_ms: int
    kind: str
    target: str = ""
    duration_ms: int = 0
    amount: int = 1


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request of a client.

    Attributes:
        family: number of the prefix that its prompt shares with others.
        seed: seed of the sampling; None for temperature 0.
        disconnect_ms: time after which the client disconnects; None if it waits.
        repeats: name of an earlier request whose id it reuses; empty for an id of its own.
        on_kafka: whether the client uses the Kafka API instead of an ingress.
        external: whether a gateway with a picker carries the request.
        lora: adapter that the request names; empty for none.
    """

    at_ms: int
    name: str
    ingress: str
    family: int
    shared_tokens: int
    own_tokens: int
    max_tokens: int
    timeout_ms: int
    seed: int | None = None
    disconnect_ms: int | None = None
    repeats: str = ""
    on_kafka: bool = False
    external: bool = False
    lora: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines a simulation.

    Attributes:
        snapshot_every: journal records between two snapshots.
        depth: `log` for an in-memory log, `kafka` for the Kafka transport on simulated clients.
        indexers: instances of the indexer.
    """

    seed: int
    routers: int
    workers: int
    ingresses: int
    kv_blocks: int
    max_num_seqs: int
    speedup: float
    snapshot_every: int
    requests: tuple[PlannedRequest, ...]
    faults: tuple[Fault, ...]
    depth: Depth = "log"
    indexers: int = 0

    def save(self, path: Path) -> None:
        """Write the plan to a JSON file."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @property
    def services(self) -> list[str]:
        return [
            *(f"r{number}" for number in range(self.routers)),
            *(f"w{number}" for number in range(self.workers)),
            *(f"i{number}" for number in range(self.ingresses)),
            *(f"x{number}" for number in range(self.indexers)),
        ]


def read_plan(path: Path) -> Plan:
    """Return the plan in a JSON file."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def depth_of(seed: int) -> Depth:
    """Return the depth of a seed if none is chosen: each fourth seed runs the Kafka transport, which is slower."""
    return "kafka" if seed % 4 == 0 else "log"


def draw_plan(seed: int, depth: Depth = "log") -> Plan:
    """Return the plan of a seed. The depth `kafka` adds faults to it."""
    random = Random(f"plan/{seed}")
    workers = random.randint(2, 4)
    plan = Plan(
        seed=seed,
        routers=random.choice((2, 2, 3)),
        workers=workers,
        ingresses=random.choice((1, 2)),
        kv_blocks=random.choice((64, 128, 512)),
        max_num_seqs=random.choice((4, 8)),
        speedup=random.choice(SPEEDUPS),
        snapshot_every=random.choice((10, 40, 1_000)),
        requests=(),
        faults=(),
    )
    faults = _draw_faults(random, plan)
    requests = _draw_requests(random, plan)
    faults = _by_time([*faults, *_draw_upgrades(Random(f"plan/{seed}/upgrade"), plan)])
    faults = _by_time([*faults, *_draw_journal_faults(Random(f"plan/{seed}/journal"))])
    faults = _by_time([*faults, *_draw_some(Random(f"plan/{seed}/operator"), plan, OPERATOR_KINDS)])
    gateway = Random(f"plan/{seed}/gateway")
    share = gateway.choice((0.0, 0.0, 0.2, 0.5))
    requests = tuple(
        msgspec.structs.replace(one, external=gateway.random() < share and not one.repeats) for one in requests
    )
    indexers = Random(f"plan/{seed}/indexers")
    if indexers.random() < INDEXED:
        plan = msgspec.structs.replace(plan, indexers=2)
        faults = _by_time([*faults, *_draw_indexer_faults(indexers, plan)])
    if depth == "kafka":
        extra = Random(f"plan/{seed}/kafka")
        faults = _by_time([*faults, *_draw_some(extra, plan, KAFKA_KINDS)])
        share = extra.choice((0.0, 0.3, 0.6))
        moved = [_moved_to_kafka(one) if extra.random() < share else one for one in requests]
        requests = tuple(sorted(moved, key=lambda one: one.at_ms))
    return msgspec.structs.replace(plan, requests=requests, faults=faults, depth=depth)


def _draw_requests(random: Random, plan: Plan) -> tuple[PlannedRequest, ...]:
    count = random.choice((8, 40) if plan.speedup < 1 else (40, 80, 120))
    bursts = random.random() < 0.3
    times = sorted(random.randrange(SPAN_MS // 8 if bursts else SPAN_MS) for _ in range(count))
    disconnects, repeated = random.choice((0.0, 0.1, 0.3)), random.choice((0.0, 0.1, 0.3))
    requests: list[PlannedRequest] = []
    for number, at_ms in enumerate(times):
        earlier = random.choice(requests) if requests else None
        requests.append(
            PlannedRequest(
                at_ms=at_ms,
                name=f"q{number}",
                ingress=f"i{random.randrange(plan.ingresses)}",
                family=random.randrange(3),
                shared_tokens=random.choice((0, 16, 40)),
                own_tokens=random.randint(1, 24),
                max_tokens=random.choice((32, 32, 40, 64)),
                timeout_ms=random.choice((4_000, 10_000, 20_000)),
                seed=None if random.random() < 0.5 else random.randrange(1 << 30),
                disconnect_ms=random.randrange(1_500) if random.random() < disconnects else None,
                repeats=earlier.name if earlier is not None and random.random() < repeated else "",
            )
        )
    return tuple(requests)


def _draw_faults(random: Random, plan: Plan) -> tuple[Fault, ...]:
    faults = []
    calm = random.random() < 0.1  # some simulations have few faults, so that requests meet them alone
    for kind in (*PROCESS_KINDS, *SYSTEM_KINDS):
        enabled = random.random() < (0.15 if calm else 0.55)
        count = random.choice((1, 2, 2, 3, 4)) if enabled else 0
        faults += [_draw_fault(random, plan, kind) for _ in range(count)]
    return _by_time(faults)


def _draw_some(random: Random, plan: Plan, kinds: Sequence[str]) -> list[Fault]:
    counts = {kind: random.choice((0, 1, 2, 4)) for kind in kinds}
    return [_draw_fault(random, plan, kind) for kind, count in counts.items() for _ in range(count)]


def _draw_indexer_faults(random: Random, plan: Plan) -> list[Fault]:
    faults = _draw_some(random, plan, INDEXER_KINDS)
    for fault in _draw_some(random, plan, INSTANCE_KINDS):
        faults.append(msgspec.structs.replace(fault, target=f"x{random.randrange(plan.indexers)}"))
    return faults


def _draw_upgrades(random: Random, plan: Plan) -> list[Fault]:
    """Return no upgrade, upgrades of single routers, or a rolling upgrade of all routers and mostly one back."""
    routers = [f"r{number}" for number in range(plan.routers)]
    match random.choice(("none", "none", "some", "rolling")):
        case "some":
            targets = random.choices(routers, k=random.choice((1, 2, 3)))
            times = [random.randrange(FIRST_MS, SPAN_MS) for _ in targets]
        case "rolling":
            targets = random.choice((routers, routers + routers))
            times = sorted(random.randrange(FIRST_MS, SPAN_MS) for _ in targets)
        case _:
            return []
    down_ms = (100, 500, 1_500)
    return [Fault(at, "upgrade", name, random.choice(down_ms)) for at, name in zip(times, targets, strict=True)]


def _draw_journal_faults(random: Random) -> list[Fault]:
    counts = {kind: random.choice((0, 0, 1, 3, 6)) for kind in JOURNAL_KINDS}
    return [
        Fault(random.randrange(FIRST_MS, SPAN_MS), kind, amount=random.choice((1, 1, 2, 5, 20, 1_000)))
        for kind, count in counts.items()
        for _ in range(count)
    ]


def _moved_to_kafka(request: PlannedRequest) -> PlannedRequest:
    """Return a request to the Kafka API, later than most workers join, because earlier ones only get an error."""
    if request.repeats or request.external:
        return request
    at_ms = FIRST_MS + request.at_ms * (SPAN_MS - FIRST_MS) // SPAN_MS
    return msgspec.structs.replace(request, on_kafka=True, at_ms=at_ms)


def _by_time(faults: Sequence[Fault]) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at_ms))


def _draw_fault(random: Random, plan: Plan, kind: str) -> Fault:
    target = ""
    if kind in PROCESS_KINDS:
        target = random.choice([name for name in plan.services if kind != "loss" or name not in ("r0", "w0", "i0")])
    elif kind == "lease_expiry":
        target = f"w{random.randrange(plan.workers)}"
    amount = 1
    match kind:
        case "slow_process" | "slow_network":
            amount = random.choice((5, 50, 200))
        case "deaf":
            amount = random.choice((4_000, 6_000))
        case "slow_reader":
            amount = random.choice((200, 1_000, 3_000))
        case "lease_error" | "lease_response_lost":
            amount = random.randint(1, 4)
        case "clock_jump" | "lease_clock_jump":
            amount = random.choice((-3_600_000, -2_000, -200, 200, 2_000, 60_000, 3_600_000))
        case "clock_drift":
            amount = random.choice((-200, -20, 20, 200))
        case _:
            pass
    at_ms = random.randrange(0 if random.random() < 0.1 else FIRST_MS, SPAN_MS)
    duration_ms = random.choice((100, 500, 1_500, 4_000))
    if kind == "disk_full":
        duration_ms = min(duration_ms, 1_500)
    return Fault(at_ms, kind, target, duration_ms, amount)


def steady_requests(count: int) -> tuple[PlannedRequest, ...]:
    """Return requests of the same prefix, one every 300 ms."""
    times = (2_000 + 300 * number for number in range(count))
    return tuple(PlannedRequest(at_ms, f"q{at_ms}", "i0", 0, 16, 4, 40, 10_000) for at_ms in times)


def calm_plan(**changes: object) -> Plan:
    """Return a plan without faults: two routers, two workers and an ingress get two requests."""
    fields: dict[str, object] = {
        "seed": 7,
        "routers": 2,
        "workers": 2,
        "ingresses": 1,
        "kv_blocks": 64,
        "max_num_seqs": 4,
        "speedup": 16.0,
        "snapshot_every": 10,
        "requests": steady_requests(2),
        "faults": (),
        **changes,
    }
    return Plan(**fields)  # type: ignore[arg-type]
