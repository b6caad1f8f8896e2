"""Explanations of requests with several stages: remote prefill, KV transfer and images that are encoded first."""

from collections.abc import Callable
from typing import Any

import pytest

from forebay.events.control import DisaggConfig, DisaggregationSet, QueueConfig
from forebay.events.decisions import PrefillPlace
from forebay.events.fleet import WorkerLost
from forebay.events.progress import (
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.replay.explain.timeline import Timeline
from forebay.replay.explain.wording import place_text
from forebay.replay.moment import pools_of, requests_of
from tests.core.worlds import (
    ENCODED,
    LEASE_US,
    MEDIA,
    PROMPTS,
    encode_pool,
    encoder,
    joined,
    prefill_pool,
    query,
    request,
)
from tests.replay.recorder import Recorder, disaggregated, ending_of, first_token_of, fleet, words

ENFORCED = DisaggConfig(enforce=True)


async def test_all_stages_of_a_remote_prefill_are_explained() -> None:
    made = disaggregated()
    made.stored("q", PROMPTS[0])
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", PrefillFailed, error="no room")
    made.progress("r", PrefillFinished, cached_tokens=4)
    made.progress("r", TransferFailed, error="peer gone")
    made.progress("r", PrefillFinished)
    made.progress("r", FirstTokenEmitted, cached_tokens=33, transferred_bytes=34_000, transfer_us=2_500)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=2)
    made.seal()
    explanation = await made.explain("r")
    assert explanation.divergence is None
    assert words(explanation) == [
        *("submitted", "routed", "not_prefilled", "routed", "prefilled", "routed", "not_transferred"),
        *("kv_released", "routed", "prefilled", "routed", "first_token", "finished"),
    ]
    assert [(one.stage, one.attempt) for one in explanation.routings] == [
        *(("prefill", 1), ("prefill", 2), ("decode", 1), ("prefill", 3), ("decode", 2)),
    ]
    texts = [moment.text for moment in explanation.timeline]
    assert texts[1].startswith("prefill sent to q: ")
    assert texts[1].endswith("; prompt computed by a prefill worker: the pool computes every prompt remotely")
    assert texts[2] == "q, attempt 1, could not compute its prompt: no room"
    assert texts[4] == (
        "p computed its prompt: 34 tokens, 4 of them from its cache; it keeps their KV, 34,000 bytes for 0.5 s"
    )
    assert texts[5].startswith("decode sent to ")
    assert "could not fetch its KV: peer gone" in texts[6]
    assert texts[7] == "p releases the KV of attempt 2: it could not be fetched"
    assert texts[-2].endswith(": 33 of 34 prompt tokens not computed here, 34,000 bytes of KV fetched in 2.5 ms")
    (passed_over,) = explanation.routings[1].left_out
    assert (passed_over.seen.worker_id, passed_over.reasons) == ("q", ("had_it_last",))
    first = first_token_of(explanation)
    assert (first.transferred_bytes, first.transfer_us, first.predicted_tokens) == (34_000, 2_500, None)
    decode = explanation.routings[2]
    assert (decode.overridden, decode.config["overlap_score_credit"]) == ((), 0.0), "the stage's, not the request's"


async def test_parts_of_time_to_first_token() -> None:
    made = disaggregated("p")
    made("control", prefill_pool(queue=QueueConfig(threshold=0.5)))
    made("requests", request("before", PROMPTS[0]))
    made("requests", request("r", PROMPTS[1]))
    made.progress("before", PrefillFinished, after_us=7_000)
    made.progress("r", PrefillFinished, after_us=20_000)
    made.progress("r", TransferFailed, error="peer gone", after_us=3_000)
    made.progress("r", PrefillFailed, error="no room", after_us=4_000)
    made.progress("r", PrefillFinished, after_us=5_000)
    made.progress("r", FirstTokenEmitted, after_us=9_000, transferred_bytes=34_000, transfer_us=2_500)
    made.seal()
    first = first_token_of(await made.explain("r"))
    assert first.ttft_us == 48_000
    assert first.parts_us == {"queue": 7_000, "prefill": 29_000, "transfer": 2_500, "decode": 9_500}


async def test_an_unjournalled_first_token_ends_the_parts_at_its_own_time() -> None:
    made = disaggregated("p", "q")
    made("requests", request("r", PROMPTS[0], at_us=1))
    made.progress("r", PrefillFinished, after_us=20_000)
    now_us = made.world.now_us
    made.progress("r", FirstTokenEmitted, after_us=1, at_us=now_us + 8_000, transfer_us=3_000)
    first = first_token_of(await made.explain("r"))
    assert (first.ttft_us, first.parts_us) == (
        None,
        {"prefill": 20_000, "transfer": 3_000, "decode": 5_000},
    )


