"""Requests with images: an encode worker first, then one that answers; and what is done when that goes wrong."""

from typing import Any

import msgspec
import pytest

from forebay.core.phases import Phase
from forebay.core.routing.counterfactual import Counterfactual, counterfactual
from forebay.core.state.submitted_request import content_hash
from forebay.events.control import QueueConfig, RouterConfig
from forebay.events.decisions import RequestAborted, RequestHeld
from forebay.events.media import MEDIA_BYTES_MAX, MEDIA_MAX
from forebay.events.progress import EncodeFailed, EncodeFinished, FirstTokenEmitted, RequestFinished, TransferFailed
from forebay.events.requests import RoutingHints
from tests.core.worlds import ENCODED, ENCODERS, MEDIA, PROMPTS, Driver, encode_pool, encoder, joined, pool, request


def staged(*encoders: str, **router: Any) -> Driver:
    return Driver().fleet("a", "b", **router).encoders(*encoders)


def phase(drive: Driver) -> Phase | None:
    one = drive.world.requests.get("r")
    return None if one is None else one.phase


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
    one = drive.world.requests.get("r")
    assert one is not None
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


def test_a_lost_encoder_is_replaced_by_another_or_by_who_answers() -> None:
    drive = staged("e", "f")
    first = drive.ask(media=(MEDIA,))
    (second,) = drive.lose(first.worker_id)
    assert (second.stage, second.attempt) == ("encode", 2)
    (main,) = drive.lose(second.worker_id)
    assert (main.stage, main.attempt) == ("aggregated", 1)
    one = drive.world.requests.get("r")
    assert one is not None
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


def test_media_that_are_encoded_wait_for_a_worker() -> None:
    drive = Driver().fleet("a").encoders("e")
    first = drive.ask(media=(MEDIA,))
    drive.lose("a")
    assert drive.encoded(first) == []
    assert phase(drive) is Phase.WAITING
    (main,) = drive("fleet", joined("c"))
    assert (main.stage, main.worker_id) == ("aggregated", "c")
    assert drive.world.requests.get("r").encoded == ENCODED  # type: ignore[union-attr]


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


WHILE_ENCODED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (TransferFailed, {"error": "?"}),
    (RequestFinished, {"finish_reason": "stop"}),
    (FirstTokenEmitted, {}),
)
WHILE_ANSWERED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (EncodeFinished, {"encoded": ENCODED}),
    (EncodeFailed, {"error": "?"}),
)


@pytest.mark.parametrize(("kind", "fields"), [*WHILE_ENCODED, *WHILE_ANSWERED])
def test_what_does_not_fit_the_stage_changes_nothing(kind: Any, fields: dict[str, Any]) -> None:
    drive = staged("e")
    routed = drive.ask(media=(MEDIA,))
    if (kind, fields) in WHILE_ANSWERED:
        (routed,) = drive.encoded(routed)
    before = drive.world.requests.digest()
    assert drive.emit(kind, routed, **fields) == []
    assert drive.world.requests.digest() == before
    assert drive.world.counts["stale_progress"] == 1


def test_another_configuration_changes_no_encoder() -> None:
    drive = staged("e", "f")
    found: list[Counterfactual] = []
    world = drive.world
    world.on_plan = lambda plan: found.append(
        counterfactual(world, msgspec.structs.replace(plan.pool, router=RouterConfig(mode="direct")), plan)
    )
    drive.encoded(drive.ask(media=(MEDIA,)))
    assert [(one.agrees, one.refusal is None) for one in found] == [(True, True), (False, False)]


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
