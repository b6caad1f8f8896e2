"""Disaggregation and encoding when something goes wrong: who is tried next, how often, and what its client is told."""

from typing import Any

import msgspec
import pytest

from forebay.core.phases import Phase
from forebay.core.selection.counterfactual import Counterfactual, counterfactual
from forebay.core.state.submitted_request import content_hash
from forebay.events.control import DisaggConfig, DisaggregationSet, QueueConfig, RouterConfig
from forebay.events.decisions import CommandTarget, KvReleased, PrefillPlace, RequestAborted, RequestHeld, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.media import MEDIA_BYTES_MAX, MEDIA_MAX
from forebay.events.progress import (
    EncodeFailed,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import RoutingHints
from tests.core.worlds import (
    ENCODED,
    ENCODERS,
    MEDIA,
    PROMPTS,
    Driver,
    decode_pool,
    encode_pool,
    encoder,
    joined,
    pool,
    prefilled_by,
    prefiller,
    request,
)

ENFORCED = DisaggConfig(enforce=True)
LOCAL = PrefillPlace(remote=False, reason="failed")


def failed(drive: Driver, routed: RequestRouted, error: str = "out of blocks", **fields: Any) -> list[Any]:
    return drive.emit(PrefillFailed, routed, error=error, **fields)


def not_fetched(drive: Driver, routed: RequestRouted, error: str = "peer gone") -> list[Any]:
    """What is decided, after that its KV is given back if it was to be fetched."""
    made = drive.emit(TransferFailed, routed, error=error)
    if made and routed.stage == "decode":
        released = made.pop(0)
        assert (type(released), released.reason) == (KvReleased, "not_fetched")
    return made


def phase(drive: Driver, name: str = "r") -> Phase | None:
    one = drive.world.requests.get(name)
    return None if one is None else one.phase


def idle(drive: Driver) -> bool:
    return not any(load.active_requests or load.prefill_tokens for load in drive.world.load.ranks())


def test_a_failed_prefill_moves_to_other_workers_and_finally_to_the_decode_worker() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    routed = [drive.ask()]
    for _ in range(2):
        routed += failed(drive, routed[-1])
        assert routed[-1].worker_id != routed[-2].worker_id
    assert [(one.stage, one.attempt) for one in routed] == [("prefill", 1), ("prefill", 2), ("prefill", 3)]
    (last,) = failed(drive, routed[-1])
    assert (last.stage, last.worker_id, last.attempt, last.earlier_attempts) == ("aggregated", "d", 1, 3)
    assert last.prefill == LOCAL


def test_enforced_prompts_are_given_up_with_the_reason() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    made = [drive.ask()]
    for _ in range(2):
        made += failed(drive, made[-1])
    assert {one.worker_id for one in made} == {"p"}, "there is no other"
    (given_up,) = failed(drive, made[-1], "out of blocks " + "x" * 9_000)
    assert isinstance(given_up, RequestAborted)
    assert (given_up.reason, given_up.worker_id, given_up.attempt, given_up.holder) == ("prefill_failed", "", 3, None)
    assert "3 attempts: out of blocks" in given_up.message
    assert len(given_up.message) < 1_000
    assert idle(drive)


def test_a_prefill_rejection_keeps_its_message() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    (refused,) = failed(
        drive, drive.ask(), "the prompt has too many tokens", status=400, code="context_length_exceeded"
    )
    assert (refused.reason, refused.status, refused.code) == ("prefill_refused", 400, "context_length_exceeded")
    assert (refused.message, refused.worker_id) == ("the prompt has too many tokens", "")
    assert idle(drive)


def test_a_prefill_worker_that_is_lost_is_replaced() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    (second,) = drive.lose(first.worker_id)
    assert (second.stage, second.attempt) == ("prefill", 2)
    assert second.worker_id != first.worker_id
    (local,) = drive.lose(second.worker_id)
    assert (local.stage, local.prefill) == ("aggregated", PrefillPlace(remote=False, reason="no_prefill_worker"))


def test_an_enforced_prompt_waits_for_a_prefill_worker_until_its_deadline() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    first = drive.ask()
    assert drive.lose("p") == []
    assert phase(drive) is Phase.WAITING
    (again,) = drive("fleet", prefiller("q", 1))
    assert (again.stage, again.worker_id, again.attempt) == ("prefill", "q", 2)
    drive.lose("q")
    (given_up,) = drive.wait(2_000_000)
    assert (given_up.reason, given_up.attempt) == ("deadline", 2)
    assert failed(drive, first) == []


def test_suspect_and_draining_prefill_workers_get_nothing_new() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    drive.fact(WorkerSuspect, "p")
    assert drive.ask("r0").worker_id == "q"
    drive.fact(WorkerDraining, "q")
    assert drive.ask("r1").stage == "aggregated"
    drive.fact(WorkerRecovered, "p")
    assert drive.ask("r2").worker_id == "p"


FOREIGN: tuple[dict[str, Any], ...] = ({"worker_epoch": 99}, {"worker_id": "q"}, {"model": "another"})


@pytest.mark.parametrize("lie", FOREIGN)
def test_a_descriptor_of_another_worker_epoch_or_model_is_refused(lie: dict[str, Any]) -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = drive.ask()
    fields = {"worker_id": "p", "worker_epoch": first.worker_epoch, **lie}
    released, again = drive.emit(PrefillFinished, first, prefilled=prefilled_by(**fields))
    target = CommandTarget(worker_id="p", worker_epoch=first.worker_epoch, pool="prefillers", slot=0)
    assert (released.attempt, released.holder, released.reason) == (1, target, "foreign_descriptor"), "who says so"
    assert (again.stage, again.attempt) == ("prefill", 2)
    assert drive.world.counts["foreign_descriptor"] == 1
    assert drive.active().prefilled is None
    drive("control", DisaggregationSet(model="m", disagg=ENFORCED))
    _, third = drive.emit(PrefillFinished, again, prefilled=prefilled_by(**fields))
    released, given_up = drive.emit(PrefillFinished, third, prefilled=prefilled_by(**fields))
    assert (released.attempt, given_up.holder) == (3, None)
    assert "the KV descriptor of worker" in given_up.message


def test_unfetched_kv_is_recomputed_and_the_last_attempt_is_local() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    (then,) = drive.prefilled(first)
    (again,) = not_fetched(drive, then)
    assert (again.stage, again.attempt) == ("prefill", 2)
    assert again.worker_id != first.worker_id
    (then,) = drive.prefilled(again)
    assert (then.stage, then.attempt) == ("decode", 2)
    (last,) = not_fetched(drive, then)
    assert (last.stage, last.attempt, last.prefill) == ("aggregated", 3, LOCAL)
    assert not_fetched(drive, last) == [], "it has nothing to fetch"
    drive.emit(FirstTokenEmitted, last)
    drive.finish(last)
    assert phase(drive) is None


def test_a_failed_fetch_is_retried_on_another_decode_worker() -> None:
    drive = Driver().disagg(["p"], ["d", "e", "f"], disagg=ENFORCED)
    fetching = []
    routed = drive.ask()
    for _ in range(3):
        (then,) = drive.prefilled(routed)
        fetching.append(then.worker_id)
        (routed,) = not_fetched(drive, then)
    assert fetching[0] != fetching[1] != fetching[2]


def test_enforced_prompts_are_fetched_as_often_as_attempts_are_made() -> None:
    drive = Driver().disagg(["p", "q"], ["d"], disagg=ENFORCED)
    made: list[Any] = [drive.ask()]
    for _ in range(3):
        (then,) = drive.prefilled(made[-1])
        made += not_fetched(drive, then)
    assert [getattr(one, "stage", "") for one in made] == ["prefill", "prefill", "prefill", ""]
    assert (made[-1].reason, made[-1].attempt) == ("prefill_failed", 3)
    assert made[-1].message == "remote prefill or its KV transfer failed in 3 attempts: peer gone"


def test_a_decode_worker_lost_while_it_fetches_is_replaced_and_the_cache_used_again() -> None:
    drive = Driver().disagg(["p", "q"], ["d", "e"])
    first = drive.ask()
    (then,) = drive.prefilled(first)
    released, again = drive.lose(then.worker_id)
    assert (released.holder.worker_id, released.reason) == (first.worker_id, "worker_lost")
    assert (again.stage, again.attempt) == ("prefill", 2)
    assert again.candidates == 2, "who computed it may be asked again"
    (then,) = drive.prefilled(again)
    assert (then.stage, then.attempt) == ("decode", 2)


def test_a_begun_response_continues_on_a_decode_worker_alone() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], disagg=ENFORCED)
    (then,) = drive.prefilled(drive.ask())
    drive.emit(FirstTokenEmitted, then)
    drive.emit(OutputGrown, then, output_tokens=5)
    (on,) = drive.lose(then.worker_id)
    assert (on.stage, on.prefill, on.attempt) == ("aggregated", PrefillPlace(remote=False, reason="begun"), 2)
    assert on.worker_id != then.worker_id


