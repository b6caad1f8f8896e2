"""Explanations, status and comparisons of logs with several pools."""

from typing import Any

import pytest

from forebay.events.requests import RoutingHints
from forebay.replay.diff.diff import diff
from forebay.replay.observed_history import observe_history
from forebay.replay.status import read_status
from forebay.replay.verify.verify import verify
from tests.core.worlds import PROMPTS, one_cell, query, request
from tests.replay.recorder import Recorder, ending_of, words

SHORT = PROMPTS[0][:2]


async def texts(made: Recorder, name: str = "r") -> list[str]:
    explanation = await made.explain(name)
    assert explanation.divergence is None
    return [one.text for one in explanation.timeline if one.what == "pool_chosen"]


async def test_the_grid_and_skipped_pools_are_explained() -> None:
    made = Recorder().pools("long", "short")
    made.rules(one_cell("long", "short", isl_max=40, cells=(("short",), ("long",))))
    made.drain("short")
    made("requests", request("r", SHORT))
    explanation = await made.explain("r")
    assert words(explanation) == ["submitted", "pool_chosen", "routed"]
    assert explanation.timeline[1].text == (
        "pool long: the grid names short (row 0, column 0: 10 prompt tokens and a latency target of 50 ms);"
        " short is drained"
    )


@pytest.mark.parametrize(
    ("hints", "text"),
    [
        ({}, "pool a: b is a canary of a, and the request belongs to its share; b is full"),
        ({"worker_id": "w-b"}, "pool b: b has the worker that the request names"),
        ({"session_id": "s"}, "pool b: b has the rank that serves the session"),
    ],
)
async def test_other_reasons_are_explained(hints: dict[str, Any], text: str) -> None:
    made = Recorder().pools("a", "b", session_ttl_s=10.0)
    made.canary("b", "a")
    made("requests", request("s", SHORT, routing=RoutingHints(session_id="s")))
    made("requests", request("r", SHORT, routing=RoutingHints(**hints)))
    assert await texts(made) == [text]


async def test_the_move_of_a_queued_request_is_explained_and_derived_again() -> None:
    made = Recorder().pools("a", "b")
    made.rules(one_cell("a"))
    running = [
        made("requests", request(f"on-{name}", SHORT, routing=RoutingHints(worker_id=f"w-{name}")))[0] for name in "ab"
    ]
    made("requests", request("r", SHORT))
    made.drain("a")
    made.finish(running[1])
    made.seal()
    explanation = await made.explain("r")
    assert words(explanation) == ["submitted", "pool_chosen", "held", "pool_chosen", "routed"]
    assert explanation.timeline[3].text == "pool b: the request leaves a; a is drained"
    report = await verify(await made.log(), 0)
    assert (report.divergence, report.decisions, report.verified) == (None, 4, 4)


async def test_a_rejection_names_the_ranks_of_the_chosen_pool() -> None:
    made = Recorder().pools("a", "b")
    made.rules(one_cell("b"))
    made("requests", query("r", SHORT, routing=RoutingHints(required_taints=("gpu",))))
    explanation = await made.explain("r")
    assert [one.seen.worker_id for one in ending_of(explanation).left_out] == ["w-b"]
    made.drain("a")
    made.drain("b")
    made("requests", request("r2", SHORT))
    refused = await made.explain("r2")
    assert ending_of(refused).text == "no pool of m takes new requests; drained pools: b, a"


async def test_the_status_shows_drains_and_canaries_and_needs_one_pool_with_workers() -> None:
    made = Recorder().pools("a", "b")
    made.canary("b", "a", 0.25)
    made.drain("a")
    made.seal()
    status = await read_status(await made.log(), 0, "m")
    assert [(one.pool, one.drained, one.canary_of, one.canary_share) for one in status.pools] == [
        ("a", True, None, 0.0),
        ("b", False, "a", 0.25),
    ]
    assert status.ready
    made.drain("b")
    made.seal()
    assert (await read_status(await made.log(), 0, "m")).problems == ["no worker is ready"]


def served() -> Recorder:
    """Return a log in which an operator sets a grid, a canary and a drain between requests, each of which ends."""
    made = Recorder().pools("a", "b", "c")
    ask(made, "r0")
    made.rules(one_cell("b"), retry=True)
    ask(made, "r1")
    made.canary("c", "b")
    ask(made, "r2")
    made.drain("c")
    ask(made, "r3")
    made.seal()
    return made


def ask(made: Recorder, name: str) -> None:
    """Route a request and finish it."""
    (routed,) = made("requests", request(name, SHORT))
    made.finish(routed)


async def test_choices_are_derived_again_and_agree_with_themselves() -> None:
    log = await served().log()
    report = await verify(log, 0)
    assert (report.divergence, report.decisions, report.verified) == (None, 4, 4)
    same = await diff(log, 0, lambda pool: pool)
    assert same.identical


async def test_operators_rules_are_part_of_the_input_of_a_simulator() -> None:
    history = await observe_history(await served().log(), 0)
    kinds = [type(event).__name__ for _, event in history.external_events]
    assert kinds[-3:] == ["PoolRoutingConfigured", "PoolCanarySet", "PoolDrainSet"]
