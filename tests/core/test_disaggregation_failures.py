"""Prefill and decode apart, when something goes wrong: who is tried next, how often, and what its client is told."""

from typing import Any

import msgspec
import pytest

from forebay.core.phases import Phase
from forebay.events.control import DisaggConfig, DisaggregationSet
from forebay.events.decisions import CommandTarget, KvReleased, PrefillPlace, RequestAborted, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerRecovered, WorkerSuspect
from forebay.events.progress import (
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import RequestCancelled
from tests.core.disaggregated import ask, lost, prefilled, progress_fields
from tests.core.worlds import ENCODED, LEASE_US, MEDIA, Driver, decode_pool, joined, prefilled_by, prefiller

ENFORCED = DisaggConfig(enforce=True)
LOCAL = PrefillPlace(remote=False, reason="failed")


def failed(drive: Driver, routed: RequestRouted, error: str = "out of blocks", **fields: Any) -> list[Any]:
    return drive("progress", PrefillFailed(**progress_fields(routed), error=error, **fields))


def not_fetched(drive: Driver, routed: RequestRouted, error: str = "peer gone") -> list[Any]:
    """What is decided, after that its KV is given back if it was to be fetched."""
    made = drive("progress", TransferFailed(**progress_fields(routed), error=error))
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
    routed = [ask(drive)]
    for _ in range(2):
        routed += failed(drive, routed[-1])
        assert routed[-1].worker_id != routed[-2].worker_id
    assert [(one.stage, one.attempt) for one in routed] == [("prefill", 1), ("prefill", 2), ("prefill", 3)]
    (last,) = failed(drive, routed[-1])
    assert (last.stage, last.worker_id, last.attempt, last.earlier_attempts) == ("aggregated", "d", 1, 3)
    assert last.prefill == LOCAL


def test_enforced_prompts_are_given_up_with_the_reason() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    made = [ask(drive)]
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
    (refused,) = failed(drive, ask(drive), "the prompt has too many tokens", status=400, code="context_length_exceeded")
    assert (refused.reason, refused.status, refused.code) == ("prefill_refused", 400, "context_length_exceeded")
    assert (refused.message, refused.worker_id) == ("the prompt has too many tokens", "")
    assert idle(drive)


def test_a_prefill_worker_that_is_lost_is_replaced() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive)
    (second,) = drive("fleet", lost(drive, first.worker_id))
    assert (second.stage, second.attempt) == ("prefill", 2)
    assert second.worker_id != first.worker_id
    (local,) = drive("fleet", lost(drive, second.worker_id))
    assert (local.stage, local.prefill) == ("aggregated", PrefillPlace(remote=False, reason="no_prefill_worker"))


def test_an_enforced_prompt_waits_for_a_prefill_worker_until_its_deadline() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    first = ask(drive)
    assert drive("fleet", lost(drive, "p")) == []
    assert phase(drive) is Phase.WAITING
    (again,) = drive("fleet", prefiller("q", 1))
    assert (again.stage, again.worker_id, again.attempt) == ("prefill", "q", 2)
    drive("fleet", lost(drive, "q"))
    (given_up,) = drive.wait(2_000_000)
    assert (given_up.reason, given_up.attempt) == ("deadline", 2)
    assert failed(drive, first) == []


def test_another_policy_resumes_waiting_requests() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    ask(drive)
    drive("fleet", lost(drive, "p"))
    (routed,) = drive("control", DisaggregationSet(model="m", disagg=DisaggConfig()))
    assert (routed.stage, routed.prefill.reason) == ("aggregated", "no_prefill_worker")


def test_suspect_and_draining_prefill_workers_get_nothing_new() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    drive("fleet", WorkerSuspect(owner_epoch=0, worker_id="p", worker_epoch=drive.epoch("p")))
    assert ask(drive, "r0").worker_id == "q"
    drive("fleet", WorkerDraining(owner_epoch=0, worker_id="q", worker_epoch=drive.epoch("q")))
    assert ask(drive, "r1").stage == "aggregated"
    drive("fleet", WorkerRecovered(owner_epoch=0, worker_id="p", worker_epoch=drive.epoch("p")))
    assert ask(drive, "r2").worker_id == "p"


FOREIGN: tuple[dict[str, Any], ...] = ({"worker_epoch": 99}, {"worker_id": "q"}, {"model": "another"})


