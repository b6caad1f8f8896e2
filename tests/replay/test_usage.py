"""What requests are charged, by the fold of a journal, compared with the derived state of the owner."""

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, ConsumedRun, OwnerClaimed, RequestRejected, SnapshotTaken
from forebay.events.progress import FirstTokenEmitted, OutputGrown, PrefillFinished, RequestFailed, RequestFinished
from forebay.events.rendering import Rendering
from forebay.events.requests import RequestCancelled, RequestResumed
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS
from forebay.events.usage import UsageEntry
from forebay.events.versions import EVENTS_VERSION
from forebay.journal.folds import begin_of, is_readable
from forebay.journal.reader import read_whole
from forebay.journal.records import JournalBroken, UnreadableDecision
from forebay.journal.usage import HOUR_US, RESPONSE_STAGES, UsageReader, derive
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, request
from tests.replay.owner_histories import dense_history, log_with, owner_histories, played
from tests.replay.recorder import Recorder, disaggregated, fleet

SUMS = ("requests", "incomplete", "prompt_tokens", "output_tokens")
Place = tuple[int, str, int]  # attempt, worker and its epoch
DENSE = [dense_history(seed, 400) for seed in range(3)]
LONG: dict[str, Any] = {"timeout_us": 20 * HOUR_US}


def sums(entries: Sequence[UsageEntry]) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in entries:
        found.update({name: getattr(entry, name) for name in SUMS})
    return found


async def derived_sums(log: SqliteLog) -> Counter[str]:
    """Return the sums that follow from the states of the owner."""
    reader = await read_whole(log, 0)
    world, found = reader.world, Counter[str](dict.fromkeys(SUMS, 0))
    active: dict[str, int] = {}
    shown: Counter[str] = Counter()
    complete: set[str] = set()
    decoding: dict[str, Place] = {}
    places: dict[str, Place] = {}  # where the response of each request is, or was until its worker was lost

    def on_applied(_: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        nonlocal active, places
        now = {one.submitted.request_id: one.submitted.prompt_tokens for one in world.requests.active()}
        if isinstance(event, FirstTokenEmitted | OutputGrown):
            name, place = event.request_id, (event.attempt, event.worker_id, event.worker_epoch)
            if isinstance(event, FirstTokenEmitted) and places.get(name) == place:
                decoding[name] = place
            if name in active and places.get(name) == decoding.get(name) == place:
                shown[name] = max(shown[name], getattr(event, "output_tokens", 1))
        if isinstance(event, RequestCancelled) and event.is_complete and event.request_id in active:
            complete.add(event.request_id)
        for name in active.keys() - now.keys():
            finished = event if isinstance(event, RequestFinished) and event.request_id == name else None
            found["requests"] += 1
            found["incomplete"] += finished is None and name not in complete
            found["output_tokens"] += shown[name] if finished is None else finished.output_tokens
            if finished is not None or shown[name]:
                found["prompt_tokens"] += active[name]
            del shown[name]
            complete.discard(name)
            decoding.pop(name, None)
        active = now
        places = {
            one.submitted.request_id: (one.stage_attempt, one.worker_id, one.worker_epoch)
            for one in world.requests.active()
            if one.stage in RESPONSE_STAGES and one.was_dispatched
        }

    reader.followed.on_applied = on_applied
    async for step in reader:
        assert step.divergence is None
    return found


async def in_pieces(log: SqliteLog, cuts: Sequence[int]) -> list[UsageEntry]:
    """Return the usage of a journal, read by a new reader after each of these offsets."""
    begin, at, found = await begin_of(log, 0), 0, list[UsageEntry]()
    for cut in [*sorted(cuts), await log.end(DECISIONS.name, 0)]:
        reader = UsageReader(log, 0, begin, at)
        await reader.read(cut)
        found += reader.take()
        begin, at = reader.next_begin(), reader.position
    return found


@given(owner_histories, st.lists(st.integers(0, 150), max_size=4))
async def test_the_fold_agrees_with_the_owner_however_often_it_is_restarted(
    history: list[tuple[str, Any]], cuts: list[int]
) -> None:
    await check_history(history, cuts)


@pytest.mark.parametrize("history", DENSE)
async def test_the_fold_agrees_with_the_owner_in_dense_histories(history: list[tuple[str, Any]]) -> None:
    await check_history(history, range(0, 400, 7))


async def check_history(history: list[tuple[str, Any]], cuts: Sequence[int]) -> None:
    with closing(await log_with(played(history))) as log:
        expected, end = await derived_sums(log), await log.end(DECISIONS.name, 0)
        assert sums(await derive(log, 0)) == expected
        assert sums(await in_pieces(log, [min(cut, end) for cut in cuts])) == expected


async def entries_of(made: Recorder) -> list[UsageEntry]:
    made.seal()
    with closing(await made.log()) as log:
        return list(await derive(log, 0))


async def entry_of(made: Recorder) -> UsageEntry:
    (entry,) = await entries_of(made)
    return entry


async def test_a_request_is_charged_with_its_tokens_and_times() -> None:
    made = fleet()
    made.ask("r", tenant="acme", key_id="k1")
    made.progress("r", FirstTokenEmitted, 500, cached_tokens=16)
    made.progress("r", RequestFinished, 700, finish_reason="stop", output_tokens=9, cached_tokens=20)
    tokens = request("r", PROMPTS[0]).prompt_tokens
    assert await entry_of(made) == UsageEntry(
        hour_us=0,
        tenant="acme",
        key_id="k1",
        model="m",
        requests=1,
        prompt_tokens=tokens,
        cached_tokens=20,
        output_tokens=9,
        prefill_us=500,
        decode_us=700,
    )


async def test_tenants_keys_and_hours_are_separate() -> None:
    made = fleet()
    made.ask("a", **LONG)
    made.ask("b", tenant="acme", **LONG)
    made.ask("c", tenant="acme", key_id="k", **LONG)
    made.progress("a", RequestFinished, finish_reason="stop", output_tokens=1)
    last_us = HOUR_US - 1 - made.world.now_us
    made.progress("b", RequestFinished, last_us, finish_reason="stop", output_tokens=2)
    made.progress("c", RequestFinished, 1, finish_reason="stop", output_tokens=4)
    found = {(one.hour_us, one.tenant, one.key_id): one.output_tokens for one in await entries_of(made)}
    assert found == {(0, "", ""): 1, (0, "acme", ""): 2, (HOUR_US, "acme", "k"): 4}


async def test_a_request_without_a_token_is_counted_but_charged_no_tokens() -> None:
    made = fleet("a")
    made.ask("r")
    made.lose("a")
    made("requests", RequestCancelled(request_id="r"), 100)
    entry = await entry_of(made)
    assert (entry.requests, entry.incomplete, entry.prompt_tokens, entry.output_tokens) == (1, 1, 0, 0)
    assert (entry.queue_us, entry.prefill_us, entry.decode_us) == (0, 110, 0)


async def test_requests_that_were_never_accepted_are_not_counted() -> None:
    made = fleet()
    assert isinstance(made.ask("other", model="another"), RequestRejected)
    made.ask("r", idempotency_key=7)
    assert isinstance(made.ask("r", nonce=5), RequestRejected), "a duplicate id does not end the first request"
    made("requests", request("r", PROMPTS[0], idempotency_key=7))
    made.ask("repeated", idempotency_key=7)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=3)
    made("requests", request("r", PROMPTS[0], idempotency_key=7))
    made.ask("s")
    made.progress("s", RequestFailed, error="no memory")
    entry = await entry_of(made)
    assert (entry.requests, entry.incomplete, entry.output_tokens) == (2, 1, 3)


