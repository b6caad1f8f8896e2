"""Prefill and decode apart: who computes a prompt, by which rule, and with which settings both pools choose."""

from typing import Any, NamedTuple

import msgspec
import pytest

from forebay.core.phases import Phase
from forebay.core.restore import restore
from forebay.core.routing.plan import Plan
from forebay.core.selection.counterfactual import Counterfactual, counterfactual
from forebay.core.selection.stages import as_decode_request, as_prefill_request
from forebay.core.state.submitted_request import request_from_event
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    DisaggConfig,
    DisaggregationSet,
    PoolConfigured,
    QueueConfig,
    RouterConfig,
)
from forebay.events.decisions import PrefillPlace, RequestHeld, RequestRejected
from forebay.events.fleet import WorkerDraining
from forebay.events.progress import EncodeFinished, FirstTokenEmitted, PrefillFailed, TransferFailed
from forebay.events.requests import RouterOverride, RoutingHints
from tests.core.worlds import (
    BLOCK,
    ENCODED,
    LEASE_US,
    MEDIA,
    PROMPTS,
    Driver,
    decode_pool,
    encoder,
    joined,
    prefill_pool,
    prefilled_by,
    prefiller,
    query,
    request,
)

TOKENS = 8 * BLOCK + 2  # of PROMPTS[0] as `request` makes it
STEP = 64  # tokens of an engine step of these workers


def rule(policy: Any, **limits: Any) -> DisaggConfig:
    return DisaggConfig(policy=policy, **limits)


def isl(most: int, ratio: float, policy: Any = "isl_bounding", **limits: Any) -> DisaggConfig:
    return rule(policy, eff_isl_threshold=most, eff_isl_ratio_threshold=ratio, **limits)


def test_one_worker_computes_a_prompt_and_another_generates_the_response() -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = drive.ask()
    assert (first.stage, first.pool, first.worker_id, first.attempt) == ("prefill", "prefillers", "p", 1)
    assert first.prefill == PrefillPlace(remote=True, reason="always")
    assert drive.world.load.rank_load("p", 0).prefill_tokens == TOKENS
    (then,) = drive.prefilled(first)
    assert (then.stage, then.pool, then.worker_id) == ("decode", "default", "d")
    assert (then.attempt, then.earlier_attempts) == (1, 1)
    assert then.prefill is None, "who computes it was decided before"
    one = drive.active()
    assert (one.phase, one.prefilled) == (Phase.TRANSFER, prefilled_by("p", drive.epoch("p")))
    drive.emit(FirstTokenEmitted, then)
    assert (one.phase, one.begun, one.prefilled) == (Phase.DECODE, True, None)
    drive.finish(then)
    assert not len(drive.world.requests)
    assert all(not load.active_requests for load in drive.world.load.ranks())


def test_aggregated_pools_have_no_prefill_decision() -> None:
    drive = Driver().fleet("a")
    drive("control", prefill_pool())
    drive("fleet", prefiller("p"))
    routed = drive.ask()
    assert (routed.stage, routed.pool, routed.prefill) == ("aggregated", "default", None)
    drive.emit(FirstTokenEmitted, routed)
    assert not drive.active().begun


def test_prefill_workers_alone_serve_no_requests() -> None:
    drive = Driver()
    drive("control", prefill_pool())
    drive("fleet", prefiller("p"))
    assert drive.ask().reason == "wrong_model"
    drive("control", decode_pool())
    refused = drive.ask()
    assert (refused.reason, refused.message) == ("no_workers", "no worker of the pool default is ready")


def test_decode_workers_alone_compute_their_prompts() -> None:
    drive = Driver().disagg([], ["d"])
    assert drive.ask().prefill == PrefillPlace(remote=False, reason="no_prefill_worker")
    drive("fleet", prefiller("p"))
    assert drive.ask("r2").stage == "prefill"


@pytest.mark.parametrize("enforce", [False, True])
def test_embedding_requests_are_not_prefilled_remotely(*, enforce: bool) -> None:
    drive = Driver().disagg([], [], disagg=DisaggConfig(enforce=enforce))
    tasks: Any = ("generate", "embed")
    drive("fleet", prefiller("p", tasks=tasks))
    drive("fleet", joined("d", 1, role="decode", tasks=tasks))
    routed = drive.ask(task="embed")
    assert (routed.stage, routed.worker_id, routed.prefill) == ("aggregated", "d", None)
    drive.finish(routed, output_tokens=0)
    assert not len(drive.world.requests)
    assert drive("requests", query("q"))[0].stage == "prefill"


