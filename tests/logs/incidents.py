"""Recordings of incidents: lost events, workers and owners, deadlines, snapshots, overload."""

from forebay.core.step import advance
from forebay.events.base import pack_u64
from forebay.events.codec import encode
from forebay.events.control import BusyThresholds, QueueClass, QueueConfig
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.requests import RoutingHints, Sampling
from forebay.events.topics import CONTROL, DECISIONS, REQUESTS
from forebay.live.owner.owner import OwnershipLost
from forebay.transport.base import Draft
from tests.logs.playing import FLEET, mixed, scenario
from tests.logs.stage import Stage, prompt
from tests.system import take_snapshot


@scenario
async def resync() -> Stage:
    """Lost KV events: the worker re-announces its cache."""
    stage = await Stage().begin(*FLEET)
    await mixed(stage, 8)
    for worker in stage.workers.values():
        worker.loses = 1
    await mixed(stage, 16, "gap")
    return stage


@scenario
async def approximate() -> Stage:
    """No KV events: routed blocks count as cached for a time, up to a maximum number."""
    stage = await Stage(use_kv_events=False, ttl_s=5.0, approximate_blocks_max=40).begin(*FLEET)
    await mixed(stage, 16)
    await stage.pass_time(6.0)
    await mixed(stage, 12, "later")
    return stage


@scenario
async def silent_workers() -> Stage:
    """Workers without KV events beside other workers."""
    stage = await Stage(ttl_s=5.0).begin("w0", "w1")
    await stage.join("w2", kv_events=False)
    await stage.join("w3", kv_events=False)
    await mixed(stage, 24)
    return stage


@scenario
async def predicted() -> Stage:
    """Routed blocks count as cached until KV events confirm them."""
    stage = await Stage(predicted_ttl_s=2.0).begin(*FLEET)
    for number in range(16):
        stage.submit(f"r{number}", prompt(number % 2, 5, number))
    await stage.play()
    await stage.pass_time(3.0)
    await mixed(stage, 8, "later")
    return stage


@scenario
async def queries() -> Stage:
    """Route queries, also for requests that would wait or have no eligible worker."""
    stage = Stage(temperature=0.5, queue=QueueConfig(threshold=0.2))
    await stage.begin()
    stage.route_query("too-early", prompt(1, 3))
    await stage.settle()
    for name in FLEET:
        await stage.join(name)
    for number in range(8):
        stage.route_query(f"q{number}", prompt(number % 3, 4))
        stage.submit(f"r{number}", prompt(number % 3, 4))
        await stage.play(2)
    for number in range(12):
        stage.submit(f"more{number}", prompt(number, 6))
    stage.route_query("would-wait", prompt(1, 3))
    stage.route_query("nobody", prompt(1, 3), RoutingHints(required_taints=("of nobody",)))
    stage.route_query("no-adapter", prompt(1, 3), lora_name="adapter")
    await stage.play()
    return stage


@scenario
async def cancels() -> Stage:
    """Clients disconnect while queued, during prefill, during decode, and after the end."""
    stage = await Stage(queue=QueueConfig(threshold=0.2)).begin("w0", "w1", max_num_batched_tokens=128)
    for number in range(12):
        stage.submit(f"r{number}", prompt(number, 4), max_tokens=30)
    await stage.settle()
    stage.cancel("r11")
    stage.cancel("r0")
    await stage.play(8)
    stage.cancel("r1")
    stage.cancel("nobody")
    await stage.play()
    stage.cancel("r2")
    await stage.play()
    return stage


@scenario
async def deadlines() -> Stage:
    """No worker computes: requests that arrived together are aborted together."""
    stage = await Stage().begin(*FLEET)
    for number in range(8):
        stage.submit(f"r{7 - number}", prompt(number, 2), timeout_us=1_000_000)
    await stage.settle()
    await stage.pass_time(2.0)
    await mixed(stage, 4, "later")
    return stage


@scenario
async def redeliveries() -> Stage:
    """A repeated request is ignored; another one with its ID is rejected until the ID is forgotten."""
    stage = await Stage().begin(*FLEET)
    stage.submit("again", prompt(1, 3), max_tokens=8)
    stage.submit("again", prompt(1, 3), max_tokens=8)
    await stage.settle()
    stage.submit("again", prompt(2, 3))
    await stage.play()
    stage.submit("again", prompt(1, 3), max_tokens=8)
    stage.submit("again", prompt(1, 3), max_tokens=9)
    stage.submit("again", prompt(1, 3), max_tokens=8, sampling=Sampling(max_tokens=8, seed=7))
    await stage.play()
    await stage.pass_time(150.0)
    stage.submit("again", prompt(2, 3))
    await stage.play()
    return stage


@scenario
async def lost_workers() -> Stage:
    """Requests move to other workers until their attempts are exhausted."""
    stage = await Stage(attempts_max=2, temperature=0.5).begin(*FLEET)
    await mixed(stage, 6)
    for number in range(8):
        stage.submit(f"long{number}", prompt(number % 2, 4), max_tokens=40)
    await stage.play(4)
    await stage.fact(WorkerLost, "w0")
    await stage.play(2)
    await stage.fact(WorkerLost, "w1")
    await stage.fact(WorkerLost, "w2")
    await stage.play(3)
    await stage.fact(WorkerLost, "w3")
    stage.submit("no-workers", prompt(1, 2))
    await stage.settle()
    await stage.join("w0")
    await mixed(stage, 4, "later")
    return stage


@scenario
async def waiting_for_a_worker() -> Stage:
    """All workers are lost: requests wait for the next worker that joins."""
    stage = await Stage(attempts_max=5).begin("w0")
    for number in range(4):
        stage.submit(f"r{number}", prompt(number, 4), max_tokens=40)
    await stage.play(4)
    await stage.fact(WorkerLost, "w0")
    await stage.join("w1")
    await stage.play()
    return stage


