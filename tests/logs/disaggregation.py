"""Recordings of stages: encode workers, and prefill apart from decode, while workers fail and are lost."""

from hashlib import sha256
from typing import Any

from forebay.events.control import DisaggConfig, DisaggregationSet, PoolConfigured, QueueConfig, RouterConfig
from forebay.events.fleet import WorkerDraining, WorkerLost
from forebay.events.media import Media
from forebay.events.topics import CONTROL
from tests.logs.playing import mixed, scenario
from tests.logs.stage import BLOCK, LEASE_US, MODEL, Stage, prompt
from tests.system import take_snapshot

DIGESTS = [sha256(b"%d" % number).hexdigest() for number in range(6)]
ENCODERS = ("e0", "e1")


def media(number: int, tokens: int = 12) -> Media:
    """Return a media item in the first block of a prompt."""
    kind: Any = "video" if number % 3 == 2 else "image"
    content = b"%d" % number
    return Media(
        kind=kind, digest=DIGESTS[number], mime=f"{kind}/x-{number}", first_token=2, tokens=tokens, content=content
    )


@scenario
async def encode_stage() -> Stage:
    """Encode images first; failures are retried on other workers and finally aborted."""
    stage = await Stage(queue=QueueConfig(threshold=4.0)).begin("w0", "w1")
    stage.put(CONTROL, PoolConfigured(pool="encoders", model=MODEL, block_size=BLOCK, role="encode"))
    await stage.settle()
    stage.submit("by-itself", prompt(0, 2), media=(media(0),))
    await stage.play()
    for name in ENCODERS:
        await stage.join(name, pool="encoders", role="encode", kv_events=False)
    for number in range(10):
        some = (media(number % 6), media((number + 1) % 6)) if number % 4 == 3 else (media(number % 6),)
        stage.submit(f"r{number}", prompt(number % 3, 3, number), media=some if number % 5 else ())
        await stage.play(number % 3)
    await stage.play()
    for name in ENCODERS:
        stage.workers[name].fails = 5
    for number in range(3):
        stage.submit(f"fails{number}", prompt(1, 3), media=(media(number),))
    await stage.play()
    for name in ENCODERS:
        stage.workers[name].fails = 0
    stage.workers["w0"].fails = stage.workers["w1"].fails = 1
    stage.submit("fetched-later", prompt(2, 3), media=(media(1),))
    await stage.play()
    for name in ("w0", "w1"):
        stage.workers[name].fails = 5
    stage.submit("never-fetched", prompt(2, 3), media=(media(5),))
    await stage.play()
    for name in ("w0", "w1"):
        stage.workers[name].fails = 0
    stage.submit("cancelled", prompt(2, 3), media=(media(2),))
    await stage.settle()
    await take_snapshot(stage.owner)
    stage.cancel("cancelled")
    stage.submit("lost", prompt(2, 3), media=(media(3),))
    await stage.settle()
    await stage.fact(WorkerLost, "e0")
    stage.submit("lost-too", prompt(2, 3), media=(media(4),))
    await stage.settle()
    await stage.fact(WorkerLost, "e1")
    await stage.play()
    return stage


PREFILLERS = ("p0", "p1")
DECODERS = ("d0", "d1")
RULES = (
    DisaggConfig(policy="classic", max_local_prefill_length=60, max_prefill_queue_size=1),
    DisaggConfig(policy="isl_bounding", eff_isl_threshold=60, eff_isl_ratio_threshold=0.9, decode_busy_threshold=0.019),
    DisaggConfig(policy="prefill_load", prefill_busy_threshold=0.1),
    DisaggConfig(policy="isl_or_load", eff_isl_threshold=40, prefill_busy_threshold=0.2),
    DisaggConfig(policy="never"),
)


def set_rule(stage: Stage, rule: DisaggConfig) -> None:
    stage.put(CONTROL, DisaggregationSet(model=MODEL, disagg=rule))


async def join_prefill(stage: Stage, name: str) -> None:
    await stage.join(name, pool="prefillers", role="prefill")


async def disaggregated(**router: Any) -> Stage:
    """Return a stage with a prefill and a decode pool of one model."""
    stage = await Stage(role="decode", **router).begin(*DECODERS, role="decode")
    config = RouterConfig(queue=QueueConfig(threshold=0.3), session_ttl_s=10.0)
    stage.put(CONTROL, PoolConfigured(pool="prefillers", model=MODEL, block_size=BLOCK, role="prefill", router=config))
    stage.submit("before", prompt(0, 4))
    await stage.play()
    for name in PREFILLERS:
        await join_prefill(stage, name)
    return stage


