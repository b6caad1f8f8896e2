"""Who may take a request: constraints, taints, adapters, ranks, busy workers, sessions."""

from typing import Any

import pytest

from forebay.core.restore import restore
from forebay.events.control import BusyThresholds, BusyThresholdsSet, QueueConfig
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.worlds import PROMPTS, Driver, ids_of, joined, pool, request


def fleet(**router: Any) -> Driver:
    drive = Driver()
    drive("control", pool(**router))
    drive("fleet", joined("a", 0, taints=("zone=x", "ssd"), loras=("sql",)))
    drive("fleet", joined("b", 1, taints=("zone=x",), dp_size=2))
    drive("fleet", joined("c", 2, taints=("ssd",), loras=("sql", "law")))
    return drive


def ask(drive: Driver, name: str = "r", lora_name: str = "", blocks: int = 0, **hints: Any) -> Any:
    fields = {"routing": RoutingHints(**hints), "lora_name": lora_name, "timeout_us": 10**9}
    made = drive("requests", request(name, PROMPTS[0][:blocks], **fields))
    return made[-1]


@pytest.mark.parametrize(
    ("hints", "lora_name", "seats"),
    [
        ({}, "", 4),
        ({"worker_id": "b"}, "", 2),
        ({"worker_id": "b", "rank": 1}, "", 1),
        ({"allowed_workers": ("a", "c", "gone")}, "", 2),
        ({"required_taints": ("zone=x",)}, "", 3),
        ({"required_taints": ("zone=x", "ssd")}, "", 1),
        ({}, "sql", 2),
        ({"required_taints": ("zone=x",)}, "sql", 1),
    ],
)
def test_what_a_request_demands_of_its_worker(hints: dict[str, Any], lora_name: str, seats: int) -> None:
    routed = ask(fleet(), lora_name=lora_name, **hints)
    assert isinstance(routed, RequestRouted)
    assert routed.candidates == seats


@pytest.mark.parametrize(
    ("hints", "lora_name", "reason", "text"),
    [
        ({"worker_id": "d"}, "", "unknown_worker", "the pool default has no worker d"),
        ({"worker_id": "b", "rank": 2}, "", "unknown_worker", "worker b has no rank 2; ranks are 0 to 1"),
        ({"rank": 1}, "", "contradictory_routing", "the request names rank 1, but no worker"),
        (
            {"worker_id": "a", "allowed_workers": ("b",)},
            "",
            "contradictory_routing",
            "worker a, which is not one of its allowed",
        ),
        ({"worker_id": "b", "required_taints": ("ssd",)}, "", "no_eligible_worker", "is b and has the taints ssd"),
        ({"allowed_workers": ("d", "e")}, "", "no_eligible_worker", "is one of d, e"),
        ({"allowed_workers": tuple("defgh")}, "", "no_eligible_worker", "is one of d, e, f, g, …"),
        ({}, "poems", "no_eligible_worker", "has the adapter poems"),
    ],
)
def test_no_eligible_worker_is_reported_with_a_reason(
    hints: dict[str, Any], lora_name: str, reason: str, text: str
) -> None:
    drive = fleet()
    before = drive.world.load.digest(), drive.world.requests.digest()
    refused = ask(drive, lora_name=lora_name, **hints)
    assert isinstance(refused, RequestRejected)
    assert (refused.reason, drive.world.counts[f"rejected_{reason}"]) == (reason, 1)
    assert text in refused.message
    assert (drive.world.load.digest(), drive.world.requests.digest()) == before


def test_a_pinned_worker_of_another_pool_or_that_is_not_ready() -> None:
    drive = fleet()
    drive("fleet", joined("x", 0, pool="other"))
    assert ask(drive, worker_id="x").reason == "unknown_worker"
    drive.fact(WorkerDraining, "a")
    refused = ask(drive, worker_id="a")
    assert (refused.reason, refused.message) == ("no_eligible_worker", "no ready worker of the pool default is a")


# Cache namespaces


def shared_and_salted(**router: Any) -> Driver:
    drive = Driver()
    drive("control", pool(**router))
    drive("fleet", joined("shared", 0, salts_cache=False))
    drive("fleet", joined("salted", 1))
    return drive