@pytest.mark.parametrize("lie", FOREIGN)
def test_a_descriptor_of_another_worker_epoch_or_model_is_refused(lie: dict[str, Any]) -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = ask(drive)
    fields = {"worker_id": "p", "worker_epoch": first.worker_epoch, **lie}
    released, again = drive("progress", PrefillFinished(**progress_fields(first), prefilled=prefilled_by(**fields)))
    target = CommandTarget(worker_id="p", worker_epoch=first.worker_epoch, pool="prefillers", slot=0)
    assert (released.attempt, released.holder, released.reason) == (1, target, "foreign_descriptor"), (
        "who progress_fields so"
    )
    assert (again.stage, again.attempt) == ("prefill", 2)
    assert drive.world.counts["foreign_descriptor"] == 1
    assert drive.world.requests.get("r").prefilled is None  # type: ignore[union-attr]
    drive("control", DisaggregationSet(model="m", disagg=ENFORCED))
    _, third = drive("progress", PrefillFinished(**progress_fields(again), prefilled=prefilled_by(**fields)))
    released, given_up = drive("progress", PrefillFinished(**progress_fields(third), prefilled=prefilled_by(**fields)))
    assert (released.attempt, given_up.holder) == (3, None)
    assert "the KV descriptor of worker" in given_up.message


# The decode worker, and the way between


def test_unfetched_kv_is_recomputed_and_the_last_attempt_is_local() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive)
    (then,) = prefilled(drive, first)
    (again,) = not_fetched(drive, then)
    assert (again.stage, again.attempt) == ("prefill", 2)
    assert again.worker_id != first.worker_id
    (then,) = prefilled(drive, again)
    assert (then.stage, then.attempt) == ("decode", 2)
    (last,) = not_fetched(drive, then)
    assert (last.stage, last.attempt, last.prefill) == ("aggregated", 3, LOCAL)
    assert not_fetched(drive, last) == [], "it has nothing to fetch"
    drive("progress", FirstTokenEmitted(**progress_fields(last)))
    drive("progress", RequestFinished(**progress_fields(last), finish_reason="stop"))
    assert phase(drive) is None


def test_a_failed_fetch_is_retried_on_another_decode_worker() -> None:
    drive = Driver().disagg(["p"], ["d", "e", "f"], disagg=ENFORCED)
    fetching = []
    routed = ask(drive)
    for _ in range(3):
        (then,) = prefilled(drive, routed)
        fetching.append(then.worker_id)
        (routed,) = not_fetched(drive, then)
    assert fetching[0] != fetching[1] != fetching[2]


def test_enforced_prompts_are_fetched_as_often_as_attempts_are_made() -> None:
    drive = Driver().disagg(["p", "q"], ["d"], disagg=ENFORCED)
    made: list[Any] = [ask(drive)]
    for _ in range(3):
        (then,) = prefilled(drive, made[-1])
        made += not_fetched(drive, then)
    assert [getattr(one, "stage", "") for one in made] == ["prefill", "prefill", "prefill", ""]
    assert (made[-1].reason, made[-1].attempt) == ("prefill_failed", 3)
    assert made[-1].message == "remote prefill or its KV transfer failed in 3 attempts: peer gone"


def test_a_decode_worker_lost_while_it_fetches_is_replaced_and_the_cache_used_again() -> None:
    drive = Driver().disagg(["p", "q"], ["d", "e"])
    first = ask(drive)
    (then,) = prefilled(drive, first)
    released, again = drive("fleet", lost(drive, then.worker_id))
    assert (released.holder.worker_id, released.reason) == (first.worker_id, "worker_lost")
    assert (again.stage, again.attempt) == ("prefill", 2)
    assert again.candidates == 2, "who computed it may be asked again"
    (then,) = prefilled(drive, again)
    assert (then.stage, then.attempt) == ("decode", 2)


def test_decode_workers_lost_one_after_another_are_not_replaced_for_ever() -> None:
    drive = Driver().disagg(["p"], ["d"])
    made: list[Any] = [ask(drive)]
    stages = []
    while isinstance(made[-1], RequestRouted):
        routed = made[-1]
        stages.append(routed.stage)
        if routed.stage == "prefill":
            made += prefilled(drive, routed)
        else:
            drive("fleet", joined(f"d{len(made)}", 7, role="decode"))
            made += drive("fleet", lost(drive, routed.worker_id))
    assert stages == ["prefill", "decode", "prefill", "decode", "aggregated"]
    assert made[-1].reason == "attempts_exhausted"


