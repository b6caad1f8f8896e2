"""Explanations of requests with an image: both stages, failures and waits."""

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


def report_progress(made: Recorder, kind: type[Any], **fields: Any) -> None:
    one = made.world.requests.get("r")
    assert one is not None
    of = {"worker_id": one.worker_id, "worker_epoch": one.worker_epoch, "owner_epoch": 0}
    made("progress", kind(request_id="r", attempt=one.stage_attempt, **of, **fields))


async def test_both_stages_are_explained() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    report_progress(made, EncodeFailed, error="out of memory")
    report_progress(made, EncodeFinished, encoded=ENCODED)
    report_progress(made, TransferFailed, error="it is gone")
    report_progress(made, EncodeFinished, encoded=ENCODED)
    report_progress(made, FirstTokenEmitted, cached_tokens=0)
    report_progress(made, RequestFinished, finish_reason="stop", output_tokens=2)
    made.seal()
    explanation = await made.explain("r")
    assert explanation.divergence is None
    assert words(explanation) == [
        *("submitted", "routed", "not_encoded", "routed", "encoded", "routed"),
        *("not_transferred", "routed", "encoded", "routed", "first_token", "finished"),
    ]
    assert [(one.stage, one.attempt) for one in explanation.routings] == [
        *(("encode", 1), ("encode", 2), ("aggregated", 1), ("encode", 3), ("aggregated", 2)),
    ]
    first = explanation.routings[0]
    assert (first.pool, first.mode, first.reason) == ("encoders", "least-loaded", "least_loaded")
    (before,) = explanation.routings[1].left_out
    assert (before.seen.worker_id, before.reasons) == (first.candidates[first.winner].seen.worker_id, ("had_it_last",))
    texts = [moment.text for moment in explanation.timeline]
    assert texts[1].startswith(f"encode sent to {first.candidates[first.winner].seen.worker_id}: ")
    assert any("could not encode its images and videos: out of memory" in text for text in texts)
    assert any("could not fetch its embeddings: it is gone" in text for text in texts)
    assert explanation.first_token is not None
    assert (explanation.first_token.attempt, explanation.state) == (2, "finished")


async def test_state_while_an_image_is_encoded() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    made.seal()
    assert (await made.explain("r")).state == "encode"
    name = made.world.requests.get("r").worker_id  # type: ignore[union-attr]
    made("fleet", WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=made.epoch(name)))
    made.seal()
    explanation = await made.explain("r")
    assert (explanation.state, words(explanation)[-2:]) == ("encode", ["worker_lost", "routed"])


async def test_progress_of_the_wrong_stage_is_ignored() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    report_progress(made, RequestFinished, finish_reason="stop")
    report_progress(made, TransferFailed, error="?")
    report_progress(made, FirstTokenEmitted)
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation)[2:] == ["outdated"] * 3
    assert not any(moment.counted for moment in explanation.timeline[2:])
    assert explanation.state == "encode"
