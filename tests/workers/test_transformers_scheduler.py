"""What the transformers engine computes and where: with a runner whose keys and values are the tokens themselves."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.engine_model.model import EngineConfig, Removed, Stored
from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.events.tokens import TokenLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import Cleared, EngineBatch
from forebay.workers.engines.transformers.scheduler import WAITING_MAX, Row, Scheduler
from tests.workers.conftest import work_item

VOCABULARY = 50
CONTEXT = 60
STOP = 7
BLOCK = 4
STEPS_MAX = 5_000


class FakeRunner:
    """The next token is a hash of what lies in the blocks: a block in the wrong place says something else."""

    vocabulary_size = VOCABULARY
    context_tokens = CONTEXT

    def __init__(self, blocks: int) -> None:
        self._slots = [-1] * (blocks * BLOCK)
        self.computed: list[int] = []  # tokens of each pass

    def prefill(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> list[int]:
        self.computed.append(len(tokens))
        return self._through(tokens, first, places)

    def decode(self, rows: Sequence[Row]) -> list[list[int]]:
        self.computed.append(len(rows))
        return [self._through([row.token], row.position, row.places) for row in rows]

    def hidden_sum(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> int:
        seen = self._through(tokens, first, places)
        return sum(seen[first:])

    def embedding(self, hidden_sum: int, tokens: int) -> bytes:
        return pack_u32([hidden_sum, tokens])

    def sampler(self, sampling: Sampling, prompt_tokens: int) -> "FakeSampler":
        if sampling.top_p > 1:
            raise ValueError("top_p is too large")
        return FakeSampler(sampling, prompt_tokens)

    def stop_tokens(self, sampling: Sampling) -> frozenset[int]:
        return frozenset() if sampling.ignore_eos else frozenset([STOP])

    def _through(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> list[int]:
        slots = [places[at // BLOCK] * BLOCK + at % BLOCK for at in range(first + len(tokens))]
        for at, token in enumerate(tokens, first):
            self._slots[slots[at]] = token
        return [self._slots[slot] for slot in slots]


class FakeSampler:
    def __init__(self, sampling: Sampling, prompt_tokens: int) -> None:
        self._sampling = sampling
        self._prompt_tokens = prompt_tokens

    def __call__(self, tokens: Sequence[int], logits: Any) -> tuple[int, TokenLogprob | None]:
        assert list(logits) == list(tokens), "these keys and values are of other tokens"
        if self._sampling.min_p:
            raise ValueError("the model's logits are not numbers")
        return following(tokens), None if self._sampling.logprobs is None else TokenLogprob(logprob=-1.0)


def following(tokens: Sequence[int]) -> int:
    return xxh3_64_intdigest(pack_u32(tokens)) % VOCABULARY


def answer(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(following(tokens))
        if tokens[-1] == STOP and not ignore_eos:
            break
    return tokens[len(prompt) :]


class Told:
    """What the batches of a scheduler said, checked as they come."""

    def __init__(self, **changes: int) -> None:
        sizes: dict[str, Any] = {
            "block_size": BLOCK,
            "kv_blocks_total": 16,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 6,
        }
        self.config = EngineConfig(vocabulary=None, **{**sizes, **changes})
        self.runner = FakeRunner(self.config.kv_blocks_total)
        self.scheduler = Scheduler(self.runner, self.config, 5)
        self.batches: list[EngineBatch] = []
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, tuple[int, str, str]] = {}
        self.held: set[int] = set()

    def step(self) -> EngineBatch | None:
        batch = self.scheduler.step()
        if batch is not None:
            assert batch.rank == 5
            self.batches.append(batch)
            self._take(batch)
        return batch

    def finish(self) -> None:
        for _ in range(STEPS_MAX):
            self.step()
            if not self.scheduler.busy:
                break
        else:
            raise AssertionError("the scheduler does not come to an end")
        assert self.step() is None
        assert all(batch.load == self.scheduler.load() for batch in self.batches[-1:])
        assert self.scheduler.load().kv_blocks_used == 0

    def ask(self, name: str, prompt: Sequence[int], max_tokens: int = 4, **changes: Any) -> WorkItem:
        item = work_item(name, list(prompt), max_tokens, **changes)
        self.scheduler.submit(item)
        return item

    def announced(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt whose blocks were announced."""
        found = 0
        for block in unpack_u64(sequence_hashes(pack_u32(prompt), BLOCK))[: (len(prompt) - 1) // BLOCK]:
            if block not in self.held:
                break
            found += BLOCK
        return found

    def _take(self, batch: EngineBatch) -> None:
        for change in batch.cache_changes:
            match change:
                case Stored(parent=parent, hashes=hashes):
                    assert parent is None or parent in self.held
                    assert self.held.isdisjoint(hashes)
                    self.held.update(hashes)
                case Removed(hashes=hashes):
                    assert self.held.issuperset(hashes)
                    self.held.difference_update(hashes)
                case Cleared():
                    self.held.clear()
        assert len(self.held) <= self.config.kv_blocks_total
        assert len({chunk.request_id for chunk in batch.emitted}) == len(batch.emitted)
        for chunk in batch.emitted:
            said = self.tokens.setdefault(chunk.request_id, [])
            assert chunk.first_index == len(said)
            said += unpack_u32(chunk.token_ids)
        for first in batch.first_tokens:
            assert self.tokens[first.request_id]
            self.cached[first.request_id] = first.cached_tokens
        for end in batch.finished:
            assert end.output_tokens == len(self.tokens.get(end.request_id, []))
            self.reasons[end.request_id] = end.reason
        for failed in batch.failed:
            self.errors[failed.request_id] = (failed.error.status, failed.error.code, failed.error.message)


PROMPTS = st.builds(
    lambda head, tail: [*([1, 2, 3] * 6)[:head], *tail],
    st.integers(0, 18),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
)
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), PROMPTS, st.integers(1, 20)),
    st.tuples(st.just("step"), st.integers(1, 8)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("embed"), PROMPTS),
)