def test_a_salted_request_goes_only_to_workers_that_separate_their_cache() -> None:
    drive = shared_and_salted()
    salted = drive("requests", request("r", cache_namespace="tenant"))[-1]
    assert isinstance(salted, RequestRouted)
    assert (salted.worker_id, salted.candidates) == ("salted", 1)
    assert ask(drive, "plain").candidates == 2
    drive.lose("salted")
    refused = drive("requests", request("other", cache_namespace="tenant"))[-1]
    assert isinstance(refused, RequestRejected)
    assert refused.reason == "no_eligible_worker"
    assert refused.message == ("no ready worker of the pool default separates the cache of the request's namespace")
    assert ask(drive, "again").worker_id == "shared"


def test_a_queued_salted_request_waits_for_its_workers_only() -> None:
    """Also after a restore. A request without a namespace does not wait behind it."""
    drive = shared_and_salted(queue=QueueConfig(threshold=0.1))
    (first,) = drive("requests", request("first", PROMPTS[1], cache_namespace="tenant"))
    assert first.worker_id == "salted"
    assert isinstance(drive("requests", request("r", PROMPTS[0], cache_namespace="tenant"))[-1], RequestHeld)
    copy = Driver(restore(drive.world.snapshot()))
    assert copy.world.digest() == drive.world.digest()
    for one in (drive, copy):
        plain = one("requests", request("plain", PROMPTS[2]))[-1]
        assert isinstance(plain, RequestRouted)
        assert plain.worker_id == "shared"
        assert isinstance(one("requests", request("next", PROMPTS[2]))[-1], RequestHeld)
        done = RequestFinished(**ids_of(plain), finish_reason="stop", output_tokens=1, cached_tokens=0)
        freed = [made for made in one("progress", done) if isinstance(made, RequestRouted)]
        assert [(made.request_id, made.worker_id) for made in freed] == [("next", "shared")]
        done = RequestFinished(**ids_of(first), finish_reason="stop", output_tokens=1, cached_tokens=0)
        freed = [made for made in one("progress", done) if isinstance(made, RequestRouted)]
        assert [(made.request_id, made.worker_id) for made in freed] == [("r", "salted")]


# Busy


def set_busy(drive: Driver, model: str = "m", **thresholds: Any) -> None:
    drive("control", BusyThresholdsSet(model=model, thresholds=BusyThresholds(**thresholds)))


@pytest.mark.parametrize(
    ("thresholds", "reports"),
    [
        ({"active_prefill_tokens_threshold": 13}, False),
        ({"active_prefill_tokens_threshold_frac": 0.2}, False),  # of 64
        ({"active_decode_blocks_threshold": 2 / 64}, False),
        ({"active_decode_blocks_threshold": 0.5}, True),
        ({"active_decode_blocks_threshold": 0.5, "active_prefill_tokens_threshold": 99}, True),
    ],
)
def test_a_worker_above_any_threshold_is_passed_over_and_all_busy_is_refused(
    thresholds: dict[str, Any], reports: bool
) -> None:
    drive = Driver().fleet("a", "b")
    set_busy(drive, **thresholds)
    for name in ("a", "b"):
        if reports:
            load = {"running": 1, "waiting": 0, "kv_blocks_used": 33, "kv_blocks_total": 64}
            drive("metrics", LoadReported(worker_id=name, worker_epoch=drive.epoch(name), **load))
        else:
            assert ask(drive, f"on-{name}", blocks=3, worker_id=name).worker_id == name
        if name == "a":
            routed = ask(drive, "small")
            assert (routed.worker_id, routed.candidates) == ("b", 1)
            assert ask(drive, "pinned", worker_id="a").reason == "busy"
    refused = ask(drive, "one more")
    assert (refused.reason, drive.world.counts["rejected_busy"]) == ("busy", 2)
    assert "every eligible worker of the pool default" in refused.message
    set_busy(drive)
    assert isinstance(ask(drive, "and another"), RequestRouted)


def test_a_rank_at_the_threshold_is_not_busy() -> None:
    drive = Driver().fleet("a")
    set_busy(drive, active_prefill_tokens_threshold=14)
    ask(drive, "r1", blocks=3)
    assert isinstance(ask(drive, "r2", blocks=3), RequestRouted)


