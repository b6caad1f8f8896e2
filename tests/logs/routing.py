"""Recordings of routing: modes, weights, hints, sessions, queues, thresholds and shared stores."""

from functools import partial
from typing import Any

from forebay.events.base import pack_u64
from forebay.events.control import BusyThresholds, BusyThresholdsSet, QueueClass, QueueConfig
from forebay.events.fleet import WorkerLost
from forebay.events.kv import StoreBlocksAdded, StoreBlocksRemoved
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.requests import NO_HINTS, RouterOverride, RoutingHints, TaintWeight
from forebay.events.topics import CONTROL, KV_EVENTS, METRICS, REQUESTS
from tests.logs.playing import FLEET, SCENARIOS, mixed, routed, scenario
from tests.logs.stage import MODEL, Stage, hashes, prompt

ROUTED: dict[str, dict[str, Any]] = {  # router configurations that get the same traffic
    "kv": {},
    "round-robin": {"mode": "round-robin"},
    "random-choice": {"mode": "random"},
    "power-of-two": {"mode": "power-of-two"},
    "least-loaded": {"mode": "least-loaded"},
    "own-policy": {"mode": "tests.logs.own_policy.CheapestTwo"},
    "temperature": {"temperature": 0.7},
    "lmetric": {"selection_policy": "lmetric"},
    "overlap-decay": {"overlap_score_credit_decay": 0.5},
    "active-request-weight": {"decode_active_request_weight": 2.0, "prefill_load_scale": 0.5},
    "untracked-prefill": {"track_prefill_tokens": False},
    "no-reuse": {"assume_kv_reuse": False, "track_active_blocks": True},
}
SCENARIOS.update((name, partial(routed, **router)) for name, router in ROUTED.items())


@scenario
async def direct() -> Stage:
    stage = await Stage(mode="direct").begin("w0", "w1", dp_size=2)
    for number in range(8):
        stage.submit(f"r{number}", prompt(number % 3, 3), hints=RoutingHints(worker_id=f"w{number % 2}"))
    stage.submit("nobody", prompt(0, 3))
    await stage.play()
    return stage


@scenario
async def overrides() -> Stage:
    """Requests override the configuration of the pool, then an operator changes it."""
    stage = await Stage().begin(*FLEET)
    await mixed(stage, 8)
    wanted = RouterOverride(mode="round-robin")
    await mixed(stage, 4, "mode", hints=RoutingHints(override=wanted))
    wanted = RouterOverride(temperature=1.0, overlap_score_credit=0.5, assume_kv_reuse=False)
    await mixed(stage, 4, "weights", hints=RoutingHints(override=wanted))
    stage.configure(mode="least-loaded")
    await mixed(stage, 8, "later")
    return stage


@scenario
async def tiers() -> Stage:
    """Blocks evicted from the device are reused from host memory and disk."""
    stage = await Stage(host_cache_hit_weight=0.8, disk_cache_hit_weight=0.2).begin(*FLEET)
    await stage.serve(("first", prompt(1, 6)), ("second", prompt(2, 6)))
    for worker in stage.workers.values():
        if (held := worker.held()) and (chain := [one for one in hashes(prompt(1, 6)) if one in held]):
            worker.stored(chain[2:4], chain[1], "host")
            worker.stored(chain[4:], chain[3], "disk")
            worker.removed(chain[2:])
    await stage.settle()
    await stage.serve(("third", prompt(1, 6)), ("fourth", prompt(2, 6)))
    stage.workers["w3"].stored(hashes(prompt(3, 4)), tier="host")
    await stage.settle()
    await stage.serve(("fifth", prompt(3, 4, 1)), ("sixth", prompt(3, 4, 2)))
    return stage


@scenario
async def taints() -> Stage:
    stage = await Stage().begin("w0", "w1")
    await stage.join("w2", taints=("gpu-h200", "spot"))
    await stage.join("w3", taints=("gpu-h200",))
    await mixed(stage, 6, "required", hints=RoutingHints(required_taints=("gpu-h200",)))
    wish = (TaintWeight(taint="spot", weight=2.0), TaintWeight(taint="gpu-h200", weight=-0.5))
    await mixed(stage, 8, "preferred", hints=RoutingHints(preferred_taints=wish))
    await mixed(stage, 2, "nowhere", hints=RoutingHints(required_taints=("of nobody",)))
    return stage


