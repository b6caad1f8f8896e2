"""A recording of disaggregated prefill and decode: workers join, fail and are lost, while policies change."""

from typing import Any

from forebay.events.control import DisaggConfig, DisaggregationSet, PoolConfigured, QueueConfig, RouterConfig
from forebay.events.fleet import WorkerDraining, WorkerLost
from forebay.events.topics import CONTROL
from tests.logs.encoding import media
from tests.logs.playing import mixed, scenario
from tests.logs.stage import BLOCK, LEASE_US, MODEL, Stage, prompt

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


async def apart(**router: Any) -> Stage:
    """A prefill and a decode pool of one model."""
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
    """Prompts computed by one pool and answered by another, under every rule."""
    stage = await apart()
    for number in range(5):
        stage.submit(f"r{number}", prompt(number, 6))
    await stage.play()
    for number, rule in enumerate(RULES):
        set_rule(stage, rule)
        await stage.settle()
        for name in ("q0", "q1"):
            stage.ask(f"{name}-{number}", prompt(number % 4, 2 if name == "q0" else 9))
        await burst(stage, number)
    return stage


@scenario
async def disaggregation_failures() -> Stage:
    """Prompts that are not computed or not fetched, and workers of both pools that are lost: all is tried again."""
    stage = await apart(disagg=DisaggConfig(enforce=True))
    await fail(stage)
    await stage.owner.take_snapshot()
    await lose(stage)
    return stage


async def burst(stage: Stage, number: int) -> None:
    """New prompts of some lengths at once, and what is cached of them again."""
    for again, lengths in enumerate(((5, 4, 6, 2), (5, 4))):
        for at, length in enumerate(lengths):
            stage.submit(f"s{number}-{at}-{again}", prompt(10 * number + at, length, again), max_tokens=4)
        await stage.play()


async def fail(stage: Stage) -> None:
    """Prompts that are not computed, not fetched, refused or cancelled, with and without images."""
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
    """Workers of both pools are lost at each stage, and leave; KV waits for a worker longer than its lease."""
    stage.submit("prefiller-lost", prompt(0, 9))
    await stage.settle()
    await stage.fact(WorkerLost, who_has(stage, "prefiller-lost"))
    await stage.play()
    for name in ("p2", "p3"):
        await join_prefill(stage, name)
    for name in ("decoder-lost", "begun"):
        stage.submit(name, prompt(1, 9, 7), max_tokens=12)
        await stage.play(2 if name == "decoder-lost" else 4)
        await stage.fact(WorkerLost, who_has(stage, name))
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


def who_has(stage: Stage, request_id: str) -> str:
    """The worker that a request was sent to last."""
    request = stage.owner.world.requests.get(request_id)
    assert request is not None, "it is under way"
    assert request.on_worker, request.phase
    return request.worker_id