@scenario
async def disaggregation() -> Stage:
    """Prompts are prefilled by one pool and decoded by another, under every rule."""
    stage = await disaggregated()
    for number in range(5):
        stage.submit(f"r{number}", prompt(number, 6))
    await stage.play()
    for number, rule in enumerate(RULES):
        set_rule(stage, rule)
        await stage.settle()
        for name in ("q0", "q1"):
            stage.route_query(f"{name}-{number}", prompt(number % 4, 2 if name == "q0" else 9))
        await burst(stage, number)
    return stage


@scenario
async def disaggregation_failures() -> Stage:
    """Failed prefills, failed transfers and lost workers of both pools are retried."""
    stage = await disaggregated(disagg=DisaggConfig(enforce=True))
    await fail(stage)
    await take_snapshot(stage.owner)
    await lose(stage)
    return stage


async def burst(stage: Stage, number: int) -> None:
    """Submit new prompts of several lengths together, then resubmit two of them while cached."""
    for again, lengths in enumerate(((5, 4, 6, 2), (5, 4))):
        for at, length in enumerate(lengths):
            stage.submit(f"s{number}-{at}-{again}", prompt(10 * number + at, length, again), max_tokens=4)
        await stage.play()


async def fail(stage: Stage) -> None:
    """Make prefills and transfers fail, be refused or cancelled, with and without images."""
    stage.workers["p0"].fails = stage.workers["p1"].fails = 4
    stage.submit("never-computed", prompt(1, 5))  # enforced
    await stage.play()
    set_rule(stage, DisaggConfig())
    stage.submit("computed-later", prompt(2, 5))
    await stage.play()
    stage.workers["p0"].fails = stage.workers["p1"].fails = 0
    stage.workers["d0"].fails = stage.workers["d1"].fails = 3
    stage.submit("not-fetched", prompt(3, 6))
    await stage.play()
    stage.workers["d0"].fails = stage.workers["d1"].fails = 0
    stage.workers["p0"].refuses = stage.workers["p1"].refuses = 1
    stage.submit("refused", prompt(3, 6))
    await stage.play()
    stage.workers["p0"].refuses = stage.workers["p1"].refuses = 0
    stage.put(CONTROL, PoolConfigured(pool="encoders", model=MODEL, block_size=BLOCK, role="encode"))
    await stage.join("e0", pool="encoders", role="encode", kv_events=False)
    stage.submit("image", prompt(1, 3), media=(media(2),))
    stage.submit("cancelled", prompt(1, 8))
    await stage.play(1)
    stage.cancel("cancelled")
    await stage.play()


async def lose(stage: Stage) -> None:
    """Lose and drain workers of both pools at each stage, and retain KV for longer than its lease."""
    stage.submit("prefiller-lost", prompt(0, 9))
    await stage.settle()
    await stage.fact(WorkerLost, worker_of(stage, "prefiller-lost"))
    await stage.play()
    for name in ("p2", "p3"):
        await join_prefill(stage, name)
    for name in ("decoder-lost", "begun"):
        stage.submit(name, prompt(1, 9, 7), max_tokens=12)
        await stage.play(2 if name == "decoder-lost" else 4)
        await stage.fact(WorkerLost, worker_of(stage, name))
        await stage.join(f"d-{name}", role="decode")
    await stage.play()
    stage.submit("waits", prompt(2, 9))
    await stage.settle()
    for name in [name for name in stage.workers if name.startswith("d")]:
        await stage.fact(WorkerLost, name)
    await stage.play()
    await stage.pass_time(2 * LEASE_US / 1e6)
    await stage.join("d9", role="decode")
    await stage.play()
    await stage.fact(WorkerDraining, "p2")
    await mixed(stage, 6, prefix="last")
    for name in [name for name in stage.workers if name.startswith("p")]:
        await stage.fact(WorkerLost, name)
    await mixed(stage, 3, prefix="alone")


def worker_of(stage: Stage, request_id: str) -> str:
    request = stage.owner.world.requests.get(request_id)
    assert request is not None, "it is in flight"
    assert request.on_worker, request.phase
    return request.worker_id