async def test_time_to_first_token_includes_the_wait_for_a_decode_worker() -> None:
    made = disaggregated("p")
    made("requests", request("r", PROMPTS[0]))
    for name in "de":
        made.lose(name)
    made.progress("r", PrefillFinished, after_us=1_000)
    made("fleet", joined("f", 2, role="decode"), 50_000)
    made.progress("r", FirstTokenEmitted, after_us=2_000)
    made.seal()
    first = first_token_of(await made.explain("r"))
    assert first.parts_us == {"prefill": 1_020, "wait": 50_000, "decode": 2_000}


async def test_reason_for_local_prefill() -> None:
    made = disaggregated(disagg=DisaggConfig(policy="classic", max_local_prefill_length=99))
    made("requests", request("r", PROMPTS[0]))
    made("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy="classic", max_local_prefill_length=9)))
    made("requests", query("q", PROMPTS[0]))
    made.seal()
    explanation = await made.explain("r")
    where = "prompt computed on the decode worker: only 34 tokens are not cached"
    assert explanation.timeline[1].text.endswith(where)
    assert explanation.routings[0].prefill is not None
    assert (explanation.state, explanation.routings[0].prefill.prefill_waiting) == ("prefill", 0)
    query_explanation = await made.explain("q")
    (would,) = query_explanation.routings
    assert (would.stage, would.pool, would.attempt) == ("prefill", "prefillers", 0)
    assert (
        "by a prefill worker: 34 tokens are not cached on the decode worker, which is above the limit"
        in query_explanation.timeline[1].text
    )


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (PrefillPlace(remote=False, reason="short_prompt", uncached_tokens=0), "the whole prompt is cached"),
        (PrefillPlace(remote=False, reason="short_prompt", uncached_tokens=1), "only 1 token is not cached"),
        (PrefillPlace(remote=False, reason="short_prompt", uncached_tokens=2), "only 2 tokens are not cached"),
        (
            PrefillPlace(remote=False, reason="prefill_busy", prefill_waiting=1),
            "prefill workers are busy; 1 request waits at prefill workers",
        ),
    ],
)
def test_singular_and_plural_in_prefill_reasons(place: PrefillPlace, text: str) -> None:
    assert place_text(place) == f"prompt computed on the decode worker: {text}"


async def test_reason_for_remote_prefill_of_a_short_prompt() -> None:
    made = disaggregated(disagg=DisaggConfig(policy="isl_bounding"))
    made("requests", request("r", PROMPTS[0]))
    made.seal()
    explanation = await made.explain("r")
    why = "34 tokens are not cached on the decode worker, a share above the limit"
    assert explanation.timeline[1].text.endswith(f"prompt computed by a prefill worker: {why}")


async def test_state_while_kv_is_computed_retained_and_fetched() -> None:
    made = disaggregated("p")
    made("requests", request("r", PROMPTS[0]))
    made.seal()
    assert (await made.explain("r")).state == "remote_prefill"
    for name in "de":
        made.lose(name)
    made.progress("r", PrefillFinished)
    made.seal()
    assert (await made.explain("r")).state == "waiting"
    (facts,) = requests_of(made.world, {})
    assert (facts.phase, facts.kept_by, facts.kept_for_us) == ("waiting", "p", LEASE_US)
    assert [(one.role, one.disagg is None) for one in pools_of(made.world)] == [("decode", False), ("prefill", True)]
    made("fleet", joined("f", 2, role="decode"))
    made.seal()
    assert (await made.explain("r")).state == "transfer"


async def test_loss_of_the_kv_holder_is_reported_while_waiting() -> None:
    made = disaggregated("p")
    made("requests", request("r", PROMPTS[0]))
    for name in "de":
        made.lose(name)
    made.progress("r", PrefillFinished)
    made.lose("p")
    made("fleet", joined("f", 2, role="decode"))
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation)[2:] == ["prefilled", "holder_lost", "routed"]
    assert explanation.routings[-1].stage == "aggregated"


def fetching(kind: type[Any], **fields: Any) -> Callable[[Recorder], None]:
    """Return a step in which the decode worker reports `kind`."""

    def step(made: Recorder) -> None:
        made.progress("r", PrefillFinished)
        made.progress("r", kind, **fields)

    return step


def too_late(made: Recorder) -> None:
    for name in "de":
        made.lose(name)
    made.progress("r", PrefillFinished)
    made.wait(LEASE_US)
    made("fleet", joined("f", 2, role="decode"))


def decoder_lost(made: Recorder) -> None:
    made.progress("r", PrefillFinished)
    one = made.world.requests.get("r")
    assert one is not None
    made.lose(one.worker_id)


def another_model(made: Recorder) -> None:
    made.progress("r", PrefillFinished, model="another")