def test_the_prefill_worker_that_has_most_of_a_prompt_gets_it() -> None:
    drive = Driver().disagg(["p", "q"], ["d", "e"])
    drive.stored("q", PROMPTS[0])
    drive.stored("e", PROMPTS[1])
    first = drive.ask()
    assert (first.worker_id, first.terms.device_overlap) == ("q", 8)
    assert drive.world.load.rank_load("q", 0).prefill_tokens == TOKENS - 8 * BLOCK


def test_decode_workers_are_chosen_by_their_load_alone_and_share_nothing() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    drive.stored("d", PROMPTS[0])
    (held,) = drive.prefilled(drive.ask("r0"))
    assert (held.terms.overlap_credit, held.terms.prefill_blocks) == (0.0, 0.0)
    (other,) = drive.prefilled(drive.ask("r1"))
    assert {held.worker_id, other.worker_id} == {"d", "e"}, "the cache of d draws nobody"
    (third,) = drive.prefilled(drive.ask("r2"))
    loads = {name: drive.world.load.rank_load(name, 0) for name in "de"}
    assert loads[third.worker_id].decode_blocks == 2 * len(PROMPTS[0]), "the same blocks count twice"
    assert {load.prefill_tokens for load in loads.values()} == {0}


def test_what_a_request_overrides_holds_where_prompts_are_computed() -> None:
    override = RouterOverride(overlap_score_credit=0.5, temperature=0.0, mode="direct")
    hints = RoutingHints(override=override, worker_id="d", allowed_workers=("d",), rank=0, session_id="s")
    one = request_from_event(request("r", PROMPTS[0], routing=hints), "default", 3, 5)
    hints = as_prefill_request(one, "prefillers").hints
    assert (hints.worker_id, hints.allowed_workers, hints.rank, hints.session_id) == ("", (), None, "s")
    assert hints.override == RouterOverride(overlap_score_credit=0.5, temperature=0.0)
    assert as_decode_request(one).hints.override == RouterOverride(
        overlap_score_credit=0.0, assume_kv_reuse=False, track_prefill_tokens=False, temperature=0.0, mode="direct"
    )
    assert as_decode_request(one).hints.worker_id == "d"


def test_prefill_workers_have_no_active_blocks() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive.ask("r0")
    second = drive.ask("r1")
    assert second.terms.decode_blocks == 0.0
    assert drive.world.load.rank_load("p", 0).decode_blocks == 0.0
    assert drive.world.load.rank_load("p", 0).active_requests == 2


def test_a_pinned_worker_is_the_decode_worker() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    for name in "de":
        first = drive.ask(name, routing=RoutingHints(worker_id=name))
        (then,) = drive.prefilled(first)
        assert (first.worker_id, then.worker_id) == ("p", name)
    assert drive.ask("r", routing=RoutingHints(worker_id="p")).reason == "unknown_worker"


def test_an_adapter_must_be_where_the_prompt_is_computed() -> None:
    drive = Driver().disagg(["p"], [])
    drive("fleet", joined("d", 1, role="decode", loras=("x",)))
    assert drive.ask(lora_name="x").prefill == PrefillPlace(remote=False, reason="no_prefill_worker")
    drive("fleet", prefiller("q", 2, loras=("x",)))
    assert drive.ask("r2", lora_name="x").worker_id == "q"


def test_a_session_has_a_worker_in_each_pool() -> None:
    drive = Driver().disagg(["p", "q"], ["d", "e"], session_ttl_s=10.0)
    drive("control", prefill_pool(session_ttl_s=10.0))
    hints = RoutingHints(session_id="s")
    first = drive.ask("r0", routing=hints)
    (then,) = drive.prefilled(first)
    for number in range(1, 4):  # others would be less loaded each time
        again = drive.ask(f"r{number}", PROMPTS[1], routing=hints)
        (answer,) = drive.prefilled(again)
        assert (again.worker_id, answer.worker_id) == (first.worker_id, then.worker_id)


class Case(NamedTuple):
    """A rule in a state, and what it says: `cached` blocks at the decode worker, `waiting` requests at prefill."""

    config: DisaggConfig
    place: PrefillPlace
    cached: int = 0
    waiting: int = 0


def says(reason: Any, *, remote: bool, uncached: int, **facts: Any) -> PrefillPlace:
    return PrefillPlace(remote=remote, reason=reason, uncached_tokens=uncached, **facts)