@scenario
async def pinned() -> Stage:
    """Clients pin requests to a worker, a rank or several workers, including invalid ones."""
    stage = await Stage().begin(*FLEET, dp_size=2)
    await mixed(stage, 6, "pinned", hints=RoutingHints(worker_id="w1"))
    await mixed(stage, 4, "rank", hints=RoutingHints(worker_id="w2", rank=1))
    await mixed(stage, 6, "allowed", hints=RoutingHints(allowed_workers=("w0", "w3", "never there")))
    for name, hints in {
        "unknown": RoutingHints(worker_id="never there"),
        "rankless": RoutingHints(worker_id="w1", rank=7),
        "contradictory": RoutingHints(worker_id="w1", allowed_workers=("w2",)),
        "no-one": RoutingHints(allowed_workers=("never there",)),
    }.items():
        stage.submit(name, prompt(1, 2), hints=hints)
    await stage.play()
    return stage


@scenario
async def lora() -> Stage:
    stage = await Stage().begin("w0")
    await stage.join("w1", loras=("adapter-a",))
    await stage.join("w2", loras=("adapter-a", "adapter-b"))
    for name in ("adapter-a", "adapter-b", "", "adapter-c"):
        await mixed(stage, 6, name or "none", lora_name=name)
    return stage


@scenario
async def cache_namespaces() -> Stage:
    """The same prompts in two namespaces share no cache."""
    stage = await Stage().begin(*FLEET)
    for name in ("", "tenant-a", "tenant-b", "tenant-a"):
        for number in range(3):
            request = f"{name}{number}{len(stage.log.records(REQUESTS.name, 0, 0, 999))}"
            stage.submit(request, prompt(1, 5, number), cache_namespace=name)
            await stage.play()
    return stage


@scenario
async def dp_ranks() -> Stage:
    stage = await Stage().begin("w0", "w1", dp_size=3)
    await stage.join("w2", dp_size=2, dp_start_rank=4)
    await mixed(stage, 32)
    return stage


async def with_sessions(mode: str) -> Stage:
    """Sessions stay, end, and lose their worker."""
    stage = await Stage(session_ttl_s=30.0, session_mode=mode).begin(*FLEET)
    for turn in range(4):
        for session in ("ann", "bob", "cleo"):
            hints = RoutingHints(session_id=session)
            stage.submit(f"{session}{turn}", prompt(ord(session[0]) % 4, 3 + turn), hints=hints)
        await stage.play(6)
    await stage.play()
    bound = stage.owner.world.sessions.find("default", "ann")
    assert bound is not None
    await stage.fact(WorkerLost, bound.worker_id)
    await mixed(stage, 4, "ann-again", hints=RoutingHints(session_id="ann"))
    await stage.pass_time(40.0)
    await mixed(stage, 4, "bob-again", hints=RoutingHints(session_id="bob"))
    return stage


SCENARIOS.update({f"sessions-{mode}": partial(with_sessions, mode) for mode in ("hard", "soft")})


@scenario
async def queue() -> Stage:
    """Queue classes, policies and priorities, with a full class and an expired deadline."""
    classes = (
        QueueClass(quantum=256),
        QueueClass(name="batch", quantum=64, policy="lcfs", requests_per_worker_max=1),
        QueueClass(name="short", quantum=512, policy="wspt"),
        QueueClass(uncached_tokens_min=80, quantum=64),
    )
    stage = await Stage(queue=QueueConfig(threshold=0.1, classes=classes)).begin("w0", "w1", max_num_batched_tokens=128)
    for number in range(24):
        hints = RoutingHints(
            policy_class=("", "batch", "short", "no such class")[number % 4],
            priority=number % 3 - 1,
            strict_priority=int(number % 7 == 0),
        )
        timeout_us = 1_000_000 if number in (9, 10, 11) else 60_000_000
        stage.submit(f"r{number}", prompt(number, 1 + number % 6), hints=hints, timeout_us=timeout_us)
    await stage.settle()
    await stage.pass_time(2.0)
    await stage.play()
    return stage