def test_a_lost_holder_during_transfer_is_reported_by_the_fetcher() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    (then,) = drive.prefilled(first)
    assert drive.lose(first.worker_id) == []
    assert phase(drive) is Phase.TRANSFER, "all of it may be there already"
    (aborted,) = drive.cancel("r")
    assert (aborted.worker_id, aborted.holder) == (then.worker_id, None), "nobody keeps it"


def test_cancellation_reaches_worker_and_kv_holder() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask("r0")
    (aborted,) = drive.cancel("r0")
    assert (aborted.pool, aborted.worker_id, aborted.holder) == ("prefillers", first.worker_id, None)
    again = failed(drive, drive.ask("r1"))[0]
    (then,) = drive.prefilled(again)
    (aborted,) = drive.cancel("r1")
    assert (aborted.pool, aborted.worker_id) == ("default", then.worker_id)
    assert aborted.holder is not None
    assert (aborted.holder.worker_id, aborted.attempt) == (again.worker_id, 2), "as high as what it keeps"
    (then,) = drive.prefilled(drive.ask("r2"))
    drive.emit(FirstTokenEmitted, then)
    (aborted,) = drive.cancel("r2")
    assert aborted.holder is None, "it was fetched"
    assert idle(drive)


def test_images_are_encoded_for_the_worker_that_computes_the_prompt_and_again_for_the_next() -> None:
    drive = Driver().disagg(["p", "q"], ["d"]).encoders("e", "f")
    first = drive.ask(media=(MEDIA,))
    (second,) = drive.encoded(first)
    assert [first.stage, second.stage] == ["encode", "prefill"]
    assert drive.active().encoded == ENCODED
    (again,) = not_fetched(drive, second, "its embeddings are gone")
    assert (again.stage, again.attempt) == ("encode", 2)
    (retried,) = drive.encoded(again)
    assert (retried.stage, retried.attempt) == ("prefill", 2)
    (then,) = drive.prefilled(retried)
    assert (then.stage, then.attempt) == ("decode", 1)
    assert drive.active().encoded is None, "it is used up"