def classic(most: int, queue: int = 2) -> DisaggConfig:
    return rule("classic", max_local_prefill_length=most, max_prefill_queue_size=queue)


CASES = {
    "classic-long": Case(classic(33), says("long_prompt", remote=True, uncached=34, prefill_waiting=0)),
    "classic-at-limit": Case(classic(34), says("short_prompt", remote=False, uncached=34, prefill_waiting=0)),
    "classic-cached": Case(classic(33), says("short_prompt", remote=False, uncached=30, prefill_waiting=0), cached=1),
    "classic-queue": Case(classic(33), says("long_prompt", remote=True, uncached=34, prefill_waiting=1), waiting=2),
    "classic-full": Case(classic(33), says("prefill_busy", remote=False, uncached=34, prefill_waiting=2), waiting=3),
    "isl-short": Case(isl(35, 1.0), says("uncached_prompt", remote=True, uncached=34)),
    "isl-both": Case(isl(35, 0.9), says("short_prompt", remote=False, uncached=30), cached=1),
    "isl-length": Case(isl(30, 0.9), says("long_prompt", remote=True, uncached=30), cached=1),
    "isl-ratio": Case(isl(35, 0.8), says("uncached_prompt", remote=True, uncached=30), cached=1),
    "isl-gate": Case(
        isl(35, 0.9, decode_busy_threshold=0.1),
        says("decode_busy", remote=True, uncached=30, decode_busy=True),
        cached=1,
    ),
    "isl-gate-open": Case(
        isl(35, 0.9, decode_busy_threshold=0.2),
        says("short_prompt", remote=False, uncached=30, decode_busy=False),
        cached=1,
    ),
    "isl-gate-long": Case(isl(1, 0.0, decode_busy_threshold=0.9), says("long_prompt", remote=True, uncached=34)),
    "load-idle": Case(
        rule("prefill_load"), says("prefill_idle", remote=True, uncached=34, prefill_busy=False), waiting=1
    ),
    "load-busy": Case(
        rule("prefill_load"), says("prefill_busy", remote=False, uncached=34, prefill_busy=True), waiting=2
    ),
    "load-limit": Case(
        rule("prefill_load", prefill_busy_threshold=2 * 34 / STEP),
        says("prefill_idle", remote=True, uncached=34, prefill_busy=False),
        waiting=2,
    ),
    "load-never": Case(
        rule("prefill_load", prefill_busy_threshold=None),
        says("prefill_idle", remote=True, uncached=34, prefill_busy=False),
        waiting=9,
    ),
    "load-gate": Case(
        rule("prefill_load", decode_busy_threshold=0.0),
        says("decode_busy", remote=True, uncached=34, prefill_busy=True, decode_busy=True),
        waiting=2,
    ),
    "or-short": Case(isl(35, 0.9, "isl_or_load"), says("short_prompt", remote=False, uncached=30), cached=1),
    "or-busy": Case(
        isl(1, 0.0, "isl_or_load"),
        says("prefill_busy", remote=False, uncached=34, prefill_busy=True),
        waiting=2,
    ),
    "or-neither": Case(
        isl(1, 0.0, "isl_or_load"), says("long_prompt", remote=True, uncached=34, prefill_busy=False), waiting=1
    ),
    "never": Case(rule("never", enforce=True), PrefillPlace(remote=False, reason="never")),
    "always": Case(rule("always"), PrefillPlace(remote=True, reason="always"), waiting=9),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_disaggregation_policies(case: Case) -> None:
    drive = Driver().disagg(["p"], ["d"])
    for number in range(case.waiting):
        drive.ask(f"w{number}", PROMPTS[1])
    drive("control", DisaggregationSet(model="m", disagg=case.config))
    if case.cached:
        drive.stored("d", PROMPTS[0][: case.cached])
    routed = drive.ask()
    assert routed.prefill == case.place
    assert (routed.stage == "prefill") == case.place.remote


def test_limits_are_changed_at_run_time_until_the_pool_is_configured_anew() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=rule("never"))
    assert drive.ask("r0").prefill.reason == "never"
    before = drive.world.digest()
    drive("control", DisaggregationSet(model="m", disagg=rule("always")))
    assert drive.world.digest() != before
    assert drive.ask("r1").prefill.reason == "always"
    drive.world.take_consumed()
    assert restore(drive.world.snapshot()).settings.disagg == {"default": rule("always")}
    drive("control", decode_pool(disagg=classic(1_000)))
    assert drive.ask("r2").prefill.reason == "short_prompt"


