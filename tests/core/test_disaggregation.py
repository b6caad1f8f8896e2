"""Prefill and decode apart: who computes a prompt, by which rule, and with which settings both pools choose."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.phases import Phase
from forebay.core.restore import restore
from forebay.core.routing.stages import as_decode_request, as_prefill_request
from forebay.core.state.submitted_request import request_from_event
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    DisaggConfig,
    DisaggregationSet,
    PoolConfigured,
    QueueConfig,
)
from forebay.events.decisions import PrefillPlace, RequestHeld, RequestRejected
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RouterOverride, RoutingHints
from tests.core.disaggregated import ask, isl, lost, prefilled, progress_fields, rule, stored
from tests.core.worlds import (
    BLOCK,
    PROMPTS,
    Driver,
    decode_pool,
    joined,
    prefill_pool,
    prefilled_by,
    prefiller,
    query,
    request,
)

TOKENS = 8 * BLOCK + 2  # of PROMPTS[0] as `request` makes it
STEP = 64  # tokens of an engine step of these workers


# The flow


def test_a_prompt_is_computed_by_one_worker_and_answered_by_another() -> None:
    drive = Driver().disagg(["p"], ["d"])
    first = ask(drive)
    assert (first.stage, first.pool, first.worker_id, first.attempt) == ("prefill", "prefillers", "p", 1)
    assert first.prefill == PrefillPlace(remote=True, reason="always")
    assert drive.world.load.rank_load("p", 0).prefill_tokens == TOKENS
    (then,) = prefilled(drive, first)
    assert (then.stage, then.pool, then.worker_id, then.attempt, then.earlier_attempts) == (
        "decode",
        "default",
        "d",
        1,
        1,
    )
    assert then.prefill is None, "who computes it was decided before"
    one = drive.world.requests.get("r")
    assert one is not None
    assert (one.phase, one.prefilled) == (Phase.TRANSFER, prefilled_by("p", drive.epoch("p")))
    drive("progress", FirstTokenEmitted(**progress_fields(then)))
    assert (one.phase, one.begun, one.prefilled) == (Phase.DECODE, True, None)
    drive("progress", RequestFinished(**progress_fields(then), finish_reason="stop"))
    assert not len(drive.world.requests)
    assert all(not load.active_requests for load in drive.world.load.ranks())


def test_aggregated_pools_have_no_prefill_decision() -> None:
    drive = Driver().fleet("a")
    drive("control", prefill_pool())
    drive("fleet", prefiller("p"))
    routed = ask(drive)
    assert (routed.stage, routed.pool, routed.prefill) == ("aggregated", "default", None)
    drive("progress", FirstTokenEmitted(**progress_fields(routed)))
    assert not drive.world.requests.get("r").begun  # type: ignore[union-attr]


def test_prefill_workers_alone_serve_no_requests() -> None:
    drive = Driver()
    drive("control", prefill_pool())
    drive("fleet", prefiller("p"))
    assert ask(drive).reason == "wrong_model"
    drive("control", decode_pool())
    refused = ask(drive)
    assert (refused.reason, refused.message) == ("no_workers", "no worker of the pool default is ready")


def test_decode_workers_alone_compute_their_prompts() -> None:
    drive = Driver().disagg([], ["d"])
    assert ask(drive).prefill == PrefillPlace(remote=False, reason="no_prefill_worker")
    drive("fleet", prefiller("p"))
    assert ask(drive, "r2").stage == "prefill"


@pytest.mark.parametrize("enforce", [False, True])
def test_embedding_requests_are_not_prefilled_remotely(*, enforce: bool) -> None:
    drive = Driver().disagg([], [], disagg=DisaggConfig(enforce=enforce))
    tasks: Any = ("generate", "embed")
    drive("fleet", prefiller("p", tasks=tasks))
    drive("fleet", joined("d", 1, role="decode", tasks=tasks))
    routed = ask(drive, task="embed")
    assert (routed.stage, routed.worker_id, routed.prefill) == ("aggregated", "d", None)
    drive("progress", RequestFinished(**progress_fields(routed), finish_reason="stop", output_tokens=0))
    assert not len(drive.world.requests)
    assert drive("requests", query("q"))[0].stage == "prefill"


def test_blocks_of_another_size_are_not_computed_for_a_pool() -> None:
    drive = Driver()
    drive("control", decode_pool())
    drive("control", msgspec.structs.replace(prefill_pool(), block_size=2 * BLOCK))
    drive("fleet", joined("d", role="decode"))
    drive("fleet", prefiller("p", block_size=2 * BLOCK))
    assert ask(drive).prefill == PrefillPlace(remote=False, reason="no_prefill_worker")


def test_the_prefill_worker_that_has_most_of_a_prompt_gets_it() -> None:
    drive = Driver().disagg(["p", "q"], ["d", "e"])
    stored(drive, "q", PROMPTS[0])
    stored(drive, "e", PROMPTS[1])
    first = ask(drive)
    assert (first.worker_id, first.terms.device_overlap) == ("q", 8)
    assert drive.world.load.rank_load("q", 0).prefill_tokens == TOKENS - 8 * BLOCK


# With which settings both pools choose


def test_decode_workers_are_chosen_by_their_load_alone_and_share_nothing() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    stored(drive, "d", PROMPTS[0])
    (held,) = prefilled(drive, ask(drive, "r0"))
    assert (held.terms.overlap_credit, held.terms.prefill_blocks) == (0.0, 0.0)
    (other,) = prefilled(drive, ask(drive, "r1"))
    assert {held.worker_id, other.worker_id} == {"d", "e"}, "the cache of d draws nobody"
    (third,) = prefilled(drive, ask(drive, "r2"))
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
    ask(drive, "r0")
    second = ask(drive, "r1")
    assert second.terms.decode_blocks == 0.0
    assert drive.world.load.rank_load("p", 0).decode_blocks == 0.0
    assert drive.world.load.rank_load("p", 0).active_requests == 2


def test_a_pinned_worker_is_the_decode_worker() -> None:
    drive = Driver().disagg(["p"], ["d", "e"])
    for name in "de":
        first = ask(drive, name, routing=RoutingHints(worker_id=name))
        (then,) = prefilled(drive, first)
        assert (first.worker_id, then.worker_id) == ("p", name)
    assert ask(drive, "r", routing=RoutingHints(worker_id="p")).reason == "unknown_worker"


def test_an_adapter_must_be_where_the_prompt_is_computed() -> None:
    drive = Driver().disagg(["p"], [])
    drive("fleet", joined("d", 1, role="decode", loras=("x",)))
    assert ask(drive, lora_name="x").prefill == PrefillPlace(remote=False, reason="no_prefill_worker")
    drive("fleet", prefiller("q", 2, loras=("x",)))
    assert ask(drive, "r2", lora_name="x").worker_id == "q"


def test_a_session_has_a_worker_in_each_pool() -> None:
    drive = Driver().disagg(["p", "q"], ["d", "e"], session_ttl_s=10.0)
    drive("control", prefill_pool(session_ttl_s=10.0))
    hints = RoutingHints(session_id="s")
    first = ask(drive, "r0", routing=hints)
    (then,) = prefilled(drive, first)
    for number in range(1, 4):  # others would be less loaded each time
        again = ask(drive, f"r{number}", PROMPTS[1], routing=hints)
        (answer,) = prefilled(drive, again)
        assert (again.worker_id, answer.worker_id) == (first.worker_id, then.worker_id)


# The rules


@dataclass(frozen=True)
class Case:
    """A rule in a state, and what it says: `cached` blocks at the decode worker, `waiting` requests at prefill."""

    config: DisaggConfig
    place: PrefillPlace
    cached: int = 0
    waiting: int = 0
    router: dict[str, Any] = field(default_factory=dict)


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
        ask(drive, f"w{number}", PROMPTS[1])
    drive("control", DisaggregationSet(model="m", disagg=case.config))
    if case.cached:
        stored(drive, "d", PROMPTS[0][: case.cached])
    routed = ask(drive)
    assert routed.prefill == case.place
    assert (routed.stage == "prefill") == case.place.remote


LIMITS = st.builds(
    DisaggConfig,
    policy=st.sampled_from(["always", "never", "classic", "isl_bounding", "prefill_load", "isl_or_load"]),
    max_local_prefill_length=st.integers(0, 40),
    max_prefill_queue_size=st.integers(1, 4),
    eff_isl_threshold=st.integers(0, 40),
    eff_isl_ratio_threshold=st.floats(0.0, 1.0),
    prefill_busy_threshold=st.none() | st.floats(0.0, 3.0),
    decode_busy_threshold=st.none() | st.floats(0.0, 1.0),
    enforce=st.booleans(),
)


@given(LIMITS, st.integers(0, 8), st.integers(0, 5), st.booleans())
def test_a_policy_follows_its_formula(config: DisaggConfig, cached: int, waiting: int, prefillers: bool) -> None:
    drive = Driver().disagg(["p"] if prefillers else [], ["d"])
    if prefillers:
        for number in range(waiting):
            ask(drive, f"w{number}", PROMPTS[1])
    drive("control", DisaggregationSet(model="m", disagg=config))
    stored(drive, "d", PROMPTS[0][:cached])
    uncached = TOKENS - cached * BLOCK
    short = uncached < config.eff_isl_threshold and uncached / TOKENS < config.eff_isl_ratio_threshold
    threshold = config.prefill_busy_threshold
    busy = prefillers and threshold is not None and waiting * TOKENS > threshold * STEP
    full = prefillers and max(0, waiting - 1) >= config.max_prefill_queue_size
    local = {
        "always": False,
        "never": True,
        "classic": uncached <= config.max_local_prefill_length or full,
        "isl_bounding": short,
        "prefill_load": busy,
        "isl_or_load": short or busy,
    }[config.policy]
    share = config.decode_busy_threshold
    drive_blocks = drive.world.load.rank_load("d", 0).decode_blocks + len(PROMPTS[0])
    if local and config.policy not in ("never", "classic") and share is not None and drive_blocks > share * 64:
        local = False
    routed = ask(drive)
    if not local and not prefillers:
        assert (routed.reason == "no_workers") if config.enforce else not routed.prefill.remote
        return
    assert routed.prefill.remote != local
    assert (routed.stage == "prefill") != local


def test_limits_are_changed_at_run_time_until_the_pool_is_configured_anew() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=rule("never"))
    assert ask(drive, "r0").prefill.reason == "never"
    before = drive.world.digest()
    drive("control", DisaggregationSet(model="m", disagg=rule("always")))
    assert drive.world.digest() != before
    assert ask(drive, "r1").prefill.reason == "always"
    drive.world.take_consumed()
    assert restore(drive.world.snapshot()).disagg == {"default": rule("always")}
    drive("control", decode_pool(disagg=classic(1_000)))
    assert ask(drive, "r2").prefill.reason == "short_prompt"
    drive("control", DisaggregationSet(model="nobody's", disagg=rule("always")))
    assert drive.world.counts["unknown_model"] == 1
    assert ask(drive, "r3").prefill.reason == "short_prompt"


def test_only_decode_pools_have_a_rule() -> None:
    drive = Driver().fleet("a")
    before = drive.world.digest()
    drive("control", DisaggregationSet(model="m", disagg=rule("always")))
    assert drive.world.disagg == {}
    assert drive.world.digest() != before, "it was read"
    with pytest.raises(ValueError, match="decode_busy_threshold"):
        DisaggConfig(decode_busy_threshold=1.1)
    with pytest.raises(ValueError, match="max_prefill_queue_size must be at least 1"):
        DisaggConfig(max_prefill_queue_size=0)


# What enforce says


def test_enforced_prompts_are_refused_where_nobody_computes_them() -> None:
    drive = Driver().disagg([], ["d"], disagg=rule("always", enforce=True))
    refused = ask(drive)
    assert isinstance(refused, RequestRejected)
    assert refused.message == "no prefill worker for the pool default is ready"
    drive("control", DisaggregationSet(model="m", disagg=isl(99, 1.0, enforce=True)))
    stored(drive, "d", PROMPTS[0])
    assert ask(drive, "r1").prefill.reason == "short_prompt", "its rule leaves it where it is answered"


# The queue, and busy workers

QUEUE = QueueConfig(threshold=0.5)


def test_requests_wait_for_prefill_workers_and_go_when_a_prompt_is_computed() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(queue=QUEUE))
    first = ask(drive, "r0")
    assert isinstance(ask(drive, "r1"), RequestHeld)
    (answer,) = drive("requests", query("q", PROMPTS[1]))
    assert (answer.would_wait, answer.stage, answer.pool) == (True, "prefill", "prefillers")
    made = prefilled(drive, first)
    assert [(one.request_id, one.stage) for one in made] == [("r0", "decode"), ("r1", "prefill")]
    assert made[1].waited_us == 20


def test_short_prompts_do_not_stand_behind_long_ones() -> None:
    drive = Driver().disagg(["p"], ["d"], disagg=classic(20), queue=QUEUE)
    drive("control", prefill_pool(queue=QUEUE))
    routed = [ask(drive, "long"), *(ask(drive, f"short{number}", PROMPTS[1][:4]) for number in range(2))]
    assert [one.stage for one in routed] == ["prefill", "aggregated", "aggregated"]
    held = [ask(drive, "long too", PROMPTS[2]), ask(drive, "short too", PROMPTS[2][:1])]
    assert all(isinstance(one, RequestHeld) for one in held), "both workers have enough to do"
    (then,) = drive("progress", FirstTokenEmitted(**progress_fields(routed[1])))
    assert (then.request_id, then.stage) == ("short too", "aggregated")


def test_queued_decode_requests_survive_a_restore() -> None:
    drive = Driver().disagg(["p"], ["d"])
    drive("control", prefill_pool(queue=QUEUE))
    ask(drive, "r0")
    for number in range(8):
        ask(drive, f"w{number}", PROMPTS[1][:number])
    drive.world.take_consumed()
    assert restore(drive.world.snapshot()).digest() == drive.world.digest()
    drive("control", PoolConfigured(pool="another", model="n", block_size=BLOCK))
    drive("control", PoolConfigured(pool="another", model="n", block_size=BLOCK, role="encode"))
    drive("control", msgspec.structs.replace(decode_pool(), role="aggregated"))
    drive.world.take_consumed()
    assert restore(drive.world.snapshot()).digest() == drive.world.digest()


def test_busy_prefill_workers_leave_prompts_where_they_are_answered() -> None:
    drive = Driver().disagg(["p"], ["d"])
    ask(drive, "r0")
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(active_prefill_tokens_threshold=10)))
    assert ask(drive, "r1").prefill == PrefillPlace(remote=False, reason="prefill_busy")
    assert ask(drive, "r2").reason == "busy", "now both are"


def test_decode_prefers_workers_that_are_not_busy() -> None:
    drive = Driver().disagg(["p"], ["d", "e"], busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    first, second = ask(drive, "r0"), ask(drive, "r1")
    (one,) = prefilled(drive, first)
    (two,) = prefilled(drive, second)
    assert {one.worker_id, two.worker_id} == {"d", "e"}
    assert ask(drive, "r2").reason == "busy"


def test_an_accepted_request_may_go_to_a_busy_decode_worker() -> None:
    drive = Driver().disagg(["p"], ["d"], busy=BusyThresholds(active_decode_blocks_threshold=0.1))
    first, second = ask(drive, "r0"), ask(drive, "r1")
    for routed in (first, second):
        (then,) = prefilled(drive, routed)
        assert then.worker_id == "d"


# Questions


def test_a_route_query_names_the_prefill_worker() -> None:
    drive = Driver().disagg(["p", "q"], ["d"])
    stored(drive, "q", PROMPTS[0])
    (answer,) = drive("requests", query("one", PROMPTS[0]))
    assert (answer.stage, answer.pool, answer.choice.worker_id) == ("prefill", "prefillers", "q")
    assert answer.prefill == PrefillPlace(remote=True, reason="always")
    assert {one.worker_id for one in answer.candidates} == {"p", "q"}
    drive("control", DisaggregationSet(model="m", disagg=rule("never")))
    (answer,) = drive("requests", query("two", PROMPTS[0]))
    assert (answer.stage, answer.pool, answer.choice.worker_id) == ("aggregated", "default", "d")
    assert answer.prefill == PrefillPlace(remote=False, reason="never")
    drive("control", DisaggregationSet(model="m", disagg=rule("always", enforce=True)))
    for name in "pq":
        drive("fleet", lost(drive, name))
    (answer,) = drive("requests", query("three", PROMPTS[0]))
    assert (answer.reason, answer.prefill) == ("no_workers", None)