@settings(max_examples=200, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=25), blocks=st.integers(13, 40), budget=st.integers(3, 40))
def test_whatever_happens_around_it_a_request_gets_its_answer(
    actions: list[tuple[Any, ...]], blocks: int, budget: int
) -> None:
    told = Told(kv_blocks_total=blocks, max_num_batched_tokens=budget)
    expected: dict[str, list[int]] = {}
    vectors: dict[str, bytes] = {}
    cancelled = set()
    for action in actions:
        name = f"r{len(expected) + len(vectors)}"
        match action:
            case ("ask", prompt, max_tokens):
                told.ask(name, prompt, max_tokens)
                expected[name] = answer(prompt, max_tokens)
            case ("embed", prompt):
                told.ask(name, prompt, task="embed")
                vectors[name] = pack_u32([sum(prompt), len(prompt)])
            case ("step", steps):
                for _ in range(steps):
                    told.step()
            case ("cancel", number):
                told.scheduler.cancel(f"r{number}")
                if f"r{number}" in {*expected, *vectors} - told.reasons.keys():
                    cancelled.add(f"r{number}")
            case ("clear",):
                told.scheduler.clear()
                told.step()
    told.finish()
    assert told.errors == {}
    assert told.reasons.keys() == {*expected, *vectors} - cancelled
    assert {name: told.tokens[name] for name in expected.keys() - cancelled} == {
        name: tokens for name, tokens in expected.items() if name not in cancelled
    }
    found = {vector.request_id: vector.packed for batch in told.batches for vector in batch.vectors}
    assert found == {name: packed for name, packed in vectors.items() if name not in cancelled}
    # What was announced, and nothing else, is found again.
    for action in actions:
        if action[0] == "ask":
            announced = told.announced(action[1])
            told.ask("again", action[1], 1)
            told.finish()
            assert told.cached["again"] == announced
            told.tokens.clear()


def test_requests_interleave_and_a_long_prompt_takes_turns_with_those_that_speak() -> None:
    told = Told(kv_blocks_total=40, max_num_batched_tokens=6)
    told.ask("short", [1], 12)
    told.step()
    told.ask("long", range(2, 32), 3)
    said = []
    while "long" not in told.tokens:
        told.step()
        said.append(len(told.tokens["short"]))
    assert said == [2, 3, 4, 5, 6, 7], "one token each step, while the prompt goes on by five"
    assert told.runner.computed == [1, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5]
    told.finish()
    assert told.runner.computed[13:15] == [2, 2], "both decode in one pass"


def test_a_shared_prefix_is_computed_once_and_output_is_cached_too() -> None:
    told = Told(kv_blocks_total=40)
    prompt = list(range(10, 20))
    told.ask("first", prompt, 8, sampling=Sampling(max_tokens=8, ignore_eos=True))
    told.finish()
    first = sum(told.runner.computed)
    assert told.cached["first"] == 0
    told.ask("same", prompt, 1)
    told.ask("goes on", [*prompt, *told.tokens["first"], 1], 1)
    told.finish()
    assert (told.cached["same"], told.cached["goes on"]) == (8, 16)
    assert sum(told.runner.computed) - first == 2 + 3


def test_tenants_share_nothing() -> None:
    told = Told()
    prompt = list(range(10, 20))
    salted = sequence_hashes(pack_u32(prompt), BLOCK, hash_seed("", "tenant"))
    ignore = Sampling(max_tokens=4, ignore_eos=True)
    for name in ("a", "b"):
        told.ask(name, prompt, sequence_hashes=salted, cache_namespace="tenant", sampling=ignore)
        told.finish()
    told.ask("c", prompt, sampling=ignore)
    told.finish()
    assert [told.cached[name] for name in "abc"] == [0, 8, 0]
    # The block that the output completed has the tenant's seed as well.
    whole = [*prompt, *told.tokens["a"]]
    assert told.held.issuperset(unpack_u64(sequence_hashes(pack_u32(whole[:12]), BLOCK, hash_seed("", "tenant"))))


