"""Explanations of requests with several stages: remote prefill, KV transfer, encoded images, and tiers of caches."""

from collections.abc import Callable
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console

from forebay.cli.replay.at import facts_table
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.control import DisaggConfig, DisaggregationSet, QueueConfig
from forebay.events.decisions import PrefillPlace
from forebay.events.kv import StoreBlocksAdded
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.progress import (
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OnboardedTokens,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.replay.at import seek
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.timeline import Timeline, saved_us, tokens_by_source
from forebay.replay.explain.wording import place_text
from forebay.replay.moment import pools_of, requests_of
from forebay.replay.states import States
from tests.core.worlds import BLOCK, ENCODED, LEASE_US, MEDIA, PROMPTS, joined, pool, prefill_pool
from tests.replay.recorder import Recorder, disaggregated, ending_of, first_token_of, fleet, words


async def explained(made: Recorder, name: str = "r") -> Explanation:
    """Seal the journal and explain a request."""
    made.seal()
    found = await made.explain(name)
    assert found.divergence is None
    return found


def asked(*prefillers: str, **router: Any) -> Recorder:
    """Return a recorder whose request "r" was sent to a prefill worker."""
    made = disaggregated(*prefillers, **router)
    made.ask("r")
    return made


def report(made: Recorder, *kinds: Any, **fields: Any) -> None:
    """Apply one event after another about "r" from its worker. Kinds of failures have an error."""
    for kind in kinds:
        ending: dict[str, Any] = {"error": "?"} if kind in (RequestFailed, TransferFailed) else {}
        if kind is RequestFinished:
            ending = {"finish_reason": "stop", "output_tokens": 2}
        made.progress("r", kind, **ending, **fields)


def lose_decoders(made: Recorder) -> None:
    for name in "de":
        made.lose(name)


def join_decoder(made: Recorder, after_us: int = 10, **spec: Any) -> None:
    made("fleet", joined("f", 2, role="decode", **spec), after_us)


async def test_all_stages_of_a_remote_prefill_are_explained() -> None:
    made = disaggregated()
    made.stored("q", PROMPTS[0])
    made.ask("r")
    made.progress("r", PrefillFailed, error="no room")
    made.progress("r", PrefillFinished, cached_tokens=4)
    made.progress("r", TransferFailed, error="peer gone")
    made.progress("r", PrefillFinished)
    made.progress("r", FirstTokenEmitted, cached_tokens=33, transferred_bytes=34_000, transfer_us=2_500)
    report(made, RequestFinished)
    found = await explained(made)
    assert words(found) == [
        *("submitted", "routed", "not_prefilled", "routed", "prefilled", "routed", "not_transferred"),
        *("kv_released", "routed", "prefilled", "routed", "first_token", "finished"),
    ]
    stages = [("prefill", 1), ("prefill", 2), ("decode", 1), ("prefill", 3), ("decode", 2)]
    assert [(one.stage, one.attempt) for one in found.routings] == stages
    texts = [moment.text for moment in found.timeline]
    assert texts[1].startswith("prefill sent to q: ")
    assert texts[1].endswith("; prompt computed by a prefill worker: the pool computes every prompt remotely")
    assert texts[2] == "q, attempt 1, could not compute its prompt: no room"
    assert texts[4] == (
        "p computed its prompt: 34 tokens, 4 of them from its cache; it keeps their KV, 34,000 bytes for 0.5 s"
    )
    assert texts[5].startswith("decode sent to ")
    assert "could not fetch its KV: peer gone" in texts[6]
    assert texts[7] == "p releases the KV of attempt 2: it could not be fetched"
    assert texts[-2].endswith(": 33 of 34 prompt tokens not computed here, 34,000 bytes of KV fetched in 2.5 ms")
    (passed_over,) = found.routings[1].left_out
    assert (passed_over.seen.worker_id, passed_over.reasons) == ("q", ("had_it_last",))
    first, decode = first_token_of(found), found.routings[2]
    assert (first.transferred_bytes, first.transfer_us, first.predicted_tokens) == (34_000, 2_500, None)
    assert (decode.overridden, decode.config["overlap_score_credit"]) == ((), 0.0), "the stage's, not the request's"


async def test_parts_of_time_to_first_token() -> None:
    made = disaggregated("p")
    made("control", prefill_pool(queue=QueueConfig(threshold=0.5)))
    made.ask("before")
    made.ask("r", PROMPTS[1])
    made.progress("before", PrefillFinished, after_us=7_000)
    made.progress("r", PrefillFinished, after_us=20_000)
    made.progress("r", TransferFailed, error="peer gone", after_us=3_000)
    made.progress("r", PrefillFailed, error="no room", after_us=4_000)
    made.progress("r", PrefillFinished, after_us=5_000)
    made.progress("r", FirstTokenEmitted, after_us=9_000, transferred_bytes=34_000, transfer_us=2_500)
    first = first_token_of(await explained(made))
    assert first.ttft_us == 48_000
    assert first.parts_us == {"queue": 7_000, "prefill": 29_000, "transfer": 2_500, "decode": 9_500}


async def test_an_unjournalled_first_token_ends_the_parts_at_its_own_time() -> None:
    made = disaggregated("p", "q")
    made.ask("r", at_us=1)
    made.progress("r", PrefillFinished, after_us=20_000)
    made.progress("r", FirstTokenEmitted, after_us=1, at_us=made.world.now_us + 8_000, transfer_us=3_000)
    first = first_token_of(await made.explain("r"))
    assert (first.ttft_us, first.parts_us) == (None, {"prefill": 20_000, "transfer": 3_000, "decode": 5_000})


async def test_time_to_first_token_includes_the_wait_for_a_decode_worker() -> None:
    made = asked("p")
    lose_decoders(made)
    made.progress("r", PrefillFinished, after_us=1_000)
    join_decoder(made, 50_000)
    made.progress("r", FirstTokenEmitted, after_us=2_000)
    first = first_token_of(await explained(made))
    assert first.parts_us == {"prefill": 1_020, "wait": 50_000, "decode": 2_000}


async def test_reason_for_local_prefill() -> None:
    made = asked(disagg=DisaggConfig(policy="classic", max_local_prefill_length=99))
    made("control", DisaggregationSet(model="m", disagg=DisaggConfig(policy="classic", max_local_prefill_length=9)))
    made.query("q", PROMPTS[0])
    found, asked_only = await explained(made), await explained(made, "q")
    where = "prompt computed on the decode worker: only 34 tokens are not cached"
    assert found.timeline[1].text.endswith(where)
    assert found.routings[0].prefill is not None
    assert (found.state, found.routings[0].prefill.prefill_waiting) == ("prefill", 0)
    (would,) = asked_only.routings
    assert (would.stage, would.pool, would.attempt) == ("prefill", "prefillers", 0)
    where = "by a prefill worker: 34 tokens are not cached on the decode worker, which is above the limit"
    assert where in asked_only.timeline[1].text


async def test_reason_for_remote_prefill_of_a_short_prompt() -> None:
    found = await explained(asked(disagg=DisaggConfig(policy="isl_bounding")))
    why = "34 tokens are not cached on the decode worker, a share above the limit"
    assert found.timeline[1].text.endswith(f"prompt computed by a prefill worker: {why}")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"reason": "short_prompt", "uncached_tokens": 0}, "the whole prompt is cached"),
        ({"reason": "short_prompt", "uncached_tokens": 1}, "only 1 token is not cached"),
        ({"reason": "short_prompt", "uncached_tokens": 2}, "only 2 tokens are not cached"),
        (
            {"reason": "prefill_busy", "prefill_waiting": 1},
            "prefill workers are busy; 1 request waits at prefill workers",
        ),
    ],
)
def test_singular_and_plural_in_prefill_reasons(place: dict[str, Any], text: str) -> None:
    assert place_text(PrefillPlace(remote=False, **place)) == f"prompt computed on the decode worker: {text}"