def test_an_answer_that_has_begun_goes_on_where_it_is_decoded() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], disagg=ENFORCED)
    (then,) = prefilled(drive, ask(drive))
    drive("progress", FirstTokenEmitted(**progress_fields(then)))
    drive("progress", OutputGrown(**progress_fields(then), output_tokens=5))
    (on,) = drive("fleet", lost(drive, then.worker_id))
    assert (on.stage, on.prefill, on.attempt) == ("aggregated", PrefillPlace(remote=False, reason="begun"), 2)
    assert on.worker_id != then.worker_id


def test_kv_waits_for_a_decode_worker_as_long_as_its_lease() -> None:
    for late, stage in ((0, "decode"), (LEASE_US, "prefill")):
        drive = Driver().disagg(["p"], ["d"])
        first = ask(drive)
        drive("fleet", lost(drive, "d"))
        assert prefilled(drive, first) == []
        drive.wait(late)
        *released, then = drive("fleet", joined("e", 1, role="decode"))
        assert (then.stage, then.attempt) == (stage, 1 if stage == "decode" else 2)
        assert [one.reason for one in released] == (["lease_over"] if late else [])


def test_unfetched_kv_is_released_at_the_deadline() -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = ask(drive)
    drive("fleet", lost(drive, "d"))
    prefilled(drive, first, lease_us=10_000_000)
    (given_up,) = drive.wait(3_000_000)
    assert given_up.reason == "deadline"
    assert given_up.holder == CommandTarget(worker_id="p", worker_epoch=first.worker_epoch, pool="prefillers", slot=0)


def test_kv_goes_with_the_worker_that_kept_it() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive)
    drive("fleet", lost(drive, "d"))
    prefilled(drive, first)
    drive("fleet", lost(drive, first.worker_id))
    assert drive.world.requests.get("r").prefilled is None  # type: ignore[union-attr]
    (again,) = drive("fleet", joined("e", 1, role="decode"))
    assert (again.stage, again.attempt) == ("prefill", 2)


def test_a_lost_holder_during_transfer_is_reported_by_the_fetcher() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive)
    (then,) = prefilled(drive, first)
    assert drive("fleet", lost(drive, first.worker_id)) == []
    assert phase(drive) is Phase.TRANSFER, "all of it may be there already"
    (aborted,) = drive("requests", RequestCancelled(request_id="r"))
    assert (aborted.worker_id, aborted.holder) == (then.worker_id, None), "nobody keeps it"


def test_an_epoch_of_the_holder_ends_with_what_it_kept() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (then,) = prefilled(drive, ask(drive))
    drive("fleet", lost(drive, "p"))
    drive("fleet", prefiller("p"))
    (aborted,) = drive("requests", RequestCancelled(request_id="r"))
    assert (aborted.worker_id, aborted.holder) == (then.worker_id, None), "this p keeps nothing"


# Ends


def test_cancellation_reaches_worker_and_kv_holder() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive, "r0")
    (aborted,) = drive("requests", RequestCancelled(request_id="r0"))
    assert (aborted.pool, aborted.worker_id, aborted.holder) == ("prefillers", first.worker_id, None)
    again = failed(drive, ask(drive, "r1"))[0]
    (then,) = prefilled(drive, again)
    (aborted,) = drive("requests", RequestCancelled(request_id="r1"))
    assert (aborted.pool, aborted.worker_id) == ("default", then.worker_id)
    assert aborted.holder is not None
    assert (aborted.holder.worker_id, aborted.attempt) == (again.worker_id, 2), "as high as what it keeps"
    (then,) = prefilled(drive, ask(drive, "r2"))
    drive("progress", FirstTokenEmitted(**progress_fields(then)))
    (aborted,) = drive("requests", RequestCancelled(request_id="r2"))
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
    routed = ask(drive)
    if (kind, fields) in WHILE_DECODED:
        (routed,) = prefilled(drive, routed)
    before = drive.world.requests.digest()
    assert drive("progress", kind(**progress_fields(routed), **fields)) == []
    assert drive.world.requests.digest() == before
    assert drive.world.counts["stale_progress"] == 1