def test_a_prompt_with_images_is_computed_alone_in_the_end() -> None:
    drive = Driver().disagg(["p"], ["d"]).encoders("e")
    routed = drive.ask(media=(MEDIA,))
    for attempt in (1, 2):
        (prefill,) = drive.encoded(routed)
        (routed,) = failed(drive, prefill)
        assert (routed.stage, routed.attempt) == ("encode", attempt + 1)
    (prefill,) = drive.encoded(routed)
    (last,) = failed(drive, prefill)
    assert (last.stage, last.worker_id, last.prefill) == ("aggregated", "d", LOCAL)


def test_an_enforced_prompt_with_images_is_given_up_for_what_failed() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED).encoders("e")
    routed = drive.ask(media=(MEDIA,))
    for _ in range(3):
        (prefill,) = drive.encoded(routed)
        (routed,) = failed(drive, prefill)
    assert routed.reason == "prefill_failed"
    assert "3 attempts: out of blocks" in routed.message
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED).encoders("e")
    routed = drive.ask(media=(MEDIA,))
    for _ in range(2):
        (prefill,) = drive.encoded(routed)
        drive.lose("p")
        (routed,) = drive("fleet", prefiller("p"))
        assert routed.stage == "encode"
    (prefill,) = drive.encoded(routed)
    (given_up,) = drive.lose("p")
    assert given_up.message.endswith(
        "in 3 attempts: prefill workers were lost, or no decode worker fetched the KV in time"
    )