async def test_state_while_kv_is_computed_retained_and_fetched() -> None:
    made = asked("p")
    assert (await explained(made)).state == "remote_prefill"
    lose_decoders(made)
    report(made, PrefillFinished)
    assert (await explained(made)).state == "waiting"
    (facts,) = requests_of(made.world, {})
    assert (facts.phase, facts.kept_by) == ("waiting", "p")
    assert [(one.role, one.disagg is None) for one in pools_of(made.world)] == [("decode", False), ("prefill", True)]
    join_decoder(made)
    assert (await explained(made)).state == "transfer"


async def test_loss_of_the_kv_holder_is_reported_while_waiting() -> None:
    made = asked("p")
    lose_decoders(made)
    report(made, PrefillFinished)
    made.lose("p")
    join_decoder(made)
    found = await explained(made)
    assert words(found)[2:] == ["prefilled", "holder_lost", "routed"]
    assert found.routings[-1].stage == "aggregated"


def too_late(made: Recorder) -> None:
    lose_decoders(made)
    report(made, PrefillFinished)
    made.wait(LEASE_US)
    join_decoder(made)


def decoder_lost(made: Recorder) -> None:
    report(made, PrefillFinished)
    made.lose(made.of("r", FirstTokenEmitted).worker_id)


def begun(made: Recorder) -> None:
    report(made, PrefillFinished)
    report(made, FirstTokenEmitted, unfetched=True)


