"""Engine runs extracted from a recording: requests by rank, clocks and exclusions."""

from typing import Any

import pytest

from forebay.cli.simulate.engine_runs import AGAIN, NOT_GENERATED, STOPPED, UNFINISHED, EngineRuns, engine_runs
from forebay.events.codec import encode
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled
from forebay.events.topics import DECISIONS
from forebay.ingress.errors import Unusable
from tests.core.worlds import BLOCK, PROMPTS, joined, pool, request
from tests.replay.recorded import MemoryLog
from tests.replay.recorder import Recorder, fleet, report_progress, stored


async def extract_runs(made: Recorder, pool: str = "") -> EngineRuns:
    made.seal()
    log = await made.log()
    try:
        return await engine_runs(log, 0, pool, lambda *_: None)
    finally:
        log.close()


def record_request(made: Recorder, name: str, ttft_us: int, gap_us: int, *, late_us: int = 30, **options: Any) -> int:
    """Record a request, its first token and its third and last token, each reported `late_us` later.

    Returns:
        The time at which the request was dispatched.
    """
    made("requests", request(name, PROMPTS[0], **options))
    sent_us = made.now_us
    for kind, at_us, more in (
        (FirstTokenEmitted, sent_us + ttft_us, {"cached_tokens": BLOCK}),
        (RequestFinished, sent_us + ttft_us + 2 * gap_us, {"finish_reason": "length", "output_tokens": 3}),
    ):
        event = report_progress(made, name, kind, at_us=at_us, **more)
        made("progress", event, after_us=at_us + late_us - made.now_us)
    return sent_us


async def test_worker_times_are_used_if_the_clocks_agree() -> None:
    made = fleet("a")
    sent_us = record_request(made, "r", 1_000, 200)
    runs = await extract_runs(made)
    ((one,), engine) = ([one for run in runs.runs for one in run.requests], runs.runs[0])
    assert (one.routed_us, one.first_us, one.last_us) == (sent_us, sent_us + 1_000, sent_us + 1_400)
    assert (one.prompt_tokens, one.output_tokens, one.cached_tokens, one.left_out) == (
        len(PROMPTS[0]) * BLOCK + 2, 3, BLOCK, "",
    )  # fmt: skip
    assert (runs.engine, runs.lost, runs.clocks_differ, engine.name) == ("mock", 0, False, "a/0")
    assert (engine.config.block_size, engine.config.kv_blocks_total, engine.config.max_num_seqs) == (BLOCK, 64, 8)


@pytest.mark.parametrize("late_us", [-1, 100_000])
async def test_owner_times_are_used_if_the_clocks_contradict(late_us: int) -> None:
    made = fleet("a")
    made("requests", request("r", PROMPTS[0]))
    sent_us = made.now_us
    early = report_progress(made, "r", FirstTokenEmitted, at_us=sent_us - 1 if late_us < 0 else sent_us + late_us)
    made("progress", early, after_us=500)
    done = report_progress(made, "r", RequestFinished, finish_reason="stop", output_tokens=2, at_us=sent_us + 600)
    made("progress", done, after_us=200)
    runs = await extract_runs(made)
    (one,) = runs.runs[0].requests
    assert runs.clocks_differ
    assert (one.first_us, one.last_us) == (sent_us + 500, sent_us + 700)


async def test_excluded_requests_have_a_reason() -> None:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a", tasks=("generate", "embed")))
    record_request(made, "fine", 10, 10)
    made("requests", request("long", PROMPTS[0]))
    made("requests", request("embedded", task="embed"))
    made("progress", report_progress(made, "embedded", RequestFinished, finish_reason="stop"))
    made("requests", request("cancelled"))
    made("requests", RequestCancelled(request_id="cancelled"))
    cancelled_us = made.now_us
    made("requests", request("stopped"))
    made("progress", report_progress(made, "stopped", RequestFinished, finish_reason="cancelled", output_tokens=1))
    made("requests", request("failed"))
    made("progress", report_progress(made, "failed", RequestFailed, error="broken"))
    found = (await extract_runs(made)).runs[0].requests
    reasons = ["", UNFINISHED, NOT_GENERATED, STOPPED, STOPPED, STOPPED]
    assert [one.left_out for one in found] == reasons
    assert found[3].stopped_us == cancelled_us
    assert [bool(one.stopped_us) for one in found] == [False, False, True, True, True, True]
    assert found[1].output_tokens == 2  # as requested


