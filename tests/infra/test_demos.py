"""The verdicts of the demos, their checks of responses, and the faults that they inject."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.core.world import CORE_VERSION
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions
from tests.harness import demo_disagg, demo_kafka, demo_tiers, demo_upgrade
from tests.harness.cluster import Ownership
from tests.harness.demo_upgrade import WARM, HandOff, hand_off_in, kept
from tests.harness.failover import Counts
from tests.harness.other_version import OTHER_VERSION
from tests.harness.tier_system import Reuse
from tests.integration.stream_clients import StreamClients, StreamResult, prompt

SEED = demo_kafka.SEED


def hand_off(before: int, after: int, seal: int = 7) -> HandOff:
    return HandOff(Ownership("a", 1, 0, before), Ownership("b", 8, 0, after, seal), 0.25, seal)


HAND_OFFS = [hand_off(CORE_VERSION, OTHER_VERSION), hand_off(OTHER_VERSION, CORE_VERSION)]


def disagg(**changes: Any) -> demo_disagg.Result:
    stages = Counter({"prefill": 9, "decode": 9, "decode again": 1})
    good = {"answered_once": 9, "stages": stages, "moved_bytes": 2_500_000, "verified": 18, "decisions": 18}
    return demo_disagg.Result(requests=9, **{**good, **changes})


def kafka(**changes: Any) -> demo_kafka.Result:
    good = {"answered_once": 9, "killed_at": 5, "resumed_s": 6.04, "verified": 9, "decisions": 9, "owners": 2}
    return demo_kafka.Result(requests=9, **{**good, **changes})


def tiers(**changes: Any) -> demo_tiers.Result:
    good = {
        "exact": 9,
        "reuse": Reuse(Counter(host=160, disk=32, store=16)),
        "restarted": Reuse(Counter(disk=16)),
        "newcomers": {"directory": Reuse(own=16), "bucket": Reuse(own=16)},
        "damaged": {"flipped file": 3},
        "stale": 2,
        "verified": 9,
        "decisions": 9,
    }
    return demo_tiers.Result(**{**good, **changes})


def upgrade(**changes: Any) -> demo_upgrade.Result:
    good = {
        "counts": Counts(sent=90, rejected=2),
        "hand_offs": HAND_OFFS,
        "kept": [WARM, WARM],
        "verified": {CORE_VERSION: (9, 9), OTHER_VERSION: (5, 5)},
        "noted": 5,
        "measured": 4,
        "unmeasured": 3,
        "changed": 1,
        "routed": 5,
    }
    return demo_upgrade.Result(**{**good, **changes})


Verdict = Callable[..., Any]


@pytest.mark.parametrize(
    ("demo", "lines"),
    [
        (
            disagg,
            "9 requests, 9 answered once, 0 with wrong tokens; routed: 9 decode, 1 decode again, 9 prefill; "
            "2.5 MB of KV moved, 0 transfers failed; verified 18 of 18: ok",
        ),
        (
            kafka,
            "9 requests, 9 answered once, owner killed at 5, routing resumed after 6.0 s, "
            "verified 9 of 9 across 2 owners: ok",
        ),
        (tiers, "9 answers exact, 0 wrong; 3 blocks damaged, 2 stale entries of stores found; verified 9 of 9: ok"),
        (upgrade, "  ok"),
    ],
)
def test_the_last_lines_summarize_the_result(demo: Verdict, lines: str) -> None:
    result = demo()
    result.judge()
    assert result.problems == []
    assert result.line().endswith(lines)


@pytest.mark.parametrize(
    ("demo", "change", "problem"),
    [
        (disagg, {"answered_once": 8}, "1 requests were not answered once"),
        (disagg, {"wrong": 2}, "2 responses have wrong tokens"),
        (disagg, {"moved_bytes": 0}, "no KV was moved"),
        (disagg, {"verified": 17}, "18 decisions were recorded and 17 of them derived equal"),
        (kafka, {"answered_once": 8}, "1 requests were not answered once"),
        (kafka, {"resumed_s": 10.1}, "routing was to resume within 10 s"),
        (kafka, {"resumed_s": None}, "routing was to resume within 10 s"),
        (kafka, {"verified": 8}, "9 decisions were recorded and 8 of them derived equal"),
        (kafka, {"verified": 8, "decisions": 8}, "8 decisions were recorded and 8 of them derived equal"),
        (tiers, {"exact": 0}, "no answer arrived"),
        (tiers, {"wrong": ["r1: 'a', expected 'b'"]}, "r1: 'a', expected 'b'"),
        (tiers, {"reuse": Reuse(Counter(host=1))}, "no KV was loaded from disk under load"),
        (tiers, {"restarted": Reuse(Counter(host=1, store=1))}, "the restarted worker loaded no KV from its disk"),
        (tiers, {"newcomers": {"directory": Reuse(own=16)}}, "the new worker loaded no KV from the bucket"),
        (tiers, {"damaged": {}}, "nothing was damaged"),
        (tiers, {"verified": 8}, "9 decisions were recorded and 8 of them derived equal"),
        (upgrade, {"counts": Counts(9, 3, ["a: 0 ends, no error"])}, "a: 0 ends"),
        (upgrade, {"hand_offs": HAND_OFFS[:1]}, f"ownership went to the rules [{OTHER_VERSION}"),
        (upgrade, {"hand_offs": HAND_OFFS[1:]}, f"ownership went to the rules [{CORE_VERSION}"),
        (upgrade, {"kept": [WARM, WARM - 1]}, f"warm prefixes kept: [{WARM}, {WARM - 1}]"),
        (upgrade, {"kept": [WARM]}, f"warm prefixes kept: [{WARM}]"),
        (upgrade, {"verified": {CORE_VERSION: (9, 9)}}, f"version {OTHER_VERSION} verified 0 of its 0"),
        (upgrade, {"verified": {CORE_VERSION: (8, 9), OTHER_VERSION: (5, 5)}}, f"version {CORE_VERSION} verified 8 of"),
        (upgrade, {"measured": 0}, "the worker wrote 0 progress.batch_measured for owners that know"),
        (upgrade, {"early": 1}, "the worker wrote 4 progress.batch_measured for owners that know the tag, and 1"),
        (upgrade, {"unmeasured": 0}, "the worker wrote 4 progress.batch_measured"),
        (upgrade, {"noted": 0}, "no owner wrote cost.noted"),
        (upgrade, {"changed": 0}, "the changed cost rule changed no decision"),
    ],
)
def test_each_unmet_requirement_is_reported(demo: Verdict, change: dict[str, Any], problem: str) -> None:
    result = demo(**change)
    result.judge()
    assert len(result.problems) == 1
    assert result.problems[0].startswith(problem)
    assert "FAILED" in result.line().splitlines()[-1]


def test_the_generated_trace_is_deterministic_and_shares_prefixes(tmp_path: Path) -> None:
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    for path, seed in ((one, SEED), (two, SEED), (other, SEED + 1)):
        demo_kafka.write_trace(path, seed)
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()
    found = list(open_workload(str(one), WorkloadOptions()).turns())
    assert len(found) == demo_kafka.SESSIONS * demo_kafka.TURNS
    assert found[-1].at_us <= demo_kafka.SECONDS * 1_000_000
    blocks = [block for row in found for block in row.block_ids]
    assert len(set(blocks)) < len(blocks) / 2, "turns repeat the earlier turns"


def problems(hand_offs: list[HandOff]) -> list[str]:
    result = upgrade(hand_offs=hand_offs)
    result.judge()
    return [problem[:21] for problem in result.problems]


def test_a_claim_without_a_seal_fails_the_demo() -> None:
    dead = hand_off(OTHER_VERSION, CORE_VERSION, seal=-1)
    assert problems([*HAND_OFFS, dead]) == ["a claim names no seal"]


def test_a_second_router_may_claim_right_after_the_first_one() -> None:
    old = Ownership("a", 1, 0, CORE_VERSION, routed_us=[0])
    first, second = Ownership("b", 8, 0, OTHER_VERSION, seal=7), Ownership("c", 9, 0, OTHER_VERSION, routed_us=[9])
    assert problems([hand_off_in([old, first, second], "a", second, 5), HAND_OFFS[1]]) == []
    unsealed = hand_off_in([old, second], "a", second, 5)
    assert problems([unsealed, HAND_OFFS[1]]) == ["a claim names no seal"]


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