async def test_a_retried_request_is_charged_once() -> None:
    made = fleet("a", "b")
    made.ask("r")
    first = made.of("r", RequestFinished, finish_reason="stop", output_tokens=5)
    made.progress("r", FirstTokenEmitted, cached_tokens=3)
    made.lose(first.worker_id)
    made.progress("r", FirstTokenEmitted, cached_tokens=6)
    made("progress", first)
    made.take_over("second")
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=9, cached_tokens=6)
    made("progress", first)
    entry = await entry_of(made)
    assert (entry.requests, entry.incomplete, entry.output_tokens, entry.cached_tokens) == (1, 0, 9, 6)


async def test_a_prompt_computed_by_a_prefill_worker_is_charged_with_the_response() -> None:
    made = disaggregated()
    made.ask("r")
    made.progress("r", PrefillFinished)
    made.progress("r", FirstTokenEmitted, cached_tokens=1)
    made.progress("r", RequestFinished, finish_reason="stop", output_tokens=4)
    entry = await entry_of(made)
    assert (entry.requests, entry.prompt_tokens, entry.output_tokens) == (1, request("r", PROMPTS[0]).prompt_tokens, 4)


async def test_choices_count_their_prompt_once_and_a_stop_string_completes_a_response() -> None:
    made = fleet()
    for number in range(3):
        made.ask(f"r-{number}", shares_prompt=number > 0)
        made.progress(f"r-{number}", FirstTokenEmitted, cached_tokens=2)
        made("requests", RequestCancelled(request_id=f"r-{number}", is_complete=True, output_tokens=4))
    entry = await entry_of(made)
    tokens = request("r", PROMPTS[0]).prompt_tokens
    assert (entry.requests, entry.incomplete, entry.prompt_tokens, entry.output_tokens) == (3, 0, tokens, 12)
    assert entry.cached_tokens == 2


@pytest.mark.parametrize(
    ("passed", "output_tokens"),
    [([], 5), ([None], 5), ([7], 7), ([2], 2), ([3, 7, 4], 7), ([0], 0)],
)
async def test_a_client_that_leaves_is_charged_what_it_got(passed: list[int | None], output_tokens: int) -> None:
    made = fleet()
    made.ask("r", ingress_incarnation="0")
    made.progress("r", FirstTokenEmitted, cached_tokens=100_000)
    made.progress("r", OutputGrown, output_tokens=5)
    for number in range(1, len(passed)):
        made("requests", RequestResumed(request_id="r", ingress_incarnation=str(number)))
    for number, tokens in enumerate(passed):
        made("requests", RequestCancelled(request_id="r", output_tokens=tokens, ingress_incarnation=str(number)))
    made.wait(2_000_000)  # the deadline passes
    entry = await entry_of(made)
    assert (entry.requests, entry.incomplete, entry.output_tokens) == (1, 1, output_tokens)
    prompt_tokens = request("r", PROMPTS[0]).prompt_tokens if output_tokens else 0
    assert entry.cached_tokens == entry.prompt_tokens == prompt_tokens


