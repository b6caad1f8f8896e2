"""Prefill and decode apart at the edges of its rules: the very moment, number or attempt from which another holds."""

from typing import Any

import pytest

from forebay.events.control import BusyThresholds, DisaggConfig, DisaggregationSet, QueueConfig
from forebay.events.decisions import PrefillPlace
from forebay.events.progress import EncodeFinished, FirstTokenEmitted, PrefillFailed, TransferFailed
from forebay.events.requests import RequestCancelled, RoutingHints
from tests.core.disaggregated import ask, isl, lost, prefilled, progress_fields, stored
from tests.core.worlds import ENCODED, LEASE_US, MEDIA, PROMPTS, Driver, encoder, joined, prefill_pool

NOW = 10  # microseconds that each event comes after the one before
ENFORCED = DisaggConfig(enforce=True)


@pytest.mark.parametrize(("left_us", "stage"), [(1, "decode"), (0, "prefill")])
def test_kv_is_of_use_until_the_very_end_of_its_lease(left_us: int, stage: str) -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = ask(drive)
    drive("fleet", lost(drive, "d"))
    assert prefilled(drive, first) == []
    drive.wait(LEASE_US - left_us - NOW)
    *released, then = drive("fleet", joined("e", 1, role="decode"))
    assert then.stage == stage
    assert len(released) == (stage == "prefill")


@pytest.mark.parametrize(("share", "busy"), [(8 / 64, False), (8 / 64 - 0.001, True)])
def test_a_decode_worker_is_busy_above_its_threshold_not_at_it(*, share: float, busy: bool) -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=isl(35, 0.9, decode_busy_threshold=share))
    stored(drive, "d", PROMPTS[0][:1])
    place = ask(drive).prefill
    assert (place.decode_busy, place.remote) == (busy, busy)


def test_an_answer_that_has_begun_goes_on_though_its_prompt_failed_as_often_as_it_may() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], disagg=ENFORCED)
    routed = ask(drive)
    for _ in range(2):
        (routed,) = drive("progress", PrefillFailed(**progress_fields(routed), error="no room"))
    assert routed.attempt == 3
    (then,) = prefilled(drive, routed)
    drive("progress", FirstTokenEmitted(**progress_fields(then)))
    (on,) = drive("fleet", lost(drive, then.worker_id))
    assert (on.stage, on.prefill) == ("aggregated", PrefillPlace(remote=False, reason="begun"))


def test_nothing_is_enforced_of_prompts_that_are_to_be_computed_where_they_are_answered() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=ENFORCED)
    routed = ask(drive)
    for _ in range(2):
        (routed,) = drive("progress", PrefillFailed(**progress_fields(routed), error="no room"))
    drive("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy="never", enforce=True)))
    (on,) = drive("progress", PrefillFailed(**progress_fields(routed), error="no room"))
    assert (on.stage, on.prefill) == ("aggregated", PrefillPlace(remote=False, reason="never"))


def busy_prefillers(*names: str) -> Driver:
    drive = Driver().disagg(names, ["d"])
    drive("control", prefill_pool(busy=BusyThresholds(active_prefill_tokens_threshold=10)))
    return drive


def test_a_prompt_that_failed_goes_to_another_though_that_is_busy() -> None:
    drive = busy_prefillers("p", "q")
    first, other = ask(drive), ask(drive, "other", PROMPTS[1])
    assert {first.worker_id, other.worker_id} == {"p", "q"}
    (again,) = drive("progress", PrefillFailed(**progress_fields(first), error="no room"))
    assert (again.stage, again.worker_id) == ("prefill", other.worker_id)


def test_a_prompt_whose_images_were_encoded_for_it_goes_to_a_prefill_worker_though_that_is_busy() -> None:
    drive = busy_prefillers("p")
    drive.encoders()
    drive("fleet", encoder("n", 5))
    first = ask(drive, media=(MEDIA,))
    assert first.stage == "encode"
    assert ask(drive, "other", PROMPTS[1]).stage == "prefill"
    (then,) = drive("progress", EncodeFinished(**progress_fields(first), encoded=ENCODED))
    assert then.stage == "prefill"


def test_another_attempt_at_an_answer_is_not_bound_to_its_session() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], session_ttl_s=10.0)
    hints: Any = RoutingHints(session_id="s")
    (then,) = prefilled(drive, ask(drive, routing=hints))
    for name in "ab":
        (beside,) = prefilled(drive, ask(drive, name, PROMPTS[1], routing=hints))
        assert beside.worker_id == then.worker_id
    _, again = drive("progress", TransferFailed(**progress_fields(then), error="gone"))
    (on,) = prefilled(drive, again)
    assert (on.stage, on.attempt) == ("decode", 2)
    assert on.worker_id != then.worker_id