@scenario
async def tenants() -> Stage:
    """Tenants with weights that share a queue class, and one that floods it. A class has a timeout of its own."""
    classes = (QueueClass(quantum=64, requests_per_worker_max=6), QueueClass(name="batch", timeout_s=1.0))
    stage = await Stage(queue=QueueConfig(threshold=0.1, classes=classes)).begin("w0", "w1", max_num_batched_tokens=128)
    for number in range(24):
        name = ("flood", "flood", "flood", "", "small")[number % 5]
        hints = RoutingHints(policy_class="batch") if number % 8 == 7 else NO_HINTS
        weight = 3 if name == "small" else 1
        stage.submit(f"r{number}", prompt(number, 1 + number % 6), hints=hints, tenant=name, weight=weight)
    await stage.settle()
    await stage.pass_time(2.0)
    await stage.play()
    return stage


@scenario
async def busy_thresholds() -> Stage:
    """Configured busy thresholds, then thresholds set by an operator at run time."""
    stage = await Stage(busy=BusyThresholds(active_prefill_tokens_threshold=200)).begin("w0", "w1", kv_blocks_total=48)
    for number in range(10):
        stage.submit(f"first{number}", prompt(number, 5))
    await stage.play()
    for step, thresholds in enumerate(
        (BusyThresholds(active_decode_blocks_threshold=0.2), BusyThresholds(active_prefill_tokens_threshold_frac=0.1))
    ):
        stage.put(CONTROL, BusyThresholdsSet(model=MODEL, thresholds=thresholds))
        await stage.settle()
        for number in range(10):
            stage.submit(f"later{step}{number}", prompt(number, 5), max_tokens=20)
        await stage.play()
    stage.put(CONTROL, BusyThresholdsSet(model="of nobody", thresholds=BusyThresholds()))
    await mixed(stage, 6, "last")
    return stage


STORE = "store-1"


@scenario
async def shared_store() -> Stage:
    stage = await Stage(tier_credit="measured", shared_cache_hit_weight=0.25).begin("w0", "w1", kv_store=STORE)
    await stage.join("w2", kv_store="store-2")
    await stage.join("w3")
    await stage.serve(("first", prompt(1, 6)), ("second", prompt(2, 6)))
    chain = hashes(prompt(1, 6))
    for writer, blocks in (("w0", chain[:4]), ("w1", chain[2:]), ("w2", hashes(prompt(3, 6)))):
        store = "store-2" if writer == "w2" else STORE
        stage.put(KV_EVENTS, StoreBlocksAdded(store=store, worker_id=writer, sequence_hashes=pack_u64(blocks)))
    await stage.settle()
    await stage.serve(("third", prompt(1, 6)), ("fourth", prompt(3, 6)))
    for name, fixed_us in (("w0", 4_000.0), ("w1", 500.0)):
        costs = TierCosts(prefill_block_us=900.0, tiers=(TierCost(tier="store", fixed_us=fixed_us, block_us=40.0),))
        epoch = stage.workers[name].epoch
        stage.put(METRICS, TierCostsMeasured(worker_id=name, worker_epoch=epoch, costs=costs))
    await stage.settle()
    await stage.serve(("fifth", prompt(1, 6, 1)), ("sixth", prompt(1, 6, 2)))
    stale = StoreBlocksRemoved(store=STORE, worker_id="w1", sequence_hashes=pack_u64(chain[5:]), stale=True)
    stage.put(KV_EVENTS, stale)
    for name in ("w0", "w1"):
        await stage.fact(WorkerLost, name)
    await stage.join("w4", kv_store=STORE)
    await stage.serve(("seventh", prompt(1, 6)), ("eighth", prompt(3, 6)))
    return stage