@pytest.mark.parametrize(
    ("stream", "how", "charged"),
    [(False, "failed", 0), (False, "cancelled", 1), (True, "failed", 1), (True, "cancelled", 1), (None, "failed", 1)],
)
async def test_an_incomplete_response_costs_what_a_client_may_have_read(
    stream: bool | None, how: str, charged: int
) -> None:
    made = fleet()
    rendering = None if stream is None else Rendering(api="completions", model="m", created_s=0, stream=stream)
    made.ask("r", rendering=rendering)
    made.progress("r", FirstTokenEmitted)
    if how == "failed":
        made.progress("r", RequestFailed, error="no memory")
    else:
        made.cancel()
    entry = await entry_of(made)
    assert (entry.requests, entry.incomplete) == (1, 1)
    assert entry.prompt_tokens == charged * request("r", PROMPTS[0]).prompt_tokens
    assert entry.output_tokens == charged


async def test_a_client_that_read_at_two_ingresses_and_cancelled_pays_for_all_tokens() -> None:
    made = fleet()
    made.ask("r", ingress_incarnation="0", rendering=Rendering(api="completions", model="m", created_s=0, stream=True))
    made.progress("r", FirstTokenEmitted)
    made("requests", RequestResumed(request_id="r", ingress_incarnation="1"))
    made("requests", RequestCancelled(request_id="r", output_tokens=1, ingress_incarnation="0"))
    made.progress("r", OutputGrown, output_tokens=500)
    made("requests", RequestCancelled(request_id="r", reason="cancelled by a client"))
    assert (await entry_of(made)).output_tokens == 500


def snapshots(*, then: int) -> Recorder:
    """Return a history with a request before a snapshot, one around it, and `then` requests after it."""
    made = fleet()
    made.ask("before")
    made.progress("before", RequestFinished, finish_reason="stop", output_tokens=1)
    made.ask("around")
    made.snapshot()
    made.progress("around", RequestFinished, finish_reason="stop", output_tokens=2)
    for number in range(then):
        made.ask(f"after-{number}")
        made.progress(f"after-{number}", RequestFinished, finish_reason="stop", output_tokens=4)
    made.seal()
    return made


async def test_a_log_without_its_beginning_is_read_from_its_oldest_snapshot() -> None:
    made = snapshots(then=2)
    with closing(await made.log()) as log:
        at_first = await begin_of(log, 0)
        log.trim(DECISIONS.name, 0, made.journal.index(made.journal[-1]) - 4, 100)
        assert not await is_readable(log, 0, at_first)
        begin = await begin_of(log, 0)
        assert await is_readable(log, 0, begin)
        assert begin.requests_offset == 2
        (entry,) = await derive(log, 0)
    assert (entry.requests, entry.output_tokens) == (2, 8), "a request in flight at the snapshot is unknown"


async def test_a_request_that_ended_before_a_loss_is_not_charged_again() -> None:
    made = snapshots(then=1)
    taken = next(offset for offset, one in enumerate(made.journal) if isinstance(one, SnapshotTaken))
    end = len(made.journal)
    log = await made.log()
    again = snapshots(then=0)  # the same history up to the snapshot, from which the next owner continues
    again.journal = made.journal[:end]
    claimed = OwnerClaimed(owner_id="second", core_version=CORE_VERSION, events_version=EVENTS_VERSION, snapshot=taken)
    runs = tuple(ConsumedRun(topic=name, count=2, now_us=made.now_us + 1) for name in (REQUESTS.name, PROGRESS.name))
    advanced = Advanced(owner_epoch=end, seq=90, consumed=runs[1:], digest="0" * 16)
    with closing(log):
        await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, one)) for one in (claimed, advanced)])
        (entry,) = await derive(log, 0)
        assert sums(await in_pieces(log, [end, end + 1])) == sums([entry])
    assert (entry.requests, entry.output_tokens) == (3, 7)


async def test_lost_and_unreadable_records_are_named() -> None:
    made = snapshots(then=1)
    del made.journal[3]
    lost = pytest.raises(JournalBroken, match="the log lost 1 journal records before offset 3")
    with closing(await made.log()) as log, lost:
        await derive(log, 0)
    made = snapshots(then=0)
    values = [draft.value for draft in made.journal_drafts()]
    with closing(SqliteLog.open(None)) as log:
        await log.append(made.drafts)
        for number, value in enumerate(values):
            changed = value.replace(b'"request.routed"', b'"request.newer"') if number == 1 else value
            await log.append([Draft(DECISIONS.name, 0, changed)])
        with pytest.raises(UnreadableDecision, match=r"request\.newer"):
            await derive(log, 0)