def test_only_decode_pools_have_a_rule() -> None:
    drive = Driver().fleet("a")
    drive("control", DisaggregationSet(model="m", disagg=rule("always")))
    assert drive.world.settings.disagg == {}
    with pytest.raises(ValueError, match="decode_busy_threshold"):
        DisaggConfig(decode_busy_threshold=1.1)
    with pytest.raises(ValueError, match="max_prefill_queue_size must be at least 1"):
        DisaggConfig(max_prefill_queue_size=0)


def test_enforced_prompts_are_refused_where_nobody_computes_them() -> None:
    drive = Driver().disagg([], ["d"], disagg=rule("always", enforce=True))
    refused = drive.ask()
    assert isinstance(refused, RequestRejected)
    assert refused.message == "no prefill worker for the pool default is ready"
    drive("control", DisaggregationSet(model="m", disagg=isl(99, 1.0, enforce=True)))
    drive.stored("d", PROMPTS[0])
    assert drive.ask("r1").prefill.reason == "short_prompt", "its rule leaves it where it is answered"


QUEUE = QueueConfig(threshold=0.5)


def test_requests_wait_for_prefill_workers_and_go_when_a_prompt_is_computed() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(queue=QUEUE))
    first = drive.ask("r0")
    assert isinstance(drive.ask("r1"), RequestHeld)
    answer = drive.query("q", PROMPTS[1])
    assert (answer.would_wait, answer.stage, answer.pool) == (True, "prefill", "prefillers")
    made = drive.prefilled(first)
    assert [(one.request_id, one.stage) for one in made] == [("r0", "decode"), ("r1", "prefill")]
    assert made[1].waited_us == 20


def test_short_prompts_do_not_stand_behind_long_ones() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=classic(20), queue=QUEUE)
    drive("control", prefill_pool(queue=QUEUE))
    routed = [drive.ask("long"), *(drive.ask(f"short{number}", PROMPTS[1][:4]) for number in range(2))]
    assert [one.stage for one in routed] == ["prefill", "aggregated", "aggregated"]
    held = [drive.ask("long too", PROMPTS[2]), drive.ask("short too", PROMPTS[2][:1])]
    assert all(isinstance(one, RequestHeld) for one in held), "both workers have enough to do"
    (then,) = drive.emit(FirstTokenEmitted, routed[1])
    assert (then.request_id, then.stage) == ("short too", "aggregated")


def test_queued_requests_of_a_pool_whose_role_changes_stay_queued() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(queue=QUEUE))
    drive.ask("r0")
    assert all(isinstance(drive.ask(f"w{number}", PROMPTS[1][:number]), RequestHeld) for number in range(8))
    drive("control", PoolConfigured(pool="another", model="n", block_size=BLOCK))
    drive("control", PoolConfigured(pool="another", model="n", block_size=BLOCK, role="encode"))
    drive("control", msgspec.structs.replace(decode_pool(), role="aggregated"))
    drive.copy()


def test_decode_workers_compute_prompts_while_prefill_workers_are_busy() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive.ask("r0")
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=10)))
    assert drive.ask("r1").prefill == PrefillPlace(remote=False, reason="prefill_busy")
    assert drive.ask("r2").reason == "busy", "now both are"


def test_decode_prefers_workers_that_are_not_busy() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    first, second = drive.ask("r0"), drive.ask("r1")
    (one,) = drive.prefilled(first)
    (two,) = drive.prefilled(second)
    assert {one.worker_id, two.worker_id} == {"d", "e"}
    assert drive.ask("r2").reason == "busy"