RELEASED: tuple[tuple[Callable[[Recorder], None], str], ...] = (
    (decoder_lost, "the worker that should fetch it is lost"),
    (lambda made: report(made, PrefillFinished, TransferFailed), "it could not be fetched"),
    (begun, "the response had begun and continued without it"),
    (lambda made: report(made, PrefillFinished, RequestFailed), "the request ended without it"),
    (too_late, "no worker could fetch it before the lease expired"),
    (
        lambda made: report(made, PrefillFinished, model="another"),
        "its descriptor names another worker, epoch or model",
    ),
)


@pytest.mark.parametrize(("step", "why"), RELEASED)
async def test_released_kv_is_explained_with_reason(step: Callable[[Recorder], None], why: str) -> None:
    made = asked("p")
    step(made)
    found = await explained(made)
    (moment,) = [one for one in found.timeline if one.what == "kv_released"]
    assert moment.text == f"p releases the KV of attempt 1: {why}"
    assert moment.counted


def test_timeline_starts_with_an_active_request() -> None:
    made = asked()
    report(made, PrefillFinished)
    for kind, fields, shown in (
        (FirstTokenEmitted, {"at_us": 700}, "first_token"),
        (TransferFailed, {"error": "peer gone"}, "not_transferred"),
    ):
        timeline = Timeline("r", made.world)
        timeline.observe("progress", 9, made.of("r", kind, **fields), 500)
        found = timeline.explanation(diverged=False)
        assert words(found) == ["taken_up", shown]
        assert found.first_token is None or found.first_token.parts_us is None, "what came before is not known"


async def test_wait_for_prefill_workers_is_explained() -> None:
    made = disaggregated("p")
    made("control", prefill_pool(queue=QueueConfig(threshold=0.5)))
    made.ask("r0")
    made.ask("r", PROMPTS[1])
    assert ": p/0, the least loaded rank, has 34 tokens to prefill" in (await explained(made)).timeline[-1].text


async def test_rejection_lists_excluded_prefill_workers() -> None:
    made = disaggregated("p", disagg=DisaggConfig(enforce=True))
    made.lose("p")
    made("fleet", joined("p", 0, pool="prefillers", role="prefill", loras=()))
    made.ask("r", lora_name="x")
    join_decoder(made, loras=("x",))
    made.ask("s", lora_name="x")
    assert [one.seen.worker_id for one in ending_of(await explained(made)).left_out] == ["d", "e"]
    (prefill,) = ending_of(await explained(made, "s")).left_out
    assert (prefill.seen.worker_id, prefill.reasons) == ("p", ("missing_adapter",))


def encoding() -> Recorder:
    """Return a recorder whose request "r" was sent to an encode worker."""
    made = fleet()
    made.encoders("e", "f")
    made.ask("r", PROMPTS[0][:2], media=(MEDIA,))
    return made


