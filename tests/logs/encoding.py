"""A recording of requests with images and videos: encode workers succeed, fail, are lost and are cancelled."""

from hashlib import sha256
from typing import Any

from forebay.events.control import PoolConfigured, QueueConfig
from forebay.events.fleet import WorkerLost
from forebay.events.media import Media
from forebay.events.topics import CONTROL
from tests.logs.playing import scenario
from tests.logs.stage import BLOCK, MODEL, Stage, prompt

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
    await stage.owner.take_snapshot()
    stage.cancel("cancelled")
    stage.submit("lost", prompt(2, 3), media=(media(3),))
    await stage.settle()
    await stage.fact(WorkerLost, "e0")
    stage.submit("lost-too", prompt(2, 3), media=(media(4),))
    await stage.settle()
    await stage.fact(WorkerLost, "e1")
    await stage.play()
    return stage