@scenario
async def suspect_and_draining() -> Stage:
    stage = await Stage().begin(*FLEET)
    await mixed(stage, 6)
    await stage.fact(WorkerSuspect, "w0")
    await mixed(stage, 6, "suspect")
    await stage.fact(WorkerRecovered, "w0")
    await stage.fact(WorkerDraining, "w1")
    await mixed(stage, 8, "draining")
    await stage.fact(WorkerLost, "w1")
    await mixed(stage, 4, "gone")
    return stage


@scenario
async def take_over() -> Stage:
    """Another owner takes over during requests, before the first one notices."""
    stage = await Stage(temperature=0.5).begin(*FLEET)
    await mixed(stage, 8)
    for number in range(6):
        stage.submit(f"long{number}", prompt(number % 2, 4), max_tokens=30)
    await stage.play(3)
    first = stage.owner
    # Records of this owner after the claim of the other owner are stale.
    late = encode(DECISIONS, advance(first.world))
    await stage.begin()
    await stage.log.append([Draft(DECISIONS.name, 0, late)])
    await mixed(stage, 8, "later")
    try:
        await first.turn()
    except OwnershipLost:
        first.drop()
    return stage


@scenario
async def snapshots() -> Stage:
    """States are sealed while requests are active and queued, with sessions and remembered IDs."""
    stage = await Stage(session_ttl_s=60.0, queue=QueueConfig(threshold=0.4), predicted_ttl_s=1.0).begin(*FLEET)
    for life in range(2):
        await mixed(stage, 8, f"life{life}-", hints=RoutingHints(session_id=f"s{life}"))
        for number in range(10):
            stage.submit(f"long{life}-{number}", prompt(number, 4), max_tokens=20)
        await stage.play(3)
        await take_snapshot(stage.owner)
        stage.submit(f"long{life}-0", prompt(0, 4), max_tokens=20)
        await stage.play()
    return stage


@scenario
async def from_snapshot() -> Stage:
    """The recording begins at the first snapshot."""
    return await snapshots()


@scenario
async def output_blocks() -> Stage:
    """Workers report growing output; clients announce the expected length."""
    stage = await Stage(track_output_blocks=True).begin(*FLEET)
    for number in range(16):
        hints = RoutingHints(expected_output_tokens=(0, 40, 80)[number % 3])
        stage.submit(f"r{number}", prompt(number % 4, 2), max_tokens=20 + number * 4, hints=hints)
        await stage.play(3)
    await stage.play()
    return stage


@scenario
async def overload() -> Stage:
    """More load than the fleet can handle: requests are held, rejected and aborted, then the fleet recovers."""
    stage = await Stage(
        busy=BusyThresholds(active_decode_blocks_threshold=0.9),
        queue=QueueConfig(threshold=0.5, classes=(QueueClass(requests_per_worker_max=8),)),
    ).begin("w0", "w1", kv_blocks_total=64, max_num_batched_tokens=128)
    for number in range(40):
        stage.submit(f"r{number}", prompt(number, 3), max_tokens=12, timeout_us=2_000_000)
    await stage.play(4)
    await stage.pass_time(2.5)
    for number in range(24):
        stage.submit(f"later{number}", prompt(100 + number, 5))
        await stage.play(3)
    await stage.play()
    return stage


@scenario
async def commands() -> Stage:
    """Adapters are loaded and unloaded by command; workers refuse, leave and are late; another owner takes over."""
    stage = await Stage().begin(*FLEET)
    await stage.serve(("too-early", prompt(1, 3)), lora_name="sql")
    stage.command("load", "load_lora", "sql", worker_ids=("w1", "w2"))
    await stage.play()
    await mixed(stage, 8, "sql", lora_name="sql")
    stage.command("list", "list_loras")
    stage.command("list", "list_loras")
    stage.command("list", "sleep", nonce=1)
    stage.command("unload", "unload_lora", "sql", worker_ids=("w1", "w3"))
    stage.command("nobody", "pause", worker_ids=("w9",))
    stage.command("no-pool", "pause", pool="other")
    await stage.play()
    await mixed(stage, 6, "one", lora_name="sql")
    stage.workers["w0"].obeys = stage.workers["w3"].obeys = False
    stage.command("late", "clear_kv_blocks", timeout_us=2_000_000)
    stage.command("pending", "load_lora", "math")
    await stage.play()
    await take_snapshot(stage.owner)
    await stage.begin()
    stage.workers["w0"].obeys = True
    await stage.pass_time(3.0)
    stage.command("more", "load_lora", "math", worker_ids=("w0",))
    await stage.play()
    await stage.fact(WorkerLost, "w3")
    await mixed(stage, 6, "math", lora_name="math")
    return stage


@scenario
async def undecodable() -> Stage:
    """Records that do not decode keep their offsets and have no effect."""
    stage = await Stage().begin(*FLEET)
    await mixed(stage, 6)
    stage.put_bytes(REQUESTS, b"no event")
    stage.put_bytes(CONTROL, b"{}")
    stage.workers["w0"].stored([1 << 63, 5], parent=77)
    stage.put_bytes(REQUESTS, pack_u64([1, 2]))
    await mixed(stage, 6, "later")
    return stage


@scenario
async def foreign_records() -> Stage:
    """Another process wrote into the journal; verification must allow it explicitly."""
    stage = await Stage().begin(*FLEET)
    await mixed(stage, 6)
    stage.put_bytes(DECISIONS, b"of nobody")
    await mixed(stage, 6, "later")
    return stage
