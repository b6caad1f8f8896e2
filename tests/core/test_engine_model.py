"""The engine model: scheduling, prefix reuse, preemption, and what must hold on any history."""

from array import array
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import HASH_SEED, hash_seed, sequence_hashes
from forebay.engine_model import model as engine_model
from forebay.engine_model.model import (
    EngineConfig,
    EngineModel,
    EngineRequest,
    EngineStage,
    EngineStep,
    Finished,
    QueueFull,
    RequestMalformed,
    RequestTooLarge,
    Stored,
)
from forebay.engine_model.sequence import generate_tokens
from forebay.engine_model.timing import decode_us, prefill_us
from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from tests.core.engine_runs import (
    BLOCK,
    VOCABULARY,
    RecordingTiming,
    answers,
    config,
    engine,
    finished,
    replay_cache,
    request,
    run,
)
from tests.depth import examples


def test_one_request_from_prompt_to_end() -> None:
    model = engine(request("a", list(range(6)), 3))
    assert model.load().waiting == 1
    steps = run(model)
    assert [step.duration_us for step in steps] == [prefill_us(6), decode_us(2, 32), decode_us(2, 32)]
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert [first.request_id for first in steps[0].first_tokens] == ["a"]
    assert finished(steps) == [Finished("a", 1, "length", 6, 3, 0)]
    assert (steps[-1].load.running, steps[-1].load.kv_blocks_used) == (0, 0)


@pytest.mark.parametrize("output", [1, 5, 11])
def test_given_output_tokens_precede_sampled_ones(output: int) -> None:
    given_tokens = [1000 + at for at in range(output)]
    model = EngineModel(config())
    submitted = request("a", list(range(6)), 11)
    model.submit(msgspec.structs.replace(submitted, output=pack_u32(given_tokens)))
    steps = run(model)
    expected = given_tokens + generate_tokens(7, output, 11 - output, VOCABULARY) if output < 11 else given_tokens
    assert answers(steps) == {"a": expected}
    model.submit(request("b", [*range(6), *expected], 1))  # the blocks of the output have these tokens
    assert finished(run(model))[0].cached_tokens == 16


def test_decoding_takes_as_long_as_its_contexts_are_whoever_shares_or_prefills() -> None:
    model = engine(request("a", [1, 2, 3, 4, 5], 9), max_num_batched_tokens=8)
    first = model.step()
    assert first is not None
    model.submit(request("b", [1, 2, 3, 4, 6], 3))
    shared = [model.step(), model.step()]
    assert [step.duration_us for step in shared if step] == [prefill_us(1) + decode_us(2, 32), decode_us(2 + 2, 32)]
    model.submit(request("c", list(range(50, 66)), 1))
    mixed = model.step()
    assert mixed is not None
    assert mixed.duration_us == prefill_us(6) + decode_us(2 + 2, 32)


def test_a_timing_gets_the_work_of_a_step() -> None:
    timing = RecordingTiming()
    model = engine(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 3), max_num_batched_tokens=8, timing=timing)
    first = model.step()
    assert first is not None
    assert first.duration_us == 10
    model.submit(request("b", [1, 2, 3, 4, 20, 21], 1))
    assert run(model)[-1].duration_us == 10
    names = ("prefill_tokens", "prefill_attended", "decode_sequences", "decode_tokens")
    assert [tuple(call[name] for name in names) for call in timing.calls] == [
        (8, 36, 0, 0),  # a chunk of a
        (4, 9 + 10 + 5 + 6, 0, 0),  # the rest of a, which attends all before it; b has its first block from the cache
        (0, 0, 1, 12),
        (0, 0, 1, 12),
    ]
    assert {call["cache_tokens"] for call in timing.calls} == {32 * BLOCK}


def test_a_timing_is_called_once_for_combined_iterations() -> None:
    timing = RecordingTiming()
    model = engine(request("a", [1], 4), timing=timing)
    assert [step.duration_us for step in run(model, until_us=1_000)] == [10, 30]
    assert len(timing.calls) == 2


def test_a_one_token_response_ends_in_its_prefill_step() -> None:
    model = engine(request("a", [1], 1))
    (step,) = run(model)
    assert len(step.emitted) == len(step.first_tokens) == len(step.finished) == 1


