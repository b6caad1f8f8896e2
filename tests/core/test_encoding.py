"""Requests with images: an encode worker first, then one that answers; and what is done when that goes wrong."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.core.restore import restore
from forebay.core.routing.counterfactual import Counterfactual, counterfactual
from forebay.core.state.submitted_request import content_hash
from forebay.events.control import QueueConfig, RouterConfig
from forebay.events.decisions import RequestAborted, RequestHeld, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.media import MEDIA_BYTES_MAX, MEDIA_MAX
from forebay.events.progress import EncodeFailed, EncodeFinished, FirstTokenEmitted, RequestFinished, TransferFailed
from forebay.events.requests import RequestCancelled, RoutingHints
from forebay.events.snapshots import Booking
from tests.core.encodings import ask, encoded, progress_fields, staged
from tests.core.worlds import ENCODED, ENCODERS, MEDIA, PROMPTS, Driver, encode_pool, encoder, joined, pool, request


def lost(drive: Driver, name: str) -> list[Any]:
    return drive("fleet", WorkerLost(owner_epoch=0, worker_id=name, worker_epoch=drive.epoch(name)))


def phase(drive: Driver) -> Phase | None:
    one = drive.world.requests.get("r")
    return None if one is None else one.phase


def test_media_are_encoded_before_a_worker_answers() -> None:
    drive = staged("e", "f")
    first = ask(drive)
    assert (first.stage, first.pool, first.attempt, first.mode) == ("encode", "encoders", 1, "least-loaded")
    assert first.worker_id in ENCODERS
    assert drive.world.load.rank_load(first.worker_id, 0).prefill_tokens == MEDIA.tokens
    (then,) = encoded(drive, first)
    assert (then.stage, then.pool, then.attempt) == ("aggregated", "default", 1)
    assert then.worker_id in ("a", "b")
    assert drive.world.load.rank_load(first.worker_id, 0).active_requests == 0
    assert drive.world.load.rank_load(then.worker_id, 0).active_requests == 1
    one = drive.world.requests.get("r")
    assert one is not None
    assert one.encoded == ENCODED
    drive("progress", RequestFinished(**progress_fields(then), finish_reason="stop"))
    assert not len(drive.world.requests)


def test_requests_without_media_and_those_without_encode_workers_go_straight_to_who_answers() -> None:
    drive = staged("e")
    (plain,) = drive("requests", request("plain", PROMPTS[0]))
    assert (plain.stage, plain.pool) == ("aggregated", "default")
    lost(drive, "e")
    assert ask(drive).stage == "aggregated"
    alone = Driver().fleet("a")
    assert ask(alone).stage == "aggregated"


def test_encode_workers_serve_no_requests() -> None:
    drive = Driver().encoders("e")
    drive("control", pool())
    assert ask(drive).reason == "no_workers"
    only = Driver().encoders("e")
    assert ask(only).reason == "wrong_model"
    named = staged("e")
    (refused,) = named("requests", request("r", routing=RoutingHints(worker_id="e")))
    assert refused.reason == "unknown_worker"


def test_the_least_loaded_encoder_gets_it_whatever_the_mode_is() -> None:
    drive = Driver().fleet("a", mode="direct").encoders("e", "f")
    direct = RoutingHints(worker_id="a")
    routed = [ask(drive, f"r{number}", routing=direct) for number in range(4)]
    assert sorted(one.worker_id for one in routed) == ["e", "e", "f", "f"]
    assert {(one.candidates, one.mode) for one in routed} == {(2, "least-loaded")}


def test_a_failed_encoding_is_retried_and_aborted_with_the_reason() -> None:
    drive = staged("e", "f")
    routed = [ask(drive)]
    for _ in range(2):
        (again,) = drive("progress", EncodeFailed(**progress_fields(routed[-1]), error="out of memory"))
        assert again.worker_id != routed[-1].worker_id
        routed.append(again)
    assert [one.attempt for one in routed] == [1, 2, 3]
    (given_up,) = drive("progress", EncodeFailed(**progress_fields(routed[-1]), error="out of memory " + "x" * 9_000))
    assert isinstance(given_up, RequestAborted)
    assert (given_up.reason, given_up.worker_id) == ("encode_failed", "")
    assert given_up.message.startswith("images or videos could not be encoded and fetched in 3 attempts: out of mem")
    assert len(given_up.message) < 1_000
    assert all(not load.active_requests for load in drive.world.load.ranks())


def test_a_single_encoder_is_tried_again() -> None:
    drive = staged("e")
    (again,) = drive("progress", EncodeFailed(**progress_fields(ask(drive)), error="busy"))
    assert (again.worker_id, again.attempt, again.stage) == ("e", 2, "encode")


def test_a_lost_encoder_is_replaced_by_another_or_by_who_answers() -> None:
    drive = staged("e", "f")
    first = ask(drive)
    (second,) = lost(drive, first.worker_id)
    assert (second.stage, second.attempt) == ("encode", 2)
    (main,) = lost(drive, second.worker_id)
    assert (main.stage, main.attempt) == ("aggregated", 1)
    one = drive.world.requests.get("r")
    assert one is not None
    assert one.encoded is None, "its worker gets the images themselves"


def test_encoders_that_are_lost_one_after_another_are_not_replaced_for_ever() -> None:
    drive = staged("e", "f")
    made = [ask(drive)]
    for _ in range(2):
        name = made[-1].worker_id
        made += lost(drive, name)
        drive("fleet", encoder(name))
    (given_up,) = lost(drive, made[-1].worker_id)
    assert (given_up.reason, given_up.message[-25:]) == ("encode_failed", " encode workers were lost")


def test_unfetched_embeddings_are_encoded_again() -> None:
    drive = staged("e", "f")
    first = ask(drive)
    (main,) = encoded(drive, first)
    (again,) = drive("progress", TransferFailed(**progress_fields(main), error="its memory is gone"))
    assert (again.stage, again.attempt) == ("encode", 2)
    assert again.worker_id != first.worker_id
    (main,) = encoded(drive, again)
    assert (main.stage, main.attempt) == ("aggregated", 2)
    (again,) = drive("progress", TransferFailed(**progress_fields(main), error="its memory is gone"))
    (main,) = encoded(drive, again)
    (given_up,) = drive("progress", TransferFailed(**progress_fields(main), error="its memory is gone"))
    assert (given_up.reason, given_up.attempt) == ("encode_failed", 3)
    assert given_up.message.endswith("in 3 attempts: its memory is gone")


def test_embeddings_go_with_the_worker_that_fetched_them() -> None:
    drive = staged("e")
    (main,) = encoded(drive, ask(drive))
    (again,) = lost(drive, main.worker_id)
    assert (again.stage, again.attempt) == ("encode", 2)
    (second,) = encoded(drive, again)
    assert (second.stage, second.attempt) == ("aggregated", 2)
    assert second.worker_id != main.worker_id


def test_media_that_are_encoded_wait_for_a_worker() -> None:
    drive = Driver().fleet("a").encoders("e")
    first = ask(drive)
    lost(drive, "a")
    assert encoded(drive, first) == []
    assert phase(drive) is Phase.WAITING
    (main,) = drive("fleet", joined("c"))
    assert (main.stage, main.worker_id) == ("aggregated", "c")
    assert drive.world.requests.get("r").encoded == ENCODED  # type: ignore[union-attr]


def test_a_cancelled_request_is_taken_back_from_its_encoder() -> None:
    drive = staged("e")
    first = ask(drive)
    (aborted,) = drive("requests", RequestCancelled(request_id="r"))
    assert (aborted.pool, aborted.worker_id, aborted.slot, aborted.attempt) == ("encoders", "e", 0, 1)
    assert encoded(drive, first) == []
    assert drive.world.counts["stale_progress"] == 1


def test_what_ends_a_request_is_of_its_highest_attempt_in_any_stage() -> None:
    drive = Driver().fleet("a", "b")
    drive("control", encode_pool())
    (main,) = lost(drive, ask(drive).worker_id)
    assert (main.stage, main.attempt) == ("aggregated", 2)
    drive("fleet", encoder("e"))
    assert lost(drive, main.worker_id) == [], "nobody can answer it"
    (encoding,) = drive("fleet", joined("c"))
    assert (encoding.stage, encoding.attempt) == ("encode", 2), "what its encoder tells the client is not void"
    (aborted,) = drive("requests", RequestCancelled(request_id="r"))
    assert (aborted.worker_id, aborted.attempt) == ("e", 2), "what attempt 2 says after it is void"


def test_the_queue_comes_first_and_only_once() -> None:
    drive = Driver().fleet("a", queue=QueueConfig(threshold=0.5)).encoders("e")
    (plain,) = drive("requests", request("plain", PROMPTS[0]))
    assert isinstance(ask(drive), RequestHeld)
    made = drive("progress", RequestFinished(**progress_fields(plain), finish_reason="stop"), after_us=90)
    assert [(one.stage, one.waited_us) for one in made] == [("encode", 90)]
    drive("requests", request("more", PROMPTS[1]))
    (main,) = encoded(drive, made[0])
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
    routed = ask(drive)
    if (kind, fields) in WHILE_ANSWERED:
        (routed,) = encoded(drive, routed)
    before = drive.world.requests.digest()
    assert drive("progress", kind(**progress_fields(routed), **fields)) == []
    assert drive.world.requests.digest() == before
    assert drive.world.counts["stale_progress"] == 1


def test_another_configuration_changes_no_encoder() -> None:
    drive = staged("e", "f")
    found: list[Counterfactual] = []
    world = drive.world
    world.on_plan = lambda plan: found.append(
        counterfactual(world, msgspec.structs.replace(plan.pool, router=RouterConfig(mode="direct")), plan)
    )
    encoded(drive, ask(drive))
    assert [(one.agrees, one.refusal is None) for one in found] == [(True, True), (False, False)]


def test_a_worker_that_was_to_encode_by_itself_has_nothing_to_fetch() -> None:
    drive = Driver().fleet("a")
    routed = ask(drive)
    assert drive("progress", TransferFailed(**progress_fields(routed), error="?")) == []
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


STEPS = st.lists(st.sampled_from(["encoded", "failed", "fetched", "lost", "back", "cancel"]), max_size=30)


@given(STEPS)
def test_whatever_happens_a_request_ends_or_waits_for_somebody(steps: list[str]) -> None:
    """It is sent to no more encoders and workers than it has attempts, and the books are even at the end."""
    drive = staged("e", "f")
    made: list[Any] = [ask(drive)]
    for step in steps:
        routed = next((one for one in reversed(made) if isinstance(one, RequestRouted)), None)
        assert routed is not None
        match step:
            case "encoded":
                made += encoded(drive, routed)
            case "failed":
                made += drive("progress", EncodeFailed(**progress_fields(routed), error="?"))
            case "fetched":
                made += drive("progress", TransferFailed(**progress_fields(routed), error="?"))
            case "lost":
                made += lost(drive, routed.worker_id)
            case "back":
                for slot, name in enumerate(ENCODERS):
                    made += drive("fleet", encoder(name, slot))
                for slot, name in enumerate("ab"):
                    made += drive("fleet", joined(name, slot))
            case _:
                made += drive("requests", RequestCancelled(request_id="r"))
        chunks = list(drive.world.snapshot()) if not drive.world.consumed else None
        assert chunks is None or restore(chunks).digest() == drive.world.digest()
    for stage in ("encode", "aggregated"):
        attempts = [one.attempt for one in made if isinstance(one, RequestRouted) and one.stage == stage]
        assert attempts == list(range(1, len(attempts) + 1))
        assert len(attempts) <= 3
    booked = [part for part in drive.world.load.snapshot() if isinstance(part, Booking)]
    one = drive.world.requests.get("r")
    assert len(booked) == (one is not None and one.on_worker)
    if one is not None and one.phase is Phase.WAITING:
        assert not drive.world.roster("default").ranks
