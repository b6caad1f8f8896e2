"""The simulator matches a slow reference model of its workers that tracks every block and step."""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import ceil

import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from forebay.engine_model.timing import decode_us, prefill_us
from forebay.simulate.settings import Transfer, policy
from forebay.simulate.simulation import Simulation
from forebay.simulate.transfers import LEASE_US
from forebay.simulate.workload import Turn
from tests.depth import examples
from tests.simulate.scene import Turns, fleet, split, turn

pytestmark = pytest.mark.timeout(300)

BLOCK = 64
PREFILL, FETCH, HERE = "computed for another", "to be fetched", "computed or fetched already"


class Cache:
    """Blocks with their reference counts. Unused blocks are evicted in the order in which they were released."""

    def __init__(self, total: int) -> None:
        self.free = total  # neither used nor cached
        self.users: dict[object, int] = {}
        self.idle: list[object] = []

    def has(self, name: object) -> bool:
        return name in self.users or name in self.idle

    def use(self, name: object) -> None:
        if name in self.idle:
            self.idle.remove(name)
        self.users[name] = self.users.get(name, 0) + 1

    def leave(self, name: object) -> None:
        self.users[name] -= 1
        if not self.users[name]:
            del self.users[name]
            self.idle.append(name)

    def new(self, blocks: int, found: Sequence[object] = ()) -> bool:
        """Reserve `blocks` new blocks and use the `found` ones. Return False and change nothing if space is short."""
        if blocks > self.free + sum(name not in found for name in self.idle):
            return False
        for name in found:
            self.use(name)
        while self.free < blocks:
            self.idle.pop(0)
            self.free += 1
        self.free -= blocks
        return True


class Job:
    """Request at one worker, with the names of its full blocks and its total number of blocks."""

    def __init__(self, request: Turn, stage: str) -> None:
        self.request = request
        self.stage = stage
        self.generated = self.computed = self.blocks = 0
        self.decodes = False
        self.names: list[object] = []
        self.cached = self.first_us = self.last_us = -1
        self.holder: Worker | None = None
        self.prefilled_us = self.moved = self.took_us = 0
        self.prefiller: int | None = None
        self.worker = -1

    @property
    def came(self) -> bool:
        return self.stage == HERE and self.blocks > 0

    def name(self, block: int) -> object:
        if (block + 1) * BLOCK <= self.request.prompt_tokens and self.request.block_ids:
            return self.request.block_ids[: block + 1]
        return "own", self.request.number, block

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.generated