def test_an_accepted_request_may_go_to_a_busy_decode_worker() -> None:
    drive = Driver().disagg(["p"], ["d"], busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    first, second = drive.ask("r0"), drive.ask("r1")
    for routed in (first, second):
        (then,) = drive.prefilled(routed)
        assert then.worker_id == "d"


def test_a_route_query_names_the_prefill_worker() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    drive.stored("q", PROMPTS[0])
    answer = drive.query("one", PROMPTS[0])
    assert (answer.stage, answer.pool, answer.choice.worker_id) == ("prefill", "prefillers", "q")
    assert answer.prefill == PrefillPlace(remote=True, reason="always")
    assert {one.worker_id for one in answer.candidates} == {"p", "q"}
    drive("control", DisaggregationSet(model="m", disagg=rule("never")))
    answer = drive.query("two", PROMPTS[0])
    assert (answer.stage, answer.pool, answer.choice.worker_id) == ("aggregated", "default", "d")
    assert answer.prefill == PrefillPlace(remote=False, reason="never")
    drive("control", DisaggregationSet(model="m", disagg=rule("always", enforce=True)))
    for name in "pq":
        drive.lose(name)
    answer = drive.query("three", PROMPTS[0])
    assert (answer.reason, answer.prefill) == ("no_workers", None)


# The very moment, number or attempt from which another rule holds


NOW = 10  # microseconds that each event comes after the one before
ENFORCED = DisaggConfig(enforce=True)


@pytest.mark.parametrize(("left_us", "stage"), [(1, "decode"), (0, "prefill")])
def test_kv_is_of_use_until_the_very_end_of_its_lease(left_us: int, stage: str) -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = drive.ask()
    drive.lose("d")
    assert drive.prefilled(first) == []
    drive.wait(LEASE_US - left_us - NOW)
    *released, then = drive("fleet", joined("e", 1, role="decode"))
    assert then.stage == stage
    assert len(released) == (stage == "prefill")


@pytest.mark.parametrize(("share", "busy"), [(8 / 64, False), (8 / 64 - 0.001, True)])
def test_a_decode_worker_is_busy_above_its_threshold_not_at_it(*, share: float, busy: bool) -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=isl(35, 0.9, decode_busy_threshold=share))
    drive.stored("d", PROMPTS[0][:1])
    place = drive.ask().prefill
    assert (place.decode_busy, place.remote) == (busy, busy)


def failed_twice(*decoders: str) -> tuple[Driver, Any]:
    """Return a request whose enforced remote prefill has failed twice, and its third routing."""
    drive = Driver().disagg(["p"], decoders, disagg=ENFORCED)
    routed = drive.ask()
    for _ in range(2):
        (routed,) = drive.emit(PrefillFailed, routed, error="no room")
    return drive, routed


def test_a_begun_response_continues_after_the_maximum_of_failed_prefills() -> None:
    drive, routed = failed_twice("d", "e")
    assert routed.attempt == 3
    (then,) = drive.prefilled(routed)
    drive.emit(FirstTokenEmitted, then)
    (on,) = drive.lose(then.worker_id)
    assert (on.stage, on.prefill) == ("aggregated", PrefillPlace(remote=False, reason="begun"))


def test_enforcement_does_not_apply_to_prompts_of_local_prefill() -> None:
    drive, routed = failed_twice("d")
    drive("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy="never", enforce=True)))
    (on,) = drive.emit(PrefillFailed, routed, error="no room")
    assert (on.stage, on.prefill) == ("aggregated", PrefillPlace(remote=False, reason="never"))


def busy_prefillers(*names: str) -> Driver:
    drive = Driver().disagg(names, ["d"])
    drive("control", prefill_pool(busy=BusyThresholds(active_prefill_tokens_threshold=10)))
    return drive


def test_a_failed_prefill_moves_to_another_worker_even_if_that_is_busy() -> None:
    drive = busy_prefillers("p", "q")
    first, other = drive.ask(), drive.ask("other", PROMPTS[1])
    assert {first.worker_id, other.worker_id} == {"p", "q"}
    (again,) = drive.emit(PrefillFailed, first, error="no room")
    assert (again.stage, again.worker_id) == ("prefill", other.worker_id)


def test_an_encoded_prompt_goes_to_a_prefill_worker_even_if_that_is_busy() -> None:
    drive = busy_prefillers("p")
    drive.encoders()
    drive("fleet", encoder("n", 5))
    first = drive.ask(media=(MEDIA,))
    assert first.stage == "encode"
    assert drive.ask("other", PROMPTS[1]).stage == "prefill"
    (then,) = drive.emit(EncodeFinished, first, encoded=ENCODED)
    assert then.stage == "prefill"


def test_a_later_attempt_is_not_bound_to_the_worker_of_its_session() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], session_ttl_s=10.0)
    hints: Any = RoutingHints(session_id="s")
    (then,) = drive.prefilled(drive.ask(routing=hints))
    for name in "ab":
        (beside,) = drive.prefilled(drive.ask(name, PROMPTS[1], routing=hints))
        assert beside.worker_id == then.worker_id
    _, again = drive.emit(TransferFailed, then, error="gone")
    (on,) = drive.prefilled(again)
    assert (on.stage, on.attempt) == ("decode", 2)
    assert on.worker_id != then.worker_id


NEVER = DisaggregationSet(model="m", disagg=DisaggConfig(policy="never"))
AGAIN = DisaggregationSet(model="m", disagg=ENFORCED)