async def test_both_stages_of_a_request_with_an_image_are_explained() -> None:
    made = encoding()
    made.progress("r", EncodeFailed, error="out of memory")
    made.progress("r", EncodeFinished, encoded=ENCODED)
    made.progress("r", TransferFailed, error="it is gone")
    made.progress("r", EncodeFinished, encoded=ENCODED, cached=1)
    report(made, FirstTokenEmitted, RequestFinished)
    found = await explained(made)
    assert words(found) == [
        *("submitted", "routed", "not_encoded", "routed", "encoded", "routed"),
        *("not_transferred", "routed", "encoded", "routed", "first_token", "finished"),
    ]
    stages = [("encode", 1), ("encode", 2), ("aggregated", 1), ("encode", 3), ("aggregated", 2)]
    assert [(one.stage, one.attempt) for one in found.routings] == stages
    first, again, *_ = found.routings
    encoder = first.candidates[first.winner].seen.worker_id
    assert (first.pool, first.mode, first.reason) == ("encoders", "least-loaded", "least_loaded")
    assert [(one.seen.worker_id, one.reasons) for one in again.left_out] == [(encoder, ("had_it_last",))]
    texts = [moment.text for moment in found.timeline]
    assert texts[1].startswith(f"encode sent to {encoder}: ")
    assert any("could not encode its images and videos: out of memory" in text for text in texts)
    assert any("could not fetch its embeddings: it is gone" in text for text in texts)
    assert [text.partition(" encoded ")[2] for text in texts if " encoded its " in text] == [
        "its images and videos",
        "its images and videos; the embeddings of 1 were in its cache",
    ]
    assert (first_token_of(found).attempt, found.state) == (2, "finished")


async def test_state_while_an_image_is_encoded() -> None:
    made = encoding()
    assert (await explained(made)).state == "encode"
    made.lose(made.of("r", EncodeFailed, error="").worker_id)
    found = await explained(made)
    assert (found.state, words(found)[-2:]) == ("encode", ["worker_lost", "routed"])


@pytest.mark.parametrize(("make", "state"), [(asked, "remote_prefill"), (encoding, "encode")])
async def test_progress_of_the_wrong_stage_is_ignored(make: Callable[[], Recorder], state: str) -> None:
    made = make()
    report(made, RequestFinished, TransferFailed, FirstTokenEmitted)
    found = await explained(made)
    assert words(found)[2:] == ["outdated"] * 3
    assert not any(moment.counted for moment in found.timeline[2:])
    assert found.state == state


# Prompts whose tokens come from several tiers

LOADS = (OnboardedTokens(tier="host", tokens=8, us=1_500), OnboardedTokens(tier="store", tokens=12, us=4_000))
COSTS = TierCosts(prefill_block_us=2_000.0, tiers=(TierCost(tier="store", fixed_us=100.0, block_us=50.0),))
EVENT = FirstTokenEmitted(request_id="r", attempt=1, worker_id="a", worker_epoch=0, owner_epoch=0)


def tiered(worker: str = "", costs: TierCosts = COSTS) -> Recorder:
    """Workers "a" and "b" of a shared store that has the first prompt; "a" has its first blocks on the device.

    A worker that is named has reported its costs.
    """
    made = Recorder()
    made("control", pool())
    for slot, name in enumerate("ab"):
        made("fleet", joined(name, slot, kv_store="s"))
    made.stored("a", PROMPTS[0][:1])
    made.stored("a", PROMPTS[0][1:3], seq=2, tier="host")
    made("kv-events", StoreBlocksAdded(store="s", worker_id="a", sequence_hashes=pack_u64(PROMPTS[0])))
    if worker:
        measure(made, worker, costs)
    return made


def measure(made: Recorder, worker: str, costs: TierCosts = COSTS) -> None:
    made("metrics", TierCostsMeasured(worker_id=worker, worker_epoch=made.epoch(worker), costs=costs))


def texts_of(found: Explanation) -> dict[str, str]:
    return {entry.what: entry.text for entry in found.timeline}


