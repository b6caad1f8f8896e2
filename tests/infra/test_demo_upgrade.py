"""The verdict of `make demo-upgrade`."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.decisions import CostTerms, RequestRouted, ScoredCandidate
from tests.harness.cluster import Ownership
from tests.harness.demo_upgrade import (
    WARM,
    HandOff,
    Result,
    by_turns,
    hand_off_in,
    kept,
    longest_gap_s,
    selects_other,
)
from tests.harness.failover import Counts
from tests.harness.other_version import OTHER_VERSION
from tests.integration.stream_clients import StreamClients, StreamResult, prompt


def hand_off(before: int, after: int, seal: int = 7) -> HandOff:
    return HandOff(Ownership("a", 1, 0, before), Ownership("b", 8, 0, after, seal), 0.25, seal)


GOOD = Result(
    counts=Counts(sent=90, rejected=2),
    hand_offs=[hand_off(CORE_VERSION, OTHER_VERSION), hand_off(OTHER_VERSION, CORE_VERSION)],
    kept=[WARM, WARM],
    verified={CORE_VERSION: (9, 9), OTHER_VERSION: (5, 5)},
    noted=5,
    measured=4,
    unmeasured=3,
    changed=1,
    routed=5,
)


def result(**changes: Any) -> Result:
    found = replace(GOOD, problems=[], in_flight=[], **changes)
    found.judge()
    return found


def test_a_demo_whose_bars_hold_is_ok() -> None:
    found = result()
    assert found.problems == []
    lines = found.line().splitlines()
    assert lines[1] == f"  hand-off from a (rules {CORE_VERSION}) to b (rules {OTHER_VERSION}): no routing for 0.25 s"
    assert lines[-1] == "  ok"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": Counts(9, 3, ["a: 0 ends, no error"])}, "a: 0 ends"),
        ({"hand_offs": [hand_off(CORE_VERSION, OTHER_VERSION)]}, f"ownership went to the rules [{OTHER_VERSION}]"),
        ({"hand_offs": [hand_off(CORE_VERSION, CORE_VERSION)]}, f"ownership went to the rules [{CORE_VERSION}]"),
        ({"kept": [WARM, WARM - 1]}, f"warm prefixes kept: [{WARM}, {WARM - 1}]"),
        ({"kept": [WARM]}, f"warm prefixes kept: [{WARM}]"),
        ({"verified": {CORE_VERSION: (9, 9)}}, f"version {OTHER_VERSION} verified 0 of its 0"),
        ({"verified": {CORE_VERSION: (8, 9), OTHER_VERSION: (5, 5)}}, f"version {CORE_VERSION} verified 8 of its 9"),
        ({"measured": 0}, "the worker wrote 0 progress.batch_measured for owners that know"),
        ({"early": 1}, "the worker wrote 4 progress.batch_measured for owners that know the tag, and 1 for others"),
        ({"unmeasured": 0}, "the worker wrote 4 progress.batch_measured"),
        ({"noted": 0}, "no owner wrote cost.noted"),
        ({"changed": 0}, "the changed cost rule changed no decision"),
    ],
)
def test_an_unmet_bar_fails_the_demo(change: dict[str, object], problem: str) -> None:
    found = result(**change)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(problem)
    assert found.line().endswith("FAILED (1 problems)")


def test_a_claim_without_a_seal_fails_the_demo() -> None:
    dead = hand_off(OTHER_VERSION, CORE_VERSION, seal=-1)
    assert [one[:21] for one in result(hand_offs=[*GOOD.hand_offs, dead]).problems] == ["a claim names no seal"]


def test_a_second_router_may_claim_right_after_the_first_one() -> None:
    old = Ownership("a", 1, 0, CORE_VERSION, routed_us=[0])
    first, second = Ownership("b", 8, 0, OTHER_VERSION, seal=7), Ownership("c", 9, 0, OTHER_VERSION, routed_us=[9])
    assert result(hand_offs=[hand_off_in([old, first, second], "a", second, 5), GOOD.hand_offs[1]]).problems == []
    unsealed = hand_off_in([old, second], "a", second, 5)
    assert [one[:21] for one in result(hand_offs=[unsealed, GOOD.hand_offs[1]]).problems] == ["a claim names no seal"]


async def test_a_request_on_its_way_to_a_removed_ingress_is_sent_to_another_one() -> None:
    clients: StreamClients

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.host == "a":
            clients.urls[:] = ["http://b"]
            error = {"error": {"code": "shutting_down"}}
            return httpx.Response(503, json=error, headers={"retry-after": "0"})
        return httpx.Response(200, text="data: [DONE]\n\n")

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as client:
        clients = StreamClients(client, ["http://a", "http://b"], "p")
        (result,) = await clients.answers([prompt(1)], 1)
    assert (result.ends, result.problem, result.url, clients.rejected) == (1, "", "http://b", 1)


def answer(worker: str, cached_tokens: int) -> StreamResult:
    usage = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
    return StreamResult("r", [1], usage=usage, served={"worker": worker})


def test_a_prefix_is_kept_if_its_worker_has_it_cached() -> None:
    holders = [{"w1"}, {"w1"}, {"w1"}, {"w1"}]
    answers = [answer("w1", 64), answer("w2", 64), answer("w1", 0), StreamResult("r", [1], problem="503")]
    assert kept(holders, answers) == 1
    assert holders == [{"w1"}, {"w1", "w2"}, {"w1"}, {"w1"}]


def test_prompts_with_the_same_holder_are_not_asked_one_after_the_other() -> None:
    holders = [{"w1"}, {"w2"}, {"w1"}, {"w3"}, {"w2"}, {"w3"}]
    assert by_turns(holders) == [0, 1, 3, 2, 4, 5]
    assert by_turns([set(), set()]) == [0, 1]


def test_the_longest_gap_ends_after_the_stop_and_spans_owners() -> None:
    old = Ownership("a", 1, 0, routed_us=[0, 900_000, 1_000_000])
    new = Ownership("b", 8, 0, routed_us=[1_300_000, 1_400_000])
    assert longest_gap_s([old, new], 950_000) == 0.3


def terms(prefill: float, credit: float, decode: float, cost: float) -> CostTerms:
    return CostTerms(
        cost=cost,
        prefill_blocks=prefill,
        overlap_credit=credit,
        decode_blocks=decode,
        active_requests=0,
        device_overlap=0,
    )


def test_a_changed_decision_has_a_runner_up_that_is_cheaper_by_the_rule_of_this_tree() -> None:
    def routed(runner_up: CostTerms | None) -> RequestRouted:
        return RequestRouted(
            request_id="r",
            attempt=1,
            pool="default",
            worker_id="a",
            worker_epoch=1,
            slot=0,
            rank=0,
            mode="kv",
            candidates=2,
            table_digest="0" * 16,
            terms=terms(4.0, 0.0, 1.0, 6.0),
            ties=1,
            runner_up=None if runner_up is None else ScoredCandidate(worker_id="b", rank=0, terms=runner_up),
        )

    assert selects_other(routed(terms(4.0, 4.0, 4.0, 8.0)))
    assert not selects_other(routed(terms(4.0, 0.0, 2.0, 8.0)))
    assert not selects_other(routed(None))