def test_when_blocks_run_out_the_newest_waits_and_nothing_is_said_twice() -> None:
    told = Told(kv_blocks_total=6, max_num_seqs=2, max_num_batched_tokens=40)
    prompts = {name: [ord(name[0]) % 50, 1, 2, 3, 4, 5, 6, 8] for name in ("old", "new", "third")}
    for name, prompt in prompts.items():
        told.ask(name, prompt, 12, sampling=Sampling(max_tokens=12, ignore_eos=True))
    waiting = []
    while told.scheduler.busy:
        told.step()
        waiting.append(told.scheduler.load().waiting)
    assert waiting[0] == 1
    assert 2 in waiting, "nobody was preempted"
    assert list(told.reasons) == ["old", "new", "third"], "the one that was preempted comes before those behind it"
    assert told.tokens == {name: answer(prompt, 12, ignore_eos=True) for name, prompt in prompts.items()}
    assert told.cached == {"old": 0, "new": 0, "third": 0}
    assert any(isinstance(change, Removed) for batch in told.batches for change in batch.cache_changes)


def test_a_request_ends_at_a_stop_token_or_at_its_length() -> None:
    told = Told(kv_blocks_total=40)
    prompt = next([n, n] for n in range(50) if STOP in answer([n, n], 30))
    told.ask("stops", prompt, 30)
    told.ask("goes on", prompt, 30, sampling=Sampling(max_tokens=30, ignore_eos=True, logprobs=0))
    told.finish()
    assert (told.reasons["stops"], told.tokens["stops"][-1]) == ("stop", STOP)
    assert (told.reasons["goes on"], len(told.tokens["goes on"])) == ("length", 30)
    logprobs = {chunk.request_id: chunk.logprobs for batch in told.batches for chunk in batch.emitted}
    assert logprobs == {"stops": (), "goes on": (TokenLogprob(logprob=-1.0),)}


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"token_ids": b"", "sequence_hashes": b""}, 400, "a request needs at least one prompt token"),
        ({"token_ids": pack_u32([1, 50])}, 400, "token ids lie below 50 in this model, not at 50"),
        (
            {"sampling": Sampling(max_tokens=1, logit_bias=(TokenBias(token_id=99, bias=1.0),))},
            400,
            "token ids lie below 50 in this model, not at 99",
        ),
        ({"sequence_hashes": b"12345678"}, 400, "2 prompt tokens are 0 full blocks of 4, but 1 block hashes came"),
        ({"token_ids": pack_u32([1] * 8), "sequence_hashes": b"12345678" * 2}, 400, "a block hash comes twice"),
        ({"sampling": Sampling(max_tokens=59)}, 400, "the engine has room for 60 tokens of a request: 2 of the prompt"),
        ({"lora_name": "legal"}, 400, "the transformers engine has no LoRA adapters, legal neither"),
        (
            {"sampling": Sampling(max_tokens=1, structured=StructuredOutput(kind="json_object"))},
            400,
            "the transformers engine has no structured outputs",
        ),
        ({"sampling": Sampling(max_tokens=1, top_p=2.0)}, 400, "top_p is too large"),
        ({"sampling": Sampling(max_tokens=1, min_p=0.5)}, 500, "the model's logits are not numbers"),
    ],
)
def test_what_cannot_be_served_fails_alone(changes: dict[str, Any], status: int, says: str) -> None:
    told = Told()
    told.ask("fine", [1, 2, 3], 4)
    told.scheduler.submit(msgspec.structs.replace(work_item("odd", [1, 2], 4), **changes))
    told.finish()
    assert told.errors["odd"][0] == status
    assert told.errors["odd"][2].startswith(says)
    assert told.tokens["fine"] == answer([1, 2, 3], 4)


def test_more_requests_than_anybody_waits_for_are_refused() -> None:
    told = Told()
    for number in range(WAITING_MAX + 1):
        told.ask(f"{number}", [1], 1)
    told.step()
    assert told.errors == {
        f"{WAITING_MAX}": (503, "engine_overloaded", f"{WAITING_MAX} requests are under way already")
    }


def test_a_reset_forgets_everything_and_tells_nothing() -> None:
    told = Told()
    told.ask("before", range(12), 4)
    told.ask("refused", [99], 4)
    told.step()
    told.ask("late", [99], 4)
    told.scheduler.reset()
    assert not told.scheduler.busy
    assert told.scheduler.step() is None
    told.held.clear()
    told.ask("after", range(12), 4)
    told.finish()
    assert told.cached["after"] == 0
    assert set(told.errors) == {"refused"}