async def test_sources_durations_and_savings_are_explained() -> None:
    made = tiered("a")
    made.ask("r")
    report(made, FirstTokenEmitted, cached_tokens=24, onboarded=LOADS)
    found = await explained(made)
    first = first_token_of(found)
    assert first.sources == {"device": 4, "host": 8, "store": 12, "computed": 10}
    assert first.loads_us == {"host": 1_500, "store": 4_000}
    assert first.saved_us == 20 // BLOCK * 2_000 - 4_000, "five blocks computed, against the longest load"
    assert texts_of(found)["first_token"] == (
        "first token from a: 24 of 34 prompt tokens were cached, the router expected 4; loaded 8 from host memory in"
        " 1.5 ms, 12 from the shared store in 4.0 ms, 6.0 ms sooner than by computing them"
    )
    (routing,) = found.routings
    seen = {one.seen.worker_id: one.seen for one in routing.candidates}
    overlaps = {name: (one.device_overlap, one.host_overlap, one.store_overlap) for name, one in seen.items()}
    assert overlaps == {"a": (1, 2, 5), "b": (0, 0, 8)}
    assert "1 blocks of the prompt are cached on a and 2 in its host memory and 5 in its shared store" in routing.why


@pytest.mark.parametrize(
    ("worker", "prefill_block_us", "saved_us"),
    [("a", 500.0, -1_500), ("", 0.0, None), ("a", 0.0, None)],
    ids=["slower", "no report", "no prefill"],
)
async def test_savings_are_negative_or_unknown(worker: str, prefill_block_us: float, saved_us: int | None) -> None:
    made = tiered(worker, TierCosts(prefill_block_us=prefill_block_us))
    made.ask("r")
    report(made, FirstTokenEmitted, cached_tokens=24, onboarded=LOADS)
    found = await explained(made)
    assert first_token_of(found).saved_us == saved_us
    assert texts_of(found)["first_token"].endswith("12 from the shared store in 4.0 ms") == (saved_us is None)


async def test_tokens_of_a_remote_prefill_count_as_transferred() -> None:
    made = disaggregated("p")
    measure(made, "p")
    made.ask("r")
    report(made, PrefillFinished, cached_tokens=20, onboarded=LOADS)
    fetched = {"cached_tokens": 33, "transferred_bytes": 17_000, "transfer_us": 2_500}
    report(made, FirstTokenEmitted, onboarded=LOADS[:1], **fetched)
    found = await explained(made)
    texts = texts_of(found)
    assert "20 of them from its cache; loaded 8 from host memory in 1.5 ms, 12 from the shared" in texts["prefilled"]
    assert "store in 4.0 ms, 6.0 ms sooner than by computing them; it keeps" in texts["prefilled"]
    assert texts["first_token"].endswith("in 2.5 ms; loaded 8 from host memory in 1.5 ms")
    assert first_token_of(found).sources == {"device": 8, "host": 8, "transferred": 17, "computed": 1}


def test_reports_that_do_not_add_up_give_no_negative_counts() -> None:
    odd = msgspec.structs.replace(EVENT, cached_tokens=5, onboarded=LOADS)
    for event, prompt_tokens, sources in (
        (odd, 3, {"host": 8, "store": 12}),
        (odd, None, {"host": 8, "store": 12}),
        (EVENT, 3, {"computed": 3}),
    ):
        assert tokens_by_source(event, prompt_tokens, None) == sources
    assert saved_us(World(), "a", 0, LOADS) is None, "the worker left the fleet"


async def test_a_moment_has_stores_and_measured_costs() -> None:
    made = tiered("b")
    made.seal()
    log = await made.log()
    moment = await (await seek(States(log, 0))).moment()
    log.close()
    assert moment.stores == {"s": 8}
    assert [worker.kv_store for worker in moment.workers] == ["s", "s"]
    assert [rank.costs for rank in moment.ranks] == [None, COSTS]
    console = Console(width=100, record=True, file=StringIO())
    console.print(facts_table(moment))
    assert "shared store s  8 blocks" in console.export_text()