def test_a_lowered_attempt_limit_applies_at_once() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (then,) = drive.prefilled(drive.ask())
    (again,) = not_fetched(drive, then)
    assert again.stage == "prefill"
    drive("control", msgspec.structs.replace(decode_pool(), attempts_max=1))
    (given_up,) = failed(drive, again)
    assert (given_up.reason, given_up.attempt) == ("prefill_failed", 2)


# KV that nobody will fetch is given back at once, by who keeps it


WAYS: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("not_fetched", TransferFailed, {"error": "?"}),
    ("request_ended", RequestFailed, {"error": "?"}),
    ("request_ended", RequestFinished, {"finish_reason": "stop"}),
    ("not_needed", FirstTokenEmitted, {"unfetched": True}),
)


def target(routed: RequestRouted) -> CommandTarget:
    return CommandTarget(
        worker_id=routed.worker_id, worker_epoch=routed.worker_epoch, pool=routed.pool, slot=routed.slot
    )


@pytest.mark.parametrize(("reason", "kind", "fields"), WAYS)
def test_a_decode_worker_that_does_not_fetch_sets_free_what_is_kept(
    reason: str, kind: Any, fields: dict[str, Any]
) -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    (then,) = drive.prefilled(first)
    released, *_ = drive.emit(kind, then, **fields)
    assert isinstance(released, KvReleased)
    assert (released.request_id, released.attempt, released.holder) == ("r", 1, target(first))
    assert released.reason == reason
    assert drive.world.counts[f"kv_released_{reason}"] == 1
    assert not drive.emit(kind, then, **fields), "once"


# Requests with images: an encode worker first, then one that answers


def staged(*encoders: str, **router: Any) -> Driver:
    return Driver().fleet("a", "b", **router).encoders(*encoders)


def test_media_are_encoded_before_a_worker_answers() -> None:
    drive = staged("e", "f")
    first = drive.ask(media=(MEDIA,))
    assert (first.stage, first.pool, first.attempt, first.mode) == ("encode", "encoders", 1, "least-loaded")
    assert first.worker_id in ENCODERS
    assert drive.world.load.rank_load(first.worker_id, 0).prefill_tokens == MEDIA.tokens
    (then,) = drive.encoded(first)
    assert (then.stage, then.pool, then.attempt) == ("aggregated", "default", 1)
    assert then.worker_id in ("a", "b")
    assert drive.world.load.rank_load(first.worker_id, 0).active_requests == 0
    assert drive.world.load.rank_load(then.worker_id, 0).active_requests == 1
    one = drive.active()
    assert one.encoded == ENCODED
    drive.finish(then)
    assert not len(drive.world.requests)


def test_requests_without_media_and_those_without_encode_workers_go_straight_to_who_answers() -> None:
    drive = staged("e")
    (plain,) = drive("requests", request("plain", PROMPTS[0]))
    assert (plain.stage, plain.pool) == ("aggregated", "default")
    drive.lose("e")
    assert drive.ask(media=(MEDIA,)).stage == "aggregated"
    alone = Driver().fleet("a")
    assert alone.ask(media=(MEDIA,)).stage == "aggregated"


def test_encode_workers_serve_no_requests() -> None:
    drive = Driver().encoders("e")
    drive("control", pool())
    assert drive.ask(media=(MEDIA,)).reason == "no_workers"
    only = Driver().encoders("e")
    assert only.ask(media=(MEDIA,)).reason == "wrong_model"
    named = staged("e")
    (refused,) = named("requests", request("r", routing=RoutingHints(worker_id="e")))
    assert refused.reason == "unknown_worker"


def test_the_least_loaded_encoder_gets_it_whatever_the_mode_is() -> None:
    drive = Driver().fleet("a", mode="direct").encoders("e", "f")
    direct = RoutingHints(worker_id="a")
    routed = [drive.ask(f"r{number}", routing=direct, media=(MEDIA,)) for number in range(4)]
    assert sorted(one.worker_id for one in routed) == ["e", "e", "f", "f"]
    assert {(one.candidates, one.mode) for one in routed} == {(2, "least-loaded")}


