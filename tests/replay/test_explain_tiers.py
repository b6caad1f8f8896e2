"""Explanations of prompts whose tokens come from several tiers: sources, durations, and what loading saved."""

from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from forebay.cli.replay.at_view import facts_table
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.kv import StoreBlocksAdded
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, PrefillFinished, RequestFinished
from forebay.replay.at import seek
from forebay.replay.explain.timeline import saved_us, tokens_by_source
from tests.core.worlds import BLOCK, PROMPTS, joined, pool, request
from tests.replay.recorder import Recorder, disaggregated, first_token_of

LOADS = (OnboardedTokens(tier="host", tokens=8, us=1_500), OnboardedTokens(tier="store", tokens=12, us=4_000))
COSTS = TierCosts(prefill_block_us=2_000.0, tiers=(TierCost(tier="store", fixed_us=100.0, block_us=50.0),))
EVENT = FirstTokenEmitted(request_id="r", attempt=1, worker_id="a", worker_epoch=0, owner_epoch=0)


def recorded(**router: Any) -> Recorder:
    """Workers "a" and "b" of a shared store that has the first prompt; "a" has its first blocks on the device."""
    made = Recorder()
    made("control", pool(**router))
    for slot, name in enumerate("ab"):
        made("fleet", joined(name, slot, kv_store="s"))
    made.stored("a", PROMPTS[0][:1])
    made.stored("a", PROMPTS[0][1:3], seq=2, tier="host")
    made("kv-events", StoreBlocksAdded(store="s", worker_id="a", sequence_hashes=pack_u64(PROMPTS[0])))
    return made


def measure(made: Recorder, worker: str, costs: TierCosts = COSTS) -> None:
    made("metrics", TierCostsMeasured(worker_id=worker, worker_epoch=made.epoch(worker), costs=costs))


async def test_sources_durations_and_savings_are_explained() -> None:
    made = recorded()
    measure(made, "a")
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", FirstTokenEmitted, cached_tokens=24, onboarded=LOADS)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=1)
    made.seal()
    explanation = await made.explain("r")
    assert explanation.divergence is None
    first = first_token_of(explanation)
    assert first.sources == {"device": 4, "host": 8, "store": 12, "computed": 10}
    assert first.loads_us == {"host": 1_500, "store": 4_000}
    assert first.saved_us == 20 // BLOCK * 2_000 - 4_000, "five blocks computed, against the longest load"
    (text,) = [entry.text for entry in explanation.timeline if entry.what == "first_token"]
    assert text == (
        "first token from a: 24 of 34 prompt tokens were cached, the router expected 4; loaded 8 from host memory in"
        " 1.5 ms, 12 from the shared store in 4.0 ms, 6.0 ms sooner than by computing them"
    )
    (routing,) = explanation.routings
    seen = {one.seen.worker_id: one.seen for one in routing.candidates}
    assert (seen["a"].device_overlap, seen["a"].host_overlap, seen["a"].store_overlap) == (1, 2, 5)
    assert (seen["b"].device_overlap, seen["b"].host_overlap, seen["b"].store_overlap) == (0, 0, 8)
    assert "1 blocks of the prompt are cached on a and 2 in its host memory and 5 in its shared store" in routing.why


@pytest.mark.parametrize(
    ("costs", "saved_us"),
    [(TierCosts(prefill_block_us=500.0), -1_500), (None, None), (TierCosts(prefill_block_us=0.0), None)],
    ids=["slower", "no report", "no prefill"],
)
async def test_savings_are_negative_or_unknown(costs: TierCosts | None, saved_us: int | None) -> None:
    made = recorded()
    if costs is not None:
        measure(made, "a", costs)
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", FirstTokenEmitted, cached_tokens=24, onboarded=LOADS)
    made.seal()
    explanation = await made.explain("r")
    assert first_token_of(explanation).saved_us == saved_us
    (text,) = [entry.text for entry in explanation.timeline if entry.what == "first_token"]
    assert text.endswith("12 from the shared store in 4.0 ms") == (saved_us is None)


async def test_tokens_of_a_remote_prefill_count_as_transferred() -> None:
    made = disaggregated("p")
    measure(made, "p")
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", PrefillFinished, cached_tokens=20, onboarded=LOADS)
    fetched = {"cached_tokens": 33, "transferred_bytes": 17_000, "transfer_us": 2_500}
    made.progress("r", FirstTokenEmitted, onboarded=LOADS[:1], **fetched)
    made.seal()
    explanation = await made.explain("r")
    texts = {entry.what: entry.text for entry in explanation.timeline}
    assert "20 of them from its cache; loaded 8 from host memory in 1.5 ms, 12 from the shared" in texts["prefilled"]
    assert "store in 4.0 ms, 6.0 ms sooner than by computing them; it keeps" in texts["prefilled"]
    assert texts["first_token"].endswith("in 2.5 ms; loaded 8 from host memory in 1.5 ms")
    sources = {"device": 8, "host": 8, "transferred": 17, "computed": 1}
    assert first_token_of(explanation).sources == sources


def test_reports_that_do_not_add_up_give_no_negative_counts() -> None:
    odd = msgspec.structs.replace(EVENT, cached_tokens=5, onboarded=LOADS)
    assert tokens_by_source(odd, 3, None) == {"host": 8, "store": 12}
    assert tokens_by_source(odd, None, None) == {"host": 8, "store": 12}
    assert tokens_by_source(EVENT, 3, None) == {"computed": 3}
    assert saved_us(World(), "a", 0, LOADS) is None, "the worker left the fleet"


async def test_a_moment_has_stores_and_measured_costs() -> None:
    made = recorded()
    measure(made, "b")
    made.seal()
    log = await made.log()
    moment = await (await seek(log, 0)).moment()
    log.close()
    assert moment.stores == {"s": 8}
    assert [worker.kv_store for worker in moment.workers] == ["s", "s"]
    assert [rank.costs for rank in moment.ranks] == [None, COSTS]
    console = Console(width=100, record=True, file=StringIO())
    console.print(facts_table(moment))
    assert "shared store s  8 blocks" in console.export_text()
