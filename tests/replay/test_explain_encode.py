"""A request with an image, explained: its two stages, what went wrong in each, and what it waited for."""

from typing import Any

from forebay.events.fleet import WorkerLost
from forebay.events.progress import (
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    RequestFinished,
    TransferFailed,
)
from tests.core.worlds import ENCODED, MEDIA, PROMPTS, encode_pool, encoder, request
from tests.replay.recorder import Recorder, fleet, words


def staged() -> Recorder:
    made = fleet()
    made("control", encode_pool())
    for slot, name in enumerate("ef"):
        made("fleet", encoder(name, slot))
    return made


def said(made: Recorder, kind: type[Any], **fields: Any) -> None:
    one = made.world.requests.get("r")
    assert one is not None
    of = {"worker_id": one.worker_id, "worker_epoch": one.worker_epoch, "owner_epoch": 0}
    made("progress", kind(request_id="r", attempt=one.stage_attempt, **of, **fields))


async def test_both_stages_are_told() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    said(made, EncodeFailed, error="out of memory")
    said(made, EncodeFinished, encoded=ENCODED)
    said(made, TransferFailed, error="it is gone")
    said(made, EncodeFinished, encoded=ENCODED)
    said(made, FirstTokenEmitted, cached_tokens=0)
    said(made, RequestFinished, finish_reason="stop", output_tokens=2)
    made.seal()
    told = await made.explain("r")
    assert told.divergence is None
    assert words(told) == [
        *("submitted", "routed", "not_encoded", "routed", "encoded", "routed"),
        *("not_transferred", "routed", "encoded", "routed", "first_token", "finished"),
    ]
    assert [(one.stage, one.attempt) for one in told.routings] == [
        *(("encode", 1), ("encode", 2), ("aggregated", 1), ("encode", 3), ("aggregated", 2)),
    ]
    first = told.routings[0]
    assert (first.pool, first.mode, first.reason) == ("encoders", "least-loaded", "least_loaded")
    (before,) = told.routings[1].left_out
    assert (before.seen.worker_id, before.reasons) == (first.candidates[first.winner].seen.worker_id, ("had_it_last",))
    texts = [moment.text for moment in told.timeline]
    assert texts[1].startswith(f"encode sent to {first.candidates[first.winner].seen.worker_id}: ")
    assert any("could not encode its images and videos: out of memory" in text for text in texts)
    assert any("could not fetch its embeddings: it is gone" in text for text in texts)
    assert told.first_token is not None
    assert (told.first_token.attempt, told.state) == (2, "finished")


async def test_where_it_is_while_it_is_encoded() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    made.seal()
    assert (await made.explain("r")).state == "encode"
    name = made.world.requests.get("r").worker_id  # type: ignore[union-attr]
    made("fleet", WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=made.epoch(name)))
    made.seal()
    told = await made.explain("r")
    assert (told.state, words(told)[-2:]) == ("encode", ["worker_lost", "routed"])


async def test_what_a_worker_says_in_the_wrong_stage_counts_not() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    said(made, RequestFinished, finish_reason="stop")
    said(made, TransferFailed, error="?")
    said(made, FirstTokenEmitted)
    made.seal()
    told = await made.explain("r")
    assert words(told)[2:] == ["outdated"] * 3
    assert not any(moment.counted for moment in told.timeline[2:])
    assert told.state == "encode"