def test_a_failed_encoding_is_retried_and_aborted_with_the_reason() -> None:
    drive = staged("e", "f")
    routed = [drive.ask(media=(MEDIA,))]
    for _ in range(2):
        (again,) = drive.emit(EncodeFailed, routed[-1], error="out of memory")
        assert again.worker_id != routed[-1].worker_id
        routed.append(again)
    assert [one.attempt for one in routed] == [1, 2, 3]
    (given_up,) = drive.emit(EncodeFailed, routed[-1], error="out of memory " + "x" * 9_000)
    assert isinstance(given_up, RequestAborted)
    assert (given_up.reason, given_up.worker_id) == ("encode_failed", "")
    assert given_up.message.startswith("images or videos could not be encoded and fetched in 3 attempts: out of mem")
    assert len(given_up.message) < 1_000
    assert all(not load.active_requests for load in drive.world.load.ranks())


def test_a_single_encoder_is_tried_again() -> None:
    drive = staged("e")
    (again,) = drive.emit(EncodeFailed, drive.ask(media=(MEDIA,)), error="busy")
    assert (again.worker_id, again.attempt, again.stage) == ("e", 2, "encode")


def test_a_lost_encoder_is_replaced_by_another_or_by_the_generating_worker() -> None:
    drive = staged("e", "f")
    first = drive.ask(media=(MEDIA,))
    (second,) = drive.lose(first.worker_id)
    assert (second.stage, second.attempt) == ("encode", 2)
    (main,) = drive.lose(second.worker_id)
    assert (main.stage, main.attempt) == ("aggregated", 1)
    one = drive.active()
    assert one.encoded is None, "its worker gets the images themselves"


def test_encoders_that_are_lost_one_after_another_are_not_replaced_for_ever() -> None:
    drive = staged("e", "f")
    made = [drive.ask(media=(MEDIA,))]
    for _ in range(2):
        name = made[-1].worker_id
        made += drive.lose(name)
        drive("fleet", encoder(name))
    (given_up,) = drive.lose(made[-1].worker_id)
    assert (given_up.reason, given_up.message[-25:]) == ("encode_failed", " encode workers were lost")


def test_unfetched_embeddings_are_encoded_again() -> None:
    drive = staged("e", "f")
    first = drive.ask(media=(MEDIA,))
    (main,) = drive.encoded(first)
    (again,) = drive.emit(TransferFailed, main, error="its memory is gone")
    assert (again.stage, again.attempt) == ("encode", 2)
    assert again.worker_id != first.worker_id
    (main,) = drive.encoded(again)
    assert (main.stage, main.attempt) == ("aggregated", 2)
    (again,) = drive.emit(TransferFailed, main, error="its memory is gone")
    (main,) = drive.encoded(again)
    (given_up,) = drive.emit(TransferFailed, main, error="its memory is gone")
    assert (given_up.reason, given_up.attempt) == ("encode_failed", 3)
    assert given_up.message.endswith("in 3 attempts: its memory is gone")


def test_embeddings_go_with_the_worker_that_fetched_them() -> None:
    drive = staged("e")
    (main,) = drive.encoded(drive.ask(media=(MEDIA,)))
    (again,) = drive.lose(main.worker_id)
    assert (again.stage, again.attempt) == ("encode", 2)
    (second,) = drive.encoded(again)
    assert (second.stage, second.attempt) == ("aggregated", 2)
    assert second.worker_id != main.worker_id


def test_a_cancelled_request_is_taken_back_from_its_encoder() -> None:
    drive = staged("e")
    first = drive.ask(media=(MEDIA,))
    (aborted,) = drive.cancel("r")
    assert (aborted.pool, aborted.worker_id, aborted.slot, aborted.attempt) == ("encoders", "e", 0, 1)
    assert drive.encoded(first) == []
    assert drive.world.counts["stale_progress"] == 1