class Worker:
    """FCFS engine. Preempted and fetched requests come before those that wait for KV space."""

    def __init__(self, blocks: int, seqs: int, batched: int) -> None:
        self.total, self.seqs, self.batched = blocks, seqs, batched
        self.cache = Cache(blocks)
        self.running: list[Job] = []
        self.waiting: deque[Job] = deque()
        self.reserved: list[Job] = []  # during a step; fetched after it
        self.crowded = self.busy = False
        self.preempted = 0
        self.sends_us = self.receives_us = 0

    def fetchable(self) -> list[Job]:
        """Return the requests that now have space for their KV."""
        came = sum(one.came for one in self.waiting)
        if self._heads_fetch() and len(self.running) + came < self.seqs:
            self.crowded |= self._room_for_the_next_token()
            while self._may_admit() and self._heads_fetch() and self._reserve():
                pass
        fetched, self.reserved = self.reserved, []
        return fetched

    def step(self, now_us: int) -> tuple[int, list[Job]] | None:
        """Run one iteration. Return its end and the requests prefilled for other workers, or None without work."""
        self.crowded |= self._room_for_the_next_token()
        decoding = [one for one in self.running if one.decodes]
        may_admit = self._may_admit()
        self.crowded = False
        budget = self.batched - len(decoding)
        tokens = fetched_blocks = 0
        done: list[Job] = []
        while budget:
            partial = [one for one in self.running if one not in decoding and one not in done]
            if partial:
                (one,) = partial
                chunk = min(budget, one.known - one.computed)
                if not self._more(one, -(-(one.computed + chunk) // BLOCK) - one.blocks):
                    self._preempt()
                    if decoding:
                        break
                    continue
            elif not may_admit or not self.waiting or len(self.running) >= self.seqs:
                break
            elif self.waiting[0].came:
                one = self.waiting.popleft()
                self.running.append(one)
                done.append(one)
                fetched_blocks += one.blocks
                one.computed += 1
                budget -= 1
                continue
            elif self.waiting[0].stage == FETCH:
                if not self._reserve():
                    break
                continue
            else:
                one = self.waiting[0]
                chunk = self._admit(one, budget)
                if not chunk:
                    break
                self.running.append(self.waiting.popleft())
            budget -= chunk
            tokens += chunk
            self._compute(one, chunk)
            if one.computed == one.known:
                done.append(one)
        held = sum(one.blocks for one in decoding) + fetched_blocks
        lasts_us = prefill_us(tokens) if tokens else 0
        lasts_us += decode_us(held * BLOCK, self.total * BLOCK) if held else 0
        if not lasts_us:
            return None
        for one in decoding:
            self._compute(one, 1)
        for one in [*decoding, *done]:
            self._speak(one, now_us + lasts_us)
        return now_us + lasts_us, [one for one in done if one.stage == PREFILL]

    def come(self, one: Job) -> None:
        """Account for the fetched KV of a prompt: all but its last token is computed."""
        self._compute(one, one.request.prompt_tokens - one.computed)
        one.computed -= 1
        one.stage = HERE
        self.waiting.insert(sum(other.came for other in self.waiting), one)

    def leave(self, one: Job) -> None:
        for name in reversed(one.names):
            self.cache.leave(name)
        self.cache.free += one.blocks - len(one.names)
        one.names, one.blocks, one.computed, one.decodes = [], 0, 0, False

    def _speak(self, one: Job, at_us: int) -> None:
        if one.stage == PREFILL:
            self.running.remove(one)  # keeps its blocks for the transfer
            return
        one.generated += 1
        one.decodes = True
        if one.generated == 1:
            one.first_us = at_us
        if one.generated == one.request.output_tokens:
            one.last_us = at_us
            self.running.remove(one)
            self.leave(one)

    def _may_admit(self) -> bool:
        return not self.crowded or not any(one.decodes for one in self.running)

    def _heads_fetch(self) -> bool:
        rest = [one for one in self.waiting if not one.came]
        return bool(rest) and rest[0].stage == FETCH

    def _room_for_the_next_token(self) -> bool:
        """Make space for the next token of each request. Return whether a request was preempted."""
        before = self.preempted
        for one in [one for one in self.running if one.decodes]:
            while one in self.running and one.blocks * BLOCK < one.known and not self._more(one, 1):
                self._preempt()
        return self.preempted > before

    def _preempt(self) -> None:
        preempted = self.running.pop()
        self.leave(preempted)
        self.waiting.insert(sum(other.came for other in self.waiting), preempted)
        self.preempted += 1

    def _more(self, one: Job, blocks: int) -> bool:
        if not self.cache.new(blocks):
            return False
        one.blocks += blocks
        return True

    def _found(self, one: Job) -> list[object]:
        """Return the cached blocks except the block of the last token, which is always computed or fetched."""
        found: list[object] = []
        while (len(found) + 1) * BLOCK < one.known and self.cache.has(one.name(len(found))):
            found.append(one.name(len(found)))
        return found

    def _reserve(self) -> bool:
        one = next(one for one in self.waiting if not one.came)
        found = self._found(one)
        blocks = -(-one.known // BLOCK)
        if not self.cache.new(blocks - len(found), found):
            return False
        one.names, one.blocks, one.computed = found, blocks, len(found) * BLOCK
        one.moved = (blocks - len(found)) * BLOCK
        self.waiting.remove(one)
        self.reserved.append(one)
        return True

    def _admit(self, one: Job, budget: int) -> int:
        found = self._found(one)
        chunk = min(budget, one.known - len(found) * BLOCK)
        blocks = -(-(len(found) * BLOCK + chunk) // BLOCK)
        if not self.cache.new(blocks - len(found), found):
            return 0
        one.names, one.blocks, one.computed = found, blocks, len(found) * BLOCK
        one.cached = one.computed if one.cached < 0 else one.cached
        return chunk

    def _compute(self, one: Job, tokens: int) -> None:
        one.computed += tokens
        while (len(one.names) + 1) * BLOCK <= one.computed:
            name = one.name(len(one.names))
            self.cache.free += self.cache.has(name)
            self.cache.use(name)
            one.names.append(name)


class Fleet:
    """Prefill and decode workers in round-robin order. Each worker has one link per direction."""

    def __init__(self, prefill: list[Worker], decode: list[Worker], link: Transfer, local_max: int) -> None:
        self.prefill, self.decode, self.link, self.local_max = prefill, decode, link, local_max
        self.jobs: dict[int, Job] = {}  # at the decoding worker, by turn number
        self.longest_us = 0  # longest time that KV was retained
        self._kept: dict[int, Job] = {}
        self._turns = [0, 0]
        self._order = count()
        # Events with equal times: steps of decode workers first, then all others, each in start order.
        self._ends: list[tuple[int, bool, int, Callable[[int], None]]] = []

    def run_reference(self, turns: Sequence[Turn]) -> list[Job]:
        coming = deque(turns)
        while coming or self._ends:
            now_us = min([one.at_us for one in coming] + [end[0] for end in self._ends])
            while self._ends and self._ends[0][0] == now_us:
                heappop(self._ends)[3](now_us)
            while coming and coming[0].at_us == now_us:
                self._arrive(coming.popleft())
            while self._begin(now_us):
                pass
        return [self.jobs[one.number] for one in turns]

    def _at(self, at_us: int, first: bool, action: Callable[[int], None]) -> None:
        heappush(self._ends, (at_us, not first, next(self._order), action))

    def _next(self, pool: int) -> int:
        turn, self._turns[pool] = self._turns[pool], self._turns[pool] + 1
        return turn % len((self.prefill, self.decode)[pool])

    def _arrive(self, request: Turn) -> None:
        if request.prompt_tokens > self.local_max:
            job = Job(request, PREFILL)
            job.worker = self._next(0)
            self.prefill[job.worker].waiting.append(job)
        else:
            job = self.jobs[request.number] = Job(request, HERE)
            job.worker = self._next(1)
            self.decode[job.worker].waiting.append(job)

    def _begin(self, now_us: int) -> bool:
        """Start idle engines. Return whether one started or an instant transfer completed."""
        began = False
        for worker in [one for one in self.prefill if not one.busy]:
            began |= self._step(worker, now_us, first=False)
        idle = [one for one in self.decode if not one.busy]
        for worker in idle:
            for job in worker.fetchable():
                began |= self._fetch(worker, job, now_us)
        for worker in idle:
            began |= self._step(worker, now_us, first=True)
        return began

    def _step(self, worker: Worker, now_us: int, *, first: bool) -> bool:
        step = worker.step(now_us)
        if step is None:
            return False
        worker.busy = True

        def end(now_us: int) -> None:
            worker.busy = False
            for job in step[1]:
                answering = self.jobs[job.request.number] = Job(job.request, FETCH)
                answering.cached, answering.prefilled_us = job.cached, now_us
                answering.prefiller, answering.holder = job.worker, worker
                answering.worker = self._next(1)
                self._kept[job.request.number] = job
                self.decode[answering.worker].waiting.append(answering)

        self._at(step[0], first, end)
        return True

    def _fetch(self, worker: Worker, job: Job, now_us: int) -> bool:
        holder = job.holder
        assert holder is not None
        rate = self.link.kv_transfer_bandwidth * 1_000
        lasts_us = ceil(job.moved * self.link.kv_bytes_per_token / rate) if rate else 0
        free_us = max(now_us + self.link.kv_transfer_latency_us, holder.sends_us, worker.receives_us)
        over_us = holder.sends_us = worker.receives_us = free_us + lasts_us
        job.took_us = over_us - now_us

        def come(now_us: int) -> None:
            worker.come(job)
            holder.leave(self._kept.pop(job.request.number))
            self.longest_us = max(self.longest_us, now_us - job.prefilled_us)

        if over_us == now_us:
            come(now_us)
            return True
        self._at(over_us, False, come)
        return False


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    at_us = 0
    for number in range(draw(st.integers(1, 25))):
        at_us += draw(st.sampled_from([0, 0, 1, 9_000, 200_000, 3_000_000]))
        ids = tuple(draw(st.lists(st.integers(0, 1), max_size=7)))
        prompt = draw(st.integers((len(ids) - 1) * BLOCK + 1, len(ids) * BLOCK)) if ids else draw(st.integers(1, 300))
        output = draw(st.one_of(st.integers(1, 4), st.integers(1, 150)))
        turns.append(turn(number, prompt, output, block_ids=ids, at_us=at_us))
    return tuple(turns)


LINKLESS = Transfer(kv_transfer_bandwidth=0.0)  # transfers take no time
LINKS = st.sampled_from(
    [
        LINKLESS,
        Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.01, kv_transfer_latency_us=137),
        Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.0005),
        Transfer(kv_transfer_bandwidth=0.0, kv_transfer_latency_us=9_000),
    ]
)


# A full prefill worker gets space from a completed fetch in the middle of a long step of another decode worker.
LENGTHS = [
    (149, 22), (43, 4), (439, 3), (139, 1), (37, 3), (179, 4), (207, 4), (385, 1),
    (79, 1), (406, 3), (117, 39), (128, 1), (414, 2), (433, 1), (400, 4), (424, 1),
]  # fmt: skip
FIRST_IDS = {2: (1,), 3: None, 10: (1,), 12: (1,), 13: (0, 1)}  # default 0; None for a unique prompt


def blocked() -> tuple[Turn, ...]:
    turns = []
    for number, (prompt, output) in enumerate(LENGTHS):
        first = FIRST_IDS.get(number, ())
        ids = () if first is None else (*first, *[0] * (-(-prompt // BLOCK) - len(first)))
        turns.append(turn(number, prompt, output, block_ids=ids, at_us=number // 7 and 1))
    return tuple(turns)


@examples(1.5)
@given(
    turns=workloads(),
    blocks=st.sampled_from([10, 14, 20, 60]),
    seqs=st.sampled_from([2, 4, 16]),
    batched=st.integers(16, 600),
)
def test_lone_worker_matches_the_oracle(turns: tuple[Turn, ...], blocks: int, seqs: int, batched: int) -> None:
    worker = Worker(blocks, seqs, batched)
    expected = Fleet([], [worker], LINKLESS, local_max=max(one.prompt_tokens for one in turns)).run_reference(turns)
    event(f"preempted: {worker.preempted > 0}, found: {any(one.cached for one in expected)}")
    sizes = {"kv_blocks": blocks, "max_num_seqs": seqs, "max_num_batched_tokens": batched}
    found = Simulation(fleet(1, sizes=sizes), policy("round-robin")).run(Turns(*turns), lambda _: None)
    assert [(one.first_us, one.last_us, one.cached_tokens) for one in found.requests] == [
        (one.first_us, one.last_us, one.cached) for one in expected
    ]


@examples(1.5)
@example(turns=blocked(), workers=(1, 3), blocks=10, seqs=2, batched=484, link=LINKLESS, local_max=0)
@given(
    turns=workloads(),
    workers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    blocks=st.sampled_from([10, 14, 20, 60]),
    seqs=st.sampled_from([2, 4, 16]),
    batched=st.integers(16, 600),
    link=LINKS,
    local_max=st.sampled_from([0, 0, 150]),
)
def test_disagg_pools_match_the_oracle(
    turns: tuple[Turn, ...],
    workers: tuple[int, int],
    blocks: int,
    seqs: int,
    batched: int,
    link: Transfer,
    local_max: int,
) -> None:
    prefill, decode = ([Worker(blocks, seqs, batched) for _ in range(number)] for number in workers)
    if local_max:  # cached tokens would reduce the prompt length that is compared with local_max
        turns = tuple(Turn(one.number, one.prompt_tokens, one.output_tokens, at_us=one.at_us) for one in turns)
    reference = Fleet(prefill, decode, link, local_max)
    expected = reference.run_reference(turns)
    assume(reference.longest_us < LEASE_US)
    event(f"prefill preempted: {any(one.preempted for one in prefill)}")
    event(f"decode preempted: {any(one.preempted for one in decode)}")
    event(f"found: {any(one.cached for one in expected)}, local: {any(one.prefiller is None for one in expected)}")
    sizes = {"kv_blocks": blocks, "max_num_seqs": seqs, "max_num_batched_tokens": batched}
    router = "round-robin:disagg.policy=always"
    if local_max:
        limits = f"disagg.max_local_prefill_length={local_max},disagg.max_prefill_queue_size=1000000"
        router = f"round-robin:disagg.policy=classic,{limits}"
    found = Simulation(split(*workers, sizes=sizes, transfer=link), policy(router)).run(Turns(*turns), lambda _: None)
    assert [
        (one.prefiller, one.worker, one.cached_tokens, one.prefilled_us, one.transfer_us, one.first_us, one.last_us)
        for one in found.requests
    ] == [
        (one.prefiller, workers[0] + one.worker, one.cached, one.prefilled_us, one.took_us, one.first_us, one.last_us)
        for one in expected
    ]
    assert [one.transferred_bytes for one in found.requests] == [
        one.moved * link.kv_bytes_per_token for one in expected
    ]
