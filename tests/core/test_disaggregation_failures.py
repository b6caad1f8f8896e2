"""Prefill and decode apart, when something goes wrong: who is tried next, how often, and what its client is told."""

from typing import Any

import msgspec
import pytest

from forebay.core.phases import Phase
from forebay.events.control import DisaggConfig, DisaggregationSet
from forebay.events.decisions import CommandTarget, KvReleased, PrefillPlace, RequestAborted, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.progress import (
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import RoutingHints
from tests.core.worlds import ENCODED, MEDIA, Driver, decode_pool, joined, prefilled_by, prefiller

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


# The prefill worker


def test_a_prompt_that_failed_is_computed_by_another_and_in_the_end_where_it_is_answered() -> None:
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


def test_another_policy_resumes_waiting_requests() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    drive.ask()
    drive.lose("p")
    (routed,) = drive("control", DisaggregationSet(model="m", disagg=DisaggConfig()))
    assert (routed.stage, routed.prefill.reason) == ("aggregated", "no_prefill_worker")


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
    assert drive.world.requests.get("r").prefilled is None  # type: ignore[union-attr]
    drive("control", DisaggregationSet(model="m", disagg=ENFORCED))
    _, third = drive.emit(PrefillFinished, again, prefilled=prefilled_by(**fields))
    released, given_up = drive.emit(PrefillFinished, third, prefilled=prefilled_by(**fields))
    assert (released.attempt, given_up.holder) == (3, None)
    assert "the KV descriptor of worker" in given_up.message


# The decode worker, and the way between


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


def test_an_answer_that_has_begun_goes_on_where_it_is_decoded() -> None:
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


def test_an_epoch_of_the_holder_ends_with_what_it_kept() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (then,) = drive.prefilled(drive.ask())
    drive.lose("p")
    drive("fleet", prefiller("p"))
    (aborted,) = drive.cancel("r")
    assert (aborted.worker_id, aborted.holder) == (then.worker_id, None), "this p keeps nothing"


# Ends


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


WHILE_PREFILLED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (TransferFailed, {"error": "?"}),
    (RequestFinished, {"finish_reason": "stop"}),
    (RequestFailed, {"error": "?"}),
    (FirstTokenEmitted, {}),
    (OutputGrown, {"output_tokens": 1}),
)
WHILE_DECODED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (PrefillFinished, {"prefilled": prefilled_by("d", 0)}),
    (PrefillFailed, {"error": "?"}),
)


@pytest.mark.parametrize(("kind", "fields"), [*WHILE_PREFILLED, *WHILE_DECODED])
def test_what_does_not_fit_the_stage_changes_nothing(kind: Any, fields: dict[str, Any]) -> None:
    drive = Driver().disagg(["p"], ["d"])
    routed = drive.ask()
    if (kind, fields) in WHILE_DECODED:
        (routed,) = drive.prefilled(routed)
    before = drive.world.requests.digest()
    assert drive.emit(kind, routed, **fields) == []
    assert drive.world.requests.digest() == before
    assert drive.world.counts["stale_progress"] == 1


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


# With an encode pool


def test_images_are_encoded_for_the_worker_that_computes_the_prompt_and_again_for_the_next() -> None:
    drive = Driver().disagg(["p", "q"], ["d"]).encoders("e", "f")
    first = drive.ask(media=(MEDIA,))
    (second,) = drive.encoded(first)
    assert [first.stage, second.stage] == ["encode", "prefill"]
    assert drive.world.requests.get("r").encoded == ENCODED  # type: ignore[union-attr]
    (again,) = not_fetched(drive, second, "its embeddings are gone")
    assert (again.stage, again.attempt) == ("encode", 2)
    (retried,) = drive.encoded(again)
    assert (retried.stage, retried.attempt) == ("prefill", 2)
    (then,) = drive.prefilled(retried)
    assert (then.stage, then.attempt) == ("decode", 1)
    assert drive.world.requests.get("r").encoded is None, "it is used up"  # type: ignore[union-attr]


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


def test_kv_of_a_request_that_is_for_a_lost_worker_alone_is_given_back() -> None:
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


def test_a_pinned_request_that_waits_for_its_decode_worker_ends_with_it() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    first = drive.ask(routing=RoutingHints(worker_id="d"))
    fact: dict[str, Any] = {"owner_epoch": 0, "worker_id": "d", "worker_epoch": drive.epoch("d")}
    drive("fleet", WorkerSuspect(**fact))
    assert drive.prefilled(first) == [], "it may come back"
    (aborted,) = drive("fleet", WorkerLost(**fact))
    assert (aborted.reason, aborted.holder) == ("pinned_worker_lost", target(first))


def test_kv_goes_with_the_worker_that_kept_it() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = drive.ask()
    drive.lose("d")
    drive.prefilled(first)
    drive.lose(first.worker_id)
    assert drive.world.requests.get("r").prefilled is None  # type: ignore[union-attr]
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