def answered_twice_by_lost_workers() -> tuple[Driver, Any]:
    """Two attempts at an answer were lost, and the next prompt is computed elsewhere for the first time."""
    drive = Driver().disagg(["p"], ["d", "e", "f"])
    drive("control", NEVER)
    routed = drive.ask()
    (routed,) = drive.lose(routed.worker_id)
    drive("control", AGAIN)
    (routed,) = drive.lose(routed.worker_id)
    assert (routed.stage, routed.attempt, routed.earlier_attempts) == ("prefill", 1, 2)
    return drive, routed


def test_output_of_earlier_attempts_is_stale_after_a_cancel() -> None:
    drive, _ = answered_twice_by_lost_workers()
    (aborted,) = drive.cancel("r")
    assert aborted.attempt == 2


def test_the_abort_message_states_the_attempts() -> None:
    drive, routed = answered_twice_by_lost_workers()
    (then,) = drive.prefilled(routed)
    assert (then.stage, then.attempt) == ("decode", 3)
    released, aborted = drive.emit(TransferFailed, then, error="gone")
    assert (released.attempt, aborted.holder) == (then.earlier_attempts, None)
    assert aborted.message == "remote prefill or its KV transfer failed in 3 attempts: gone"


def test_a_decode_pool_that_counts_no_blocks_has_none_booked() -> None:
    drive = Driver().disagg(["p"], ["d"], track_active_blocks=False)
    (then,) = drive.prefilled(drive.ask())
    load = drive.world.load.rank_load(then.worker_id, 0)
    assert (load.decode_blocks, load.active_requests) == (0.0, 1)


def test_a_request_waited_in_the_queue_once_and_its_first_stage_says_so() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(queue=QueueConfig(threshold=0.25)))
    first = drive.ask("r0")
    drive.ask()
    _, second = drive.prefilled(first)
    assert (second.request_id, second.stage, second.waited_us) == ("r", "prefill", NOW)
    (then,) = drive.prefilled(second)
    assert (then.stage, then.waited_us) == ("decode", 0)


def test_a_policy_gets_the_prefill_attempt() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    attempts: list[tuple[str, int]] = []
    drive.world.on_plan = lambda plan: attempts.append((plan.stage, plan.attempt))
    (then,) = drive.prefilled(drive.ask())
    _, again = drive.emit(TransferFailed, then, error="gone")
    (again,) = drive.emit(PrefillFailed, again, error="no room")
    assert (again.stage, again.attempt) == ("prefill", 3)
    assert attempts == [("prefill", 0), ("decode", 0), ("prefill", 1), ("prefill", 2)]


def test_disagg_the_pool_with_a_ready_worker_serves() -> None:
    drive = Driver().fleet("a")  # in the pool default
    drive("control", PoolConfigured(pool="apart", model="m", block_size=BLOCK, role="decode"))
    (routed,) = drive("requests", request("first", PROMPTS[0]))
    assert routed.pool == "default"
    drive.fact(WorkerDraining, "a")
    (refused,) = drive("requests", request("second", PROMPTS[0]))
    assert refused.reason == "no_workers"
    drive("fleet", joined("d", 0, pool="apart", role="decode"))
    (routed,) = drive("requests", request("third", PROMPTS[0]))
    assert (routed.pool, routed.worker_id) == ("apart", "d")


def test_history_agrees_with_itself_at_every_stage() -> None:
    drive = Driver().disagg(("p", "q"), ("d", "e"), session_ttl_s=10.0)
    found: list[tuple[str, Counterfactual, Counterfactual]] = []

    def look(plan: Plan) -> None:
        other = msgspec.structs.replace(plan.pool, router=RouterConfig(mode="round-robin", session_ttl_s=10.0))
        ours, theirs = (counterfactual(drive.world, one, plan) for one in (plan.pool, other))
        found.append((plan.stage, ours, theirs))

    drive.world.on_plan = look
    for number in range(4):
        (first,) = drive("requests", request(f"r{number}", PROMPTS[0]))
        (then,) = drive.prefilled(first)
        _, again = drive.emit(TransferFailed, then, error="gone")
        assert again.stage == "prefill"
        drive.prefilled(again)
    assert [stage for stage, _, _ in found].count("decode") == 8
    assert all(ours.agrees for _, ours, _ in found)
    assert not all(theirs.agrees for _, _, theirs in found)
    assert all(theirs.choice is not None for _, _, theirs in found)