def test_what_ends_a_request_is_of_its_highest_attempt_in_any_stage() -> None:
    drive = Driver().fleet("a", "b")
    drive("control", encode_pool())
    (main,) = drive.lose(drive.ask(media=(MEDIA,)).worker_id)
    assert (main.stage, main.attempt) == ("aggregated", 2)
    drive("fleet", encoder("e"))
    assert drive.lose(main.worker_id) == [], "nobody can answer it"
    (encoding,) = drive("fleet", joined("c"))
    assert (encoding.stage, encoding.attempt) == ("encode", 2), "what its encoder tells the client is not void"
    (aborted,) = drive.cancel("r")
    assert (aborted.worker_id, aborted.attempt) == ("e", 2), "what attempt 2 says after it is void"


def test_the_queue_comes_first_and_only_once() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.5)).encoders("e")
    (plain,) = drive("requests", request("plain", PROMPTS[0]))
    assert isinstance(drive.ask(media=(MEDIA,)), RequestHeld)
    made = drive.finish(plain)
    assert [(one.stage, one.waited_us) for one in made] == [("encode", 10)]
    drive("requests", request("more", PROMPTS[1]))
    (main,) = drive.encoded(made[0])
    assert (main.stage, main.waited_us) == ("aggregated", 0)


def test_a_worker_that_was_to_encode_by_itself_has_nothing_to_fetch() -> None:
    drive = Driver().fleet("a")
    routed = drive.ask(media=(MEDIA,))
    assert drive.emit(TransferFailed, routed, error="?") == []
    assert phase(drive) is Phase.PREFILL


def test_the_same_prompt_with_another_image_is_another_request() -> None:
    plain = request("r", PROMPTS[0])
    one = request("r", PROMPTS[0], media=(MEDIA,))
    again = request("r", PROMPTS[0], media=(msgspec.structs.replace(MEDIA, content=b""),))
    others = [
        request("r", PROMPTS[0], media=(msgspec.structs.replace(MEDIA, **change),))
        for change in ({"digest": "cd" * 32}, {"first_token": 2}, {"kind": "video"}, {"tokens": 5})
    ]
    assert content_hash(one) == content_hash(again), "the digest stands for the bytes"
    assert len({content_hash(event) for event in (plain, one, *others)}) == 6