def test_output_tokens_depend_on_seed_and_index_alone() -> None:
    whole = generate_tokens(5, 0, 100, VOCABULARY)
    assert [generate_tokens(5, index, 1, VOCABULARY)[0] for index in range(100)] == whole
    assert generate_tokens(5, 13, 30, VOCABULARY) == whole[13:43]
    assert generate_tokens(6, 0, 100, VOCABULARY) != whole
    assert set(whole) <= set(VOCABULARY)
    assert len(set(whole)) > 50


def test_a_second_request_reuses_the_prefix_but_computes_its_last_token() -> None:
    model = EngineModel(config())
    prompt = list(range(8))
    model.submit(request("a", prompt, 1))
    run(model)
    model.submit(request("b", prompt, 1))
    model.submit(request("c", [*prompt, 99], 1))
    steps = run(model)
    assert {end.request_id: end.cached_tokens for end in finished(steps)} == {"b": 4, "c": 8}
    assert steps[0].duration_us == prefill_us(4 + 1)
    assert not any(step.cache_changes for step in steps)


def test_the_next_turn_of_a_conversation_finds_the_answer_in_the_cache() -> None:
    model = EngineModel(config())
    prompt = list(range(6))
    model.submit(request("a", prompt, 11))
    steps = run(model)
    turn = prompt + answers(steps)["a"]
    hashes = unpack_u64(sequence_hashes(pack_u32(turn), BLOCK))
    assert model.pool.content() == set(hashes[:4])
    stored = [change for step in steps for change in step.cache_changes]
    parents = [None, *hashes[:3]]
    assert stored == [Stored(parent, array("Q", [block])) for parent, block in zip(parents, hashes[:4], strict=True)]
    model.submit(request("b", [*turn, 5, 6, 7], 1))
    assert finished(run(model))[0].cached_tokens == 16


def test_a_block_that_another_fills_meanwhile_is_stored_once() -> None:
    model = engine(request("a", [0, 1, 2, 3], 20))
    for _ in range(4):
        model.step()
    # The first leaves two tokens of the budget to the second, which computes what "a" is about to say.
    model.submit(request("c", [9] * 13, 1))
    turn = [0, 1, 2, 3, *generate_tokens(7, 0, 8, VOCABULARY), 5, 5, 5, 5]
    model.submit(request("b", turn, 1))
    hashes = unpack_u64(sequence_hashes(pack_u32(turn), BLOCK))
    meanwhile, rest, *_ = run(model)
    assert meanwhile.cache_changes[-1] == Stored(hashes[0], array("Q", [hashes[1]]))
    assert rest.cache_changes == [Stored(hashes[1], array("Q", hashes[2:]))]


def test_output_blocks_are_salted_as_the_prompt_is() -> None:
    model = EngineModel(config())
    salts = [HASH_SEED, hash_seed("adapter"), hash_seed("", "tenant")]
    for number, salt in enumerate(salts):
        model.submit(request(f"r{number}", list(range(6)), 7, salt=salt))
    steps = run(model)
    whole = pack_u32([*range(6), *answers(steps)["r0"]])
    expected = [unpack_u64(sequence_hashes(whole, BLOCK, salt)) for salt in salts]
    assert {end.cached_tokens for end in finished(steps)} == {0}
    assert model.pool.content() == {block for chain in expected for block in chain}
    assert len(model.pool.content()) == 9


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    model = engine(request("a", [1, 2], 20), request("b", list(range(100, 140)), 2))
    steps = run(model)
    assert steps[0].duration_us == prefill_us(16)
    assert [chunk.request_id for chunk in steps[1].emitted] == ["a"]
    first = next(index for index, step in enumerate(steps) if "b" in [chunk.request_id for chunk in step.emitted])
    assert first == 2
    assert len(answers(steps)["b"]) == 2


def test_admission_is_first_come_first_served_within_max_num_seqs() -> None:
    model = EngineModel(config(max_num_seqs=2))
    for name in "abc":
        model.submit(request(name, [ord(name)], 4))
    step = model.step()
    assert step is not None
    assert [chunk.request_id for chunk in step.emitted] == ["a", "b"]
    assert (step.load.running, step.load.waiting) == (2, 1)
    steps = [step, *run(model)]
    assert [end.request_id for end in finished(steps)] == ["a", "b", "c"]