def test_thresholds_stand_until_the_pool_is_configured_anew_and_are_those_of_a_model() -> None:
    drive = Driver().fleet("a", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    ask(drive, "r1")
    assert ask(drive, "r2").reason == "busy"
    set_busy(drive, model="other", active_prefill_tokens_threshold=99)
    assert ask(drive, "r3").reason == "busy"
    set_busy(drive, active_prefill_tokens_threshold=99)
    assert isinstance(ask(drive, "r4"), RequestRouted)
    drive("control", pool(busy=BusyThresholds(active_prefill_tokens_threshold=1)))
    assert ask(drive, "r5").reason == "busy"


# Sessions


def finish(drive: Driver, routed: RequestRouted) -> None:
    drive.emit(FirstTokenEmitted, routed)
    drive.finish(routed)


def load_up(drive: Driver, worker_id: str) -> None:
    for number in range(5):
        ask(drive, f"load-{worker_id}-{number}-{drive.now_us}", blocks=8, worker_id=worker_id)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_a_session_stays_with_its_worker(mode: str) -> None:
    drive = Driver().fleet("a", "b", "c", session_ttl_s=1.0, session_mode=mode)
    first = ask(drive, "r1", session_id="s", worker_id="b")
    load_up(drive, "b")
    assert ask(drive, "other", session_id="other").worker_id != "b"
    again = ask(drive, "r2", session_id="s")
    assert (again.worker_id, again.candidates) == (first.worker_id, 1)
    assert ask(drive, "r3", session_id="s", worker_id="c").worker_id == "c", "a worker that is named comes first"
    assert ask(drive, "r4", session_id="s").worker_id == "c", "and is the session's from then on"


def test_a_session_ends_after_its_time_and_with_its_worker() -> None:
    drive = Driver().fleet("a", "b", session_ttl_s=1.0)
    ask(drive, "r1", session_id="s", worker_id="b")
    drive.now_us += 900_000
    assert ask(drive, "r2", session_id="s").candidates == 1
    drive.now_us += 900_000
    assert ask(drive, "r3", session_id="s").candidates == 1, "each use prolongs it"
    drive.now_us += 1_000_000
    assert ask(drive, "r4", session_id="s").candidates == 2
    finish(drive, ask(drive, "r5", session_id="t", worker_id="b"))
    drive.lose("b")
    drive("fleet", joined("b", 1))
    assert ask(drive, "r6", session_id="t").candidates == 2


def test_a_session_moves_on_from_a_worker_that_is_leaving() -> None:
    drive = Driver().fleet("a", "b", session_ttl_s=1.0)
    ask(drive, "r1", session_id="s", worker_id="b")
    drive.fact(WorkerDraining, "b")
    drive("fleet", joined("c", 2))
    moved = ask(drive, "r2", session_id="s")
    assert moved.candidates == 2
    assert ask(drive, "r3", session_id="s").worker_id == moved.worker_id


def test_sessions_count_only_where_they_are_configured() -> None:
    drive = Driver().fleet("a", "b")
    ask(drive, "r1", session_id="s", worker_id="b")
    assert ask(drive, "r2", session_id="s").candidates == 2


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_hard_sessions_wait_and_soft_sessions_leave_busy_workers(mode: str) -> None:
    drive = Driver().fleet("a", "b", session_ttl_s=1.0, session_mode=mode)
    ask(drive, "r1", session_id="s", worker_id="b")
    set_busy(drive, active_prefill_tokens_threshold=20)
    load_up(drive, "b")
    made = ask(drive, "r2", session_id="s")
    if mode == "hard":
        assert made.reason == "busy"
        return
    assert (made.worker_id, made.candidates) == ("a", 1)
    set_busy(drive)
    assert ask(drive, "r3", session_id="s").worker_id == "b", "it is still the session's worker"


def test_an_embedding_request_ends_without_a_first_token() -> None:
    """Its prompt is load until its end, which lets the next one go."""
    drive = Driver().fleet("a", "b", queue=QueueConfig(threshold=0.5))
    drive("fleet", joined("e", 7, tasks=("generate", "embed")))
    prompt: dict[str, Any] = {"blocks": PROMPTS[0], "timeout_us": 10**9, "task": "embed"}
    (first,) = drive("requests", request("r1", **prompt))
    assert (type(first), first.worker_id) == (RequestRouted, "e")
    (held,) = drive("requests", request("r2", **prompt))
    assert isinstance(held, RequestHeld)
    load = drive.world.load.rank_load("e", 0)
    assert load.prefill_tokens > 0
    (second,) = drive.finish(first, output_tokens=0)
    assert (second.request_id, second.worker_id) == ("r2", "e")
    assert drive.finish(second) == []
    assert (load.prefill_tokens, load.decode_blocks, load.active_requests) == (0, 0, 0)
    assert len(drive.world.requests) == 0