RELEASED: tuple[tuple[Callable[[Recorder], None], str], ...] = (
    (decoder_lost, "the worker that should fetch it is lost"),
    (fetching(TransferFailed, error="?"), "it could not be fetched"),
    (fetching(FirstTokenEmitted, unfetched=True), "the response had begun and continued without it"),
    (fetching(RequestFailed, error="?"), "the request ended without it"),
    (too_late, "no worker could fetch it before the lease expired"),
    (another_model, "its descriptor names another worker, epoch or model"),
)


@pytest.mark.parametrize(("step", "why"), RELEASED)
async def test_released_kv_is_explained_with_reason(step: Callable[[Recorder], None], why: str) -> None:
    made = disaggregated("p")
    made("requests", request("r", PROMPTS[0]))
    step(made)
    made.seal()
    explanation = await made.explain("r")
    assert explanation.divergence is None
    (moment,) = [one for one in explanation.timeline if one.what == "kv_released"]
    assert moment.text == f"p releases the KV of attempt 1: {why}"
    assert moment.counted


async def test_progress_of_the_wrong_stage_is_ignored() -> None:
    made = disaggregated()
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", RequestFinished, finish_reason="stop")
    made.progress("r", RequestFailed, error="?")
    made.progress("r", TransferFailed, error="?")
    made.progress("r", FirstTokenEmitted)
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation)[2:] == ["outdated"] * 4
    assert explanation.state == "remote_prefill"


def test_timeline_starts_with_an_active_request() -> None:
    made = disaggregated()
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", PrefillFinished)
    timeline = Timeline("r", made.world)
    one = made.world.requests.get("r")
    assert one is not None
    of: Any = {"request_id": "r", "worker_id": one.worker_id, "worker_epoch": one.worker_epoch, "owner_epoch": 0}
    timeline.observe("progress", 9, FirstTokenEmitted(**of, attempt=1, at_us=700), 500)
    explanation = timeline.explanation(diverged=False)
    assert words(explanation) == ["taken_up", "first_token"]
    assert first_token_of(explanation).parts_us is None, "what came before is not known"
    timeline = Timeline("r", made.world)
    timeline.observe("progress", 9, TransferFailed(**of, attempt=1, error="peer gone"), 500)
    assert words(timeline.explanation(diverged=False)) == ["taken_up", "not_transferred"]


async def test_wait_for_prefill_workers_is_explained() -> None:
    made = disaggregated("p")
    made("control", prefill_pool(queue=QueueConfig(threshold=0.5)))
    made("requests", request("r0", PROMPTS[0]))
    made("requests", request("r", PROMPTS[1]))
    made.seal()
    explanation = await made.explain("r")
    assert ": p/0, the least loaded rank, has 34 tokens to prefill" in explanation.timeline[-1].text


async def test_rejection_lists_excluded_prefill_workers() -> None:
    made = disaggregated("p", disagg=ENFORCED)
    made.lose("p")
    made("fleet", joined("p", 0, pool="prefillers", role="prefill", loras=()))
    made("requests", request("r", PROMPTS[0], lora_name="x"))
    made("fleet", joined("f", 2, role="decode", loras=("x",)))
    made("requests", request("s", PROMPTS[0], lora_name="x"))
    made.seal()
    nobody = ending_of(await made.explain("r"))
    assert [one.seen.worker_id for one in nobody.left_out] == ["d", "e"]
    prefill = ending_of(await made.explain("s"))
    assert [(one.seen.worker_id, one.reasons) for one in prefill.left_out] == [("p", ("missing_adapter",))]


def staged() -> Recorder:
    made = fleet()
    made("control", encode_pool())
    for slot, name in enumerate("ef"):
        made("fleet", encoder(name, slot))
    return made


async def test_both_stages_of_a_request_with_an_image_are_explained() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    made.progress("r", EncodeFailed, error="out of memory")
    made.progress("r", EncodeFinished, encoded=ENCODED)
    made.progress("r", TransferFailed, error="it is gone")
    made.progress("r", EncodeFinished, encoded=ENCODED)
    made.progress("r", FirstTokenEmitted, cached_tokens=0)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=2)
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
    assert (first_token_of(explanation).attempt, explanation.state) == (2, "finished")


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


async def test_progress_of_another_stage_is_ignored_while_an_image_is_encoded() -> None:
    made = staged()
    made("requests", request("r", PROMPTS[0][:2], media=(MEDIA,)))
    made.progress("r", RequestFinished, finish_reason="stop")
    made.progress("r", TransferFailed, error="?")
    made.progress("r", FirstTokenEmitted)
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation)[2:] == ["outdated"] * 3
    assert not any(moment.counted for moment in explanation.timeline[2:])
    assert explanation.state == "encode"