def test_of_those_that_end_together_the_oldest_is_first() -> None:
    model = engine(request("a", [1], 7))
    for _ in range(3):
        model.step()
    model.submit(request("b", [2], 4))
    steps = run(model)
    assert [end.request_id for end in steps[-1].finished] == ["a", "b"]


def test_a_cancelled_request_limits_no_step() -> None:
    model = engine(request("a", [1, 2, 3], 20), request("b", [1], 20))
    model.step()
    model.cancel("a")
    step = model.step(until_us=1_000_000)
    assert step is not None
    assert step.iterations == 3


def test_the_newest_sequence_is_preempted_and_repeats_no_token() -> None:
    model = EngineModel(config(kv_blocks_total=6))
    requests = [request("a", [1, 2, 3], 20), request("b", [4, 5, 6], 20, seed=8)]
    for one in requests:
        model.submit(one)
    steps = run(model)
    assert max(step.load.waiting for step in steps) == 1
    assert [end.request_id for end in finished(steps)] == ["a", "b"]
    assert answers(steps) == {"a": generate_tokens(7, 0, 20, VOCABULARY), "b": generate_tokens(8, 0, 20, VOCABULARY)}
    assert [first.request_id for step in steps for first in step.first_tokens] == ["a", "b"]
    assert replay_cache(steps) == model.pool.content()


def test_a_prompt_in_chunks_is_preempted_by_those_that_decode() -> None:
    model = EngineModel(config(kv_blocks_total=8, max_num_batched_tokens=8))
    model.submit(request("a", [1, 2, 3, 4], 16))
    model.submit(request("b", list(range(50, 78)), 4))
    steps = run(model)
    assert answers(steps) == {"a": generate_tokens(7, 0, 16, VOCABULARY), "b": generate_tokens(7, 0, 4, VOCABULARY)}
    assert [end.request_id for end in finished(steps)] == ["a", "b"]
    assert replay_cache(steps) == model.pool.content()


def test_cancel_frees_the_blocks_wherever_the_request_is() -> None:
    model = EngineModel(config(max_num_seqs=2, max_num_batched_tokens=8))
    for name, size in (("decoding", 2), ("prefilling", 20), ("waiting", 3)):
        model.submit(request(name, [ord(name[0])] * size, 9))
    model.step()
    assert model.load().running == 2
    assert [model.cancel(name) for name in ("waiting", "prefilling", "decoding")] == [True] * 3
    assert not model.cancel("decoding")
    assert model.pool.used == 0
    assert model.step() is None


def test_reset_drops_requests_and_cache() -> None:
    model = engine(request("a", list(range(8)), 5), request("b", [1], 5), max_num_seqs=1)
    model.step()
    model.reset()
    assert model.step() is None
    assert model.pool.content() == frozenset()
    model.submit(request("a", [1], 1))
    assert len(run(model)) == 1