def test_a_request_has_only_so_many_bytes_of_media() -> None:
    half = msgspec.structs.replace(MEDIA, content=bytes(MEDIA_BYTES_MAX // 2))
    request("r", media=(half, half))
    with pytest.raises(ValueError, match=f"the maximum is {MEDIA_BYTES_MAX}"):
        request("r", media=(half, half, MEDIA))
    with pytest.raises(ValueError, match=f"{MEDIA_MAX + 1}, the maximum is {MEDIA_MAX}"):
        request("r", media=(MEDIA,) * (MEDIA_MAX + 1))


def test_the_role_of_a_pool_is_part_of_the_state_and_the_usual_one_is_not() -> None:
    drive = Driver()
    drive("control", pool())
    before = drive.world.digest()
    drive.world.pools["default"] = msgspec.structs.replace(pool(), role="encode")
    assert drive.world.digest() != before


def test_another_policy_resumes_waiting_requests() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    drive.ask()
    drive.lose("p")
    (routed,) = drive("control", DisaggregationSet(model="m", disagg=DisaggConfig()))
    assert (routed.stage, routed.prefill.reason) == ("aggregated", "no_prefill_worker")


def test_kept_kv_ends_with_the_epoch_of_its_holder() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (then,) = drive.prefilled(drive.ask())
    drive.lose("p")
    drive("fleet", prefiller("p"))
    (aborted,) = drive.cancel("r")
    assert (aborted.worker_id, aborted.holder) == (then.worker_id, None), "this p keeps nothing"


def test_kv_is_released_if_the_only_worker_of_its_request_is_lost() -> None:
    """Its holder stands in the record that ends it, or is told so beside that."""
    for fetching in (False, True):
        drive = Driver().disagg(["p"], ["d", "e"])
        first = drive.ask(routing=RoutingHints(worker_id="d"))
        if fetching:
            (then,) = drive.prefilled(first)
            assert then.worker_id == "d"
        made = drive.lose("d")
        assert [getattr(one, "reason", "") for one in made] == ["pinned_worker_lost"] + fetching * ["worker_lost"]
        assert made[0].worker_id == ("" if fetching else "p"), "who computes it stops"
        assert made[-1].holder == (target(first) if fetching else None)
        assert not len(drive.world.requests)


def test_kv_goes_with_the_worker_that_kept_it() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    drive.lose("d")
    drive.prefilled(first)
    drive.lose(first.worker_id)
    assert drive.active().prefilled is None
    (again,) = drive("fleet", joined("e", 1, role="decode"))
    assert (again.stage, again.attempt) == ("prefill", 2)


def test_a_lost_holder_gets_no_release() -> None:
    for back in (False, True):
        drive = Driver().disagg(["p", "q"], ["d"])
        first = drive.ask()
        (then,) = drive.prefilled(first)
        drive.lose(first.worker_id)
        if back:
            drive("fleet", joined(first.worker_id, 7, pool="prefillers", role="prefill"))
        (again,) = drive.emit(TransferFailed, then, error="gone")
        assert (again.stage, again.attempt) == ("prefill", 2)


def test_another_configuration_changes_no_encoder() -> None:
    drive = staged("e", "f")
    found: list[Counterfactual] = []
    world = drive.world
    world.on_plan = lambda plan: found.append(
        counterfactual(world, msgspec.structs.replace(plan.pool, router=RouterConfig(mode="direct")), plan)
    )
    drive.encoded(drive.ask(media=(MEDIA,)))
    assert [(one.agrees, one.refusal is None) for one in found] == [(True, True), (False, False)]


def test_decode_workers_lost_one_after_another_are_not_replaced_for_ever() -> None:
    drive = Driver().disagg(["p"], ["d"])
    made: list[Any] = [drive.ask()]
    stages = []
    while isinstance(made[-1], RequestRouted):
        routed = made[-1]
        stages.append(routed.stage)
        if routed.stage == "prefill":
            made += drive.prefilled(routed)
        else:
            drive("fleet", joined(f"d{len(made)}", 7, role="decode"))
            made += drive.lose(routed.worker_id)
    assert stages == ["prefill", "decode", "prefill", "decode", "aggregated"]
    assert made[-1].reason == "attempts_exhausted"


def test_images_of_an_enforced_prompt_are_encoded_only_so_often() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED).encoders("e")
    routed = drive.ask(media=(MEDIA,))
    (prefill,) = drive.encoded(routed)
    (routed,) = not_fetched(drive, prefill)
    (prefill,) = drive.encoded(routed)
    (then,) = drive.prefilled(prefill)
    (routed,) = not_fetched(drive, then)
    assert (routed.stage, routed.attempt) == ("encode", 3)
    (prefill,) = drive.encoded(routed)
    (then,) = drive.prefilled(prefill)
    assert (then.stage, then.attempt) == ("decode", 2), "what is kept needs no image any more"
    (given_up,) = not_fetched(drive, then)
    assert (given_up.reason, given_up.attempt) == ("prefill_failed", 2)


def test_a_pinned_request_that_waits_for_its_decode_worker_ends_with_it() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    first = drive.ask(routing=RoutingHints(worker_id="d"))
    fact: dict[str, Any] = {"owner_epoch": 0, "worker_id": "d", "worker_epoch": drive.epoch("d")}
    drive("fleet", WorkerSuspect(**fact))
    assert drive.prefilled(first) == [], "it may come back"
    (aborted,) = drive("fleet", WorkerLost(**fact))
    assert (aborted.reason, aborted.holder) == ("pinned_worker_lost", target(first))


def test_duplicate_or_late_progress_changes_nothing() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    (then,) = drive.prefilled(first)
    before = drive.world.requests.digest()
    assert drive.prefilled(first) == []
    assert failed(drive, first) == []
    assert drive.world.requests.digest() == before
    not_fetched(drive, then)
    before = drive.world.requests.digest()
    assert not_fetched(drive, then) == []
    assert drive.world.requests.digest() == before
    assert drive.world.counts["stale_progress"] == 3