def test_duplicate_or_late_progress_changes_nothing() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    first = ask(drive)
    (then,) = prefilled(drive, first)
    before = drive.world.requests.digest()
    assert prefilled(drive, first) == []
    assert failed(drive, first) == []
    assert drive.world.requests.digest() == before
    not_fetched(drive, then)
    before = drive.world.requests.digest()
    assert not_fetched(drive, then) == []
    assert drive.world.requests.digest() == before
    assert drive.world.counts["stale_progress"] == 3


# With an encode pool


def encoded(drive: Driver, routed: RequestRouted) -> list[Any]:
    return drive("progress", EncodeFinished(**progress_fields(routed), encoded=ENCODED))


def test_images_are_encoded_for_the_worker_that_computes_the_prompt_and_again_for_the_next() -> None:
    drive = Driver().disagg(["p", "q"], ["d"]).encoders("e", "f")
    first = ask(drive, media=(MEDIA,))
    (second,) = encoded(drive, first)
    assert [first.stage, second.stage] == ["encode", "prefill"]
    assert drive.world.requests.get("r").encoded == ENCODED  # type: ignore[union-attr]
    (again,) = not_fetched(drive, second, "its embeddings are gone")
    assert (again.stage, again.attempt) == ("encode", 2)
    (retried,) = encoded(drive, again)
    assert (retried.stage, retried.attempt) == ("prefill", 2)
    (then,) = prefilled(drive, retried)
    assert (then.stage, then.attempt) == ("decode", 1)
    assert drive.world.requests.get("r").encoded is None, "it is used up"  # type: ignore[union-attr]


def test_a_prompt_with_images_is_computed_alone_in_the_end() -> None:
    drive = Driver().disagg(["p"], ["d"]).encoders("e")
    routed = ask(drive, media=(MEDIA,))
    for attempt in (1, 2):
        (prefill,) = encoded(drive, routed)
        (routed,) = failed(drive, prefill)
        assert (routed.stage, routed.attempt) == ("encode", attempt + 1)
    (prefill,) = encoded(drive, routed)
    (last,) = failed(drive, prefill)
    assert (last.stage, last.worker_id, last.prefill) == ("aggregated", "d", LOCAL)


def test_an_enforced_prompt_with_images_is_given_up_for_what_failed() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED).encoders("e")
    routed = ask(drive, media=(MEDIA,))
    for _ in range(3):
        (prefill,) = encoded(drive, routed)
        (routed,) = failed(drive, prefill)
    assert routed.reason == "prefill_failed"
    assert "3 attempts: out of blocks" in routed.message
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED).encoders("e")
    routed = ask(drive, media=(MEDIA,))
    for _ in range(2):
        (prefill,) = encoded(drive, routed)
        drive("fleet", lost(drive, "p"))
        (routed,) = drive("fleet", prefiller("p"))
        assert routed.stage == "encode"
    (prefill,) = encoded(drive, routed)
    (given_up,) = drive("fleet", lost(drive, "p"))
    assert given_up.message.endswith(
        "in 3 attempts: prefill workers were lost, or no decode worker fetched the KV in time"
    )


def test_images_of_an_enforced_prompt_are_encoded_only_so_often() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED).encoders("e")
    routed = ask(drive, media=(MEDIA,))
    (prefill,) = encoded(drive, routed)
    (routed,) = not_fetched(drive, prefill)
    (prefill,) = encoded(drive, routed)
    (then,) = prefilled(drive, prefill)
    (routed,) = not_fetched(drive, then)
    assert (routed.stage, routed.attempt) == ("encode", 3)
    (prefill,) = encoded(drive, routed)
    (then,) = prefilled(drive, prefill)
    assert (then.stage, then.attempt) == ("decode", 2), "what is kept needs no image any more"
    (given_up,) = not_fetched(drive, then)
    assert (given_up.reason, given_up.attempt) == ("prefill_failed", 2)


def test_a_lowered_attempt_limit_applies_at_once() -> None:
    drive = Driver().disagg(["p"], ["d"])
    (then,) = prefilled(drive, ask(drive))
    (again,) = not_fetched(drive, then)
    assert again.stage == "prefill"
    drive("control", msgspec.structs.replace(decode_pool(), attempts_max=1))
    (given_up,) = failed(drive, again)
    assert (given_up.reason, given_up.attempt) == ("prefill_failed", 2)