def test_refusals_name_the_numbers_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EngineModel(config())
    with pytest.raises(RequestTooLarge, match=r"100 prompt .* 29 to generate need 33 KV blocks .* has 32"):
        model.submit(request("a", list(range(100)), 29))
    with pytest.raises(RequestMalformed, match="at least one prompt token"):
        model.submit(request("a", [], 1))
    with pytest.raises(RequestMalformed, match="at least one prompt token"):
        model.submit(request("a", [1], 0))
    with pytest.raises(RequestMalformed, match="8 prompt tokens are 2 full blocks of 4, but 4 block hashes"):
        model.submit(request("a", list(range(8)), 1, block=2))
    twice = EngineRequest(
        request_id="a",
        attempt=1,
        token_ids=pack_u32(range(8)),
        sequence_hashes=bytes(16),
        token_seed=0,
        max_tokens=1,
    )
    with pytest.raises(RequestMalformed, match="duplicate block hash"):
        model.submit(twice)
    monkeypatch.setattr(engine_model, "WAITING_MAX", 1)
    model.submit(request("a", [1], 1))
    with pytest.raises(QueueFull):
        model.submit(request("b", [1], 1))
    assert model.load().waiting == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "at least 1"),
        ({"max_num_seqs": 17}, r"max_num_batched_tokens \(16\) must be at least max_num_seqs \(17\)"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_vocabulary_has_a_size() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        EngineConfig(vocabulary=())


prompts = st.builds(lambda root, size: [root] * min(size, 3) + list(range(size)), st.integers(0, 2), st.integers(1, 30))
sizes = st.fixed_dictionaries(
    {
        "kv_blocks_total": st.integers(15, 40),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
    }
)


@examples(3)
@given(
    sizes=sizes,
    requests=st.lists(st.tuples(prompts, st.integers(1, 25)), max_size=12),
    until_us=st.integers(1, 200_000),
)
def test_iterations_made_at_once_are_the_same_as_single_ones(
    sizes: dict[str, int], requests: list[tuple[list[int], int]], until_us: int
) -> None:
    histories = []
    for until in (0, until_us):
        model = EngineModel(config(**sizes))
        for index, (prompt, max_tokens) in enumerate(requests):
            model.submit(request(f"r{index}", prompt, max_tokens, seed=index))
        histories.append(run(model, until))
    single, merged = histories
    position = 0
    for step in merged:
        part = single[position : position + step.iterations]
        position += step.iterations
        assert sum(one.duration_us for one in part) == step.duration_us
        assert answers_from(part) == answers_from([step])
        # Reported at the end of the step, that is of the iteration in which it happened.
        assert [one.cache_changes for one in part] == [*([[]] * (len(part) - 1)), step.cache_changes]
        assert finished(part) == step.finished
        assert part[-1].load == step.load
        assert [first for one in part for first in one.first_tokens] == step.first_tokens
    assert position == len(single)


def answers_from(steps: list[EngineStep]) -> dict[tuple[str, int], list[int]]:
    output: dict[str, tuple[int, list[int]]] = {}
    for step in steps:
        for chunk in step.emitted:
            output.setdefault(chunk.request_id, (chunk.first_index, []))[1].extend(unpack_u32(chunk.token_ids))
    return {(name, first): tokens for name, (first, tokens) in output.items()}


@examples(3)
@given(
    sizes=sizes,
    actions=st.lists(
        st.tuples(st.sampled_from(("whole", "own", "cancel", "step")), st.integers(0, 27), st.integers(1, 25)),
        max_size=40,
    ),
)
def test_an_engine_without_vocabulary_emits_no_tokens(
    sizes: dict[str, int], actions: list[tuple[str, int, int]]
) -> None:
    """The same times, ends and load; and the same blocks, under other names where they hold output."""
    histories = []
    # Tokens are many, so that no two answers begin alike by chance.
    for vocabulary in (tuple(range(1, 65_537)), None):
        model = EngineModel(config(vocabulary=vocabulary, **sizes))
        steps: list[EngineStep] = []
        for at, (action, size, number) in enumerate(actions):
            if action == "whole":  # full blocks, which others may have
                model.submit(request(f"r{at}", [number % 2] * (size // BLOCK + 1) * BLOCK, number, seed=at))
            elif action == "own":
                model.submit(request(f"r{at}", [100 + at] * (size + 1), number, seed=at))
            elif action == "cancel":
                model.cancel(f"r{size}")
            else:
                steps += [step for _ in range(number) if (step := model.step(number * 1000)) is not None]
        histories.append(steps + run(model))
    names: dict[int, int] = {}
    for spoken, silent in zip(*histories, strict=True):
        assert (silent.duration_us, silent.iterations, silent.load) == (
            spoken.duration_us,
            spoken.iterations,
            spoken.load,
        )
        assert (silent.first_tokens, silent.finished, silent.emitted) == (spoken.first_tokens, spoken.finished, [])
        for output, unemitted in zip(spoken.cache_changes, silent.cache_changes, strict=True):
            assert type(output) is type(unemitted)
            assert len(output.hashes) == len(unemitted.hashes)
            for name, other in zip(output.hashes, unemitted.hashes, strict=True):
                assert names.setdefault(name, other) == other
            if isinstance(output, Stored) and isinstance(unemitted, Stored) and output.parent is not None:
                assert names[output.parent] == unemitted.parent
    assert len(set(names.values())) == len(names)


def test_output_blocks_of_different_seeds_are_distinct_without_vocabulary() -> None:
    model = EngineModel(config(vocabulary=None))
    for number in range(3):
        model.submit(request(f"r{number}", [1, 2], 11, seed=number % 2, salt=[1, 1, 2][number]))
    run(model)
    assert len(model.pool.content()) == 3 * 3


def test_a_warmed_engine_reuses_cached_blocks() -> None:
    first = EngineModel(config())
    prompt = list(range(12))
    first.submit(request("a", prompt, 2))
    run(first)
    second = EngineModel(config())
    second.warm(first.held())
    assert second.held() == first.held()
    second.submit(request("b", prompt, 2))
    steps = run(second)
    assert steps[0].first_tokens[0].cached_tokens > 0
    assert all(change.hashes for step in steps for change in step.cache_changes)


def test_generated_counts_are_exact_at_any_iteration() -> None:
    model = EngineModel(config(kv_blocks_total=6))
    for one in (request("a", [1, 2, 3], 20), request("b", [4, 5, 6], 20, seed=8)):
        model.submit(one)
    output = {"a": 0, "b": 0}
    assert model.generated() == output
    preempted = False
    while (step := model.step(1 << 40)) is not None:
        spoke = {chunk.request_id: len(unpack_u32(chunk.token_ids)) for chunk in step.emitted}
        output = {name: count + spoke.get(name, 0) for name, count in output.items()}
        for end in step.finished:
            assert output.pop(end.request_id) == end.output_tokens
        for undone in range(step.iterations + 1):
            assert model.generated(undone) == {name: output[name] - undone * (name in spoke) for name in output}
        preempted |= step.load.waiting == 1 and output["b"] > 0
    assert preempted


# Responses that are continued


class Response(NamedTuple):
    """One response, and the positions at which attempts begin to continue it."""

    prompt: list[int]
    length: int
    scripted: int  # number of tokens that are not sampled
    begins: list[int]
    stage: EngineStage

    def tokens(self, seed: int) -> list[int]:
        scripted = min(self.scripted, self.length)
        sampled = generate_tokens(seed, scripted, self.length - scripted, VOCABULARY)
        return [*range(2000, 2000 + scripted), *sampled]

    def attempt(self, name: str, seed: int, begin: int) -> EngineRequest:
        """Return an attempt that continues the response after `begin` tokens."""
        whole = self.tokens(seed)
        # At the stage `decode` the seed comes with the fetched KV.
        token_seed = seed if self.stage == "aggregated" else 0
        made = request(name, self.prompt + whole[:begin], self.length - begin, seed=token_seed, stage=self.stage)
        return msgspec.structs.replace(made, output=pack_u32(whole[begin : self.scripted]), first_position=begin)


responses = st.builds(
    Response,
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    length=st.integers(1, 20),
    scripted=st.sampled_from([0, 0, 3, 30]),
    begins=st.lists(st.integers(0, 19), min_size=1, max_size=3),
    stage=st.sampled_from(["aggregated", "decode"]),
)


def fetch_all(model: EngineModel, seeds: dict[str, int], until_us: int) -> list[EngineStep]:
    """Run the model to the end. All KV arrives at once."""
    steps: list[EngineStep] = []
    while True:
        for fetch in model.fetches():
            assert model.fetched(fetch.request_id, seeds[fetch.request_id])
        step = model.step(until_us)
        if step is None:
            return steps
        steps.append(step)


@examples(3)
@given(
    drawn=st.lists(responses, min_size=1, max_size=6),
    sizes=st.sampled_from([{}, {"kv_blocks_total": 9}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 4}]),
    until_us=st.sampled_from([0, 1_000_000]),
)
def test_continued_tokens_equal_those_of_the_undisturbed_response(
    drawn: list[Response], sizes: dict[str, int], until_us: int
) -> None:
    model = EngineModel(config(**sizes))
    seeds, expected = dict[str, int](), dict[str, list[int]]()
    for number, one in enumerate(drawn):
        seed = number + 1
        for begin in sorted({0, *one.begins}):
            if begin < one.length:
                name = f"r{number} from {begin}"
                seeds[name], expected[name] = seed, one.tokens(seed)[begin:]
                model.submit(one.attempt(name, seed, begin))
    steps = fetch_all(model, seeds, until_us)
    assert answers(steps) == expected
    assert replay_cache(steps) == model.pool.content()


def test_without_a_vocabulary_the_position_changes_nothing() -> None:
    runs = []
    for first_position in (0, 7):
        model = EngineModel(config(vocabulary=None))
        model.submit(msgspec.structs.replace(request("a", [1, 2, 3], 20), first_position=first_position))
        runs.append(run(model))
    assert runs[0] == runs[1]