NEVER = DisaggregationSet(model="m", disagg=DisaggConfig(policy="never"))
AGAIN = DisaggregationSet(model="m", disagg=ENFORCED)


def answered_twice_by_lost_workers() -> tuple[Driver, Any]:
    """Two attempts at an answer were lost, and the next prompt is computed elsewhere for the first time."""
    drive = Driver().disagg(["p"], ["d", "e", "f"])
    drive("control", NEVER)
    routed = ask(drive)
    (routed,) = drive("fleet", lost(drive, routed.worker_id))
    drive("control", AGAIN)
    (routed,) = drive("fleet", lost(drive, routed.worker_id))
    assert (routed.stage, routed.attempt, routed.earlier_attempts) == ("prefill", 1, 2)
    return drive, routed


def test_output_of_earlier_attempts_is_stale_after_a_cancel() -> None:
    drive, _ = answered_twice_by_lost_workers()
    (aborted,) = drive("requests", RequestCancelled(request_id="r"))
    assert aborted.attempt == 2


def test_the_abort_message_states_the_attempts() -> None:
    drive, routed = answered_twice_by_lost_workers()
    (then,) = prefilled(drive, routed)
    assert (then.stage, then.attempt) == ("decode", 3)
    released, aborted = drive("progress", TransferFailed(**progress_fields(then), error="gone"))
    assert (released.attempt, aborted.holder) == (then.earlier_attempts, None)
    assert aborted.message == "remote prefill or its KV transfer failed in 3 attempts: gone"


def test_a_decode_pool_that_counts_no_blocks_has_none_booked() -> None:
    drive = Driver().disagg(["p"], ["d"], track_active_blocks=False)
    (then,) = prefilled(drive, ask(drive))
    load = drive.world.load.rank_load(then.worker_id, 0)
    assert (load.decode_blocks, load.active_requests) == (0.0, 1)


def test_a_request_waited_in_the_queue_once_and_its_first_stage_says_so() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(queue=QueueConfig(threshold=0.25)))
    first = ask(drive, "r0")
    ask(drive)
    _, second = prefilled(drive, first)
    assert (second.request_id, second.stage, second.waited_us) == ("r", "prefill", NOW)
    (then,) = prefilled(drive, second)
    assert (then.stage, then.waited_us) == ("decode", 0)


def test_kv_whose_lease_is_over_is_kept_by_nobody() -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = ask(drive)
    drive("fleet", lost(drive, "d"))
    prefilled(drive, first)
    drive.wait(LEASE_US)
    released, again = drive("fleet", joined("e", 1, role="decode"))
    assert (released.reason, released.attempt, again.stage, again.attempt) == ("lease_over", 1, "prefill", 2)
    (aborted,) = drive("requests", RequestCancelled(request_id="r"))
    assert (aborted.worker_id, aborted.holder) == ("p", None)


def test_a_policy_gets_the_prefill_attempt() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    attempts: list[tuple[str, int]] = []
    drive.world.on_plan = lambda plan: attempts.append((plan.stage, plan.attempt))
    (then,) = prefilled(drive, ask(drive))
    _, again = drive("progress", TransferFailed(**progress_fields(then), error="gone"))
    (again,) = drive("progress", PrefillFailed(**progress_fields(again), error="no room"))
    assert (again.stage, again.attempt) == ("prefill", 3)
    assert attempts == [("prefill", 0), ("decode", 0), ("prefill", 1), ("prefill", 2)]