async def test_a_worker_that_rejoins_is_a_new_engine() -> None:
    made = fleet("a", "b")
    made("requests", request("r", PROMPTS[0]))
    one = made.world.requests.get("r")
    assert one is not None
    first = one.worker_id
    epoch = one.worker_epoch
    made("fleet", WorkerLost(owner_epoch=0, worker_id=first, worker_epoch=epoch))
    again = report_progress(made, "r", FirstTokenEmitted, at_us=made.now_us)
    made("progress", again)
    made(
        "progress",
        report_progress(made, "r", RequestFinished, finish_reason="stop", output_tokens=1, at_us=made.now_us),
    )
    made("fleet", joined(first, 0))
    for name in ("s", "t"):
        made("requests", request(name, PROMPTS[2]))
    runs = await extract_runs(made)
    assert runs.lost == 1
    other = "b" if first == "a" else "a"
    assert sorted((run.name, len(run.requests)) for run in runs.runs) == sorted(
        [(f"{first}/0", 1), (f"{first}/0", 1), (f"{other}/0", 2)]
    )
    reasons = {one.left_out for run in runs.runs for one in run.requests}
    assert reasons == {UNFINISHED, AGAIN}


class Slice(MemoryLog):
    """Log without its first records."""

    def __init__(self, made: Recorder, begins: dict[str, int]) -> None:
        super().__init__()
        self._begins = begins
        for draft in made.drafts:
            self.topics.setdefault(draft.topic, []).append(draft.value)
        self.topics[DECISIONS.name] = [encode(DECISIONS, record) for record in made.journal]

    async def begin(self, topic: str, partition: int) -> int:
        return self._begins.get(topic, 0)


async def test_a_slice_starts_with_the_blocks_cached_on_the_device() -> None:
    made = fleet("a")
    record_request(made, "before", 10, 10)
    stored(made, "a", PROMPTS[0])
    stored(made, "a", [77], seq=2, tier="host")
    made.snapshot()
    begins = {**made.world.view, DECISIONS.name: len(made.journal) - 1}
    record_request(made, "r", 10, 10)
    made.seal()
    (run,) = (await engine_runs(Slice(made, begins), 0, "", lambda *_: None)).runs
    assert len(run.requests) == 1
    assert sorted(run.warm) == sorted(PROMPTS[0])
    assert list((await extract_runs(made)).runs[0].warm) == []  # the whole log starts with empty caches


async def test_a_pool_has_to_be_selected_if_workers_differ() -> None:
    made = fleet("a")
    record_request(made, "r", 10, 10)
    made("fleet", joined("b", 1, kv_blocks_total=128))
    for number in range(4):
        record_request(made, f"s{number}", 10, 10)
    with pytest.raises(
        Unusable,
        match=r"workers differ in engine or cache or batch size; choose a pool .*64 blocks of .*128 blocks of",
    ):
        await extract_runs(made)
    with pytest.raises(Unusable, match="no request was routed to a worker of pool 'other'; pools are: default"):
        await extract_runs(made, "other")


async def test_an_empty_log_is_rejected() -> None:
    with pytest.raises(Unusable, match=r"^no request was routed to a worker$"):
        await extract_runs(Recorder())


async def test_sizes_outside_the_engine_model_are_rejected() -> None:
    made = Recorder()
    made("control", pool())
    made("fleet", joined("a", 0, max_num_batched_tokens=4))
    record_request(made, "r", 10, 10)
    with pytest.raises(Unusable, match=r"worker a .*max_num_batched_tokens"):
        await extract_runs(made)


async def test_a_diverging_log_is_rejected() -> None:
    made = fleet("a", "b")
    record_request(made, "r", 10, 10)
    made.journal.pop(1)
    with pytest.raises(Unusable, match=r"history diverges at journal offset 1.*replay verify"):
        await extract_runs(made)
