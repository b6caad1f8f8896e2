"""The engine model: scheduling, prefix reuse, preemption, continued responses, and the time of its steps."""

from array import array
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import HASH_SEED, hash_seed, sequence_hashes
from forebay.engine_model import model as engine_model
from forebay.engine_model.model import (
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
from forebay.engine_model.timing import LinearTiming, MockerTiming, RooflineTiming, StepWork, decode_us, prefill_us
from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from tests.core.engine_runs import (
    BLOCK,
    VOCABULARY,
    RecordingTiming,
    answers,
    config,
    engine,
    fetch_all,
    finished,
    prompts,
    replay_cache,
    request,
    run,
    sizes,
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


def test_requests_that_end_in_one_step_end_oldest_first() -> None:
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
    with pytest.raises(RequestMalformed, match="duplicate block hash"):
        model.submit(msgspec.structs.replace(request("a", list(range(8)), 1), sequence_hashes=bytes(16)))
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
        ({"vocabulary": ()}, "vocabulary"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


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
        assert (silent.duration_us, silent.iterations) == (spoken.duration_us, spoken.iterations)
        assert silent.load == spoken.load
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
    steps = fetch_all(model, until_us, seeds)
    assert answers(steps) == expected
    assert replay_cache(steps) == model.pool.content()


def test_without_a_vocabulary_the_position_changes_nothing() -> None:
    runs = []
    for first_position in (0, 7):
        model = EngineModel(config(vocabulary=None))
        model.submit(msgspec.structs.replace(request("a", [1, 2, 3], 20), first_position=first_position))
        runs.append(run(model))
    assert runs[0] == runs[1]


# The time of a step, against values worked out by hand from the formulas


NOTHING = {"prefill_tokens": 0, "prefill_attended": 0, "decode_sequences": 0, "decode_tokens": 0, "cache_tokens": 6400}
LINEAR = LinearTiming(
    step=100.0, prefill_token=3.0, attended_pair=0.5, decode_step=40.0, decode_sequence=7.0, context_token=0.25
)
# A token costs 20 FLOPs and 2 bytes of cache, a GPU does 10 FLOPs and reads 5 bytes in a microsecond.
DENSE = RooflineTiming(
    flops_token=20.0, flops_sampled=30.0, flops_pair=4.0, bytes_weights=1000.0, bytes_kv_token=2.0, flops_us=10.0,
    bytes_us=5.0,
)  # fmt: skip


def did(**work: int) -> StepWork:
    return StepWork(**{**NOTHING, **work})


def exact_prefill_us(tokens: int) -> Decimal:
    t = Decimal(tokens)
    return (Decimal("4.209989e-07") * t * t + Decimal("1.518344e-02") * t + Decimal("16.50142")) * 1000


def exact_decode_us(used: int, total: int) -> Decimal:
    u = min(Decimal(used) / Decimal(total), Decimal(1))
    return max(Decimal(1), Decimal("-25.74") * u * u + Decimal("54.01") * u + Decimal("5.74")) * 1000


@pytest.mark.parametrize("tokens", [1, 64, 1000, 8192, 131_072])
def test_prefill_is_dynamos_polynomial_to_six_digits(tokens: int) -> None:
    exact = exact_prefill_us(tokens)
    assert abs(prefill_us(tokens) - exact) <= max(Decimal("0.5"), exact / 1_000_000)


@pytest.mark.parametrize(
    ("used", "total"), [(0, 16_384), (1, 16_384), (8192, 16_384), (16_384, 16_384), (3, 7), (300, 100)]
)
def test_decode_is_dynamos_polynomial_to_six_digits(used: int, total: int) -> None:
    exact = exact_decode_us(used, total)
    assert abs(decode_us(used, total) - exact) <= max(Decimal("0.5"), exact / 1_000_000)


def test_the_mocker_prefills_and_then_decodes() -> None:
    mocker = MockerTiming()
    assert mocker.step_us(did(prefill_tokens=1000, prefill_attended=500_500)) == 32_106
    assert mocker.step_us(did(decode_sequences=3, decode_tokens=3200)) == 26_310
    assert mocker.step_us(did(prefill_tokens=1000, decode_sequences=3, decode_tokens=3200)) == 32_106 + 26_310


@given(st.integers(0, 100_000), st.integers(1, 100_000), st.integers(1, 512))
def test_the_mocker_knows_no_unit_of_contexts(used: int, total: int, block_size: int) -> None:
    assert decode_us(used * block_size, total * block_size) == decode_us(used, total)


def test_a_linear_step_is_the_sum_of_its_parts() -> None:
    assert LINEAR.step_us(did(prefill_tokens=10, prefill_attended=55)) == 158  # 100 + 30 + 27.5, to the even one
    assert LINEAR.step_us(did(decode_sequences=2, decode_tokens=128)) == 100 + 40 + 14 + 32
    both = LINEAR.step_us(did(prefill_tokens=10, prefill_attended=56, decode_sequences=2, decode_tokens=128))
    assert both == 100 + 30 + 28 + 40 + 14 + 32


def test_a_step_takes_some_time() -> None:
    free = LinearTiming(context_token=1e-9)
    assert free.step_us(did(prefill_tokens=1)) == free.step_us(did(decode_sequences=1, decode_tokens=64)) == 1


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_are_numbers_from_zero_on(cost: float) -> None:
    with pytest.raises(ValueError, match="attended_pair must be a number from 0 on"):
        LinearTiming(step=1.0, attended_pair=cost)


def test_all_zero_costs_are_rejected() -> None:
    with pytest.raises(ValueError, match="at least one cost"):
        LinearTiming()


def changed(timing: RooflineTiming, **changes: Any) -> RooflineTiming:
    fields = {name: getattr(timing, name) for name in timing.__struct_fields__}
    return RooflineTiming(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "work", "us"),
    [
        # The weights are read: 1000 + 2 * 64 bytes at 5 per microsecond; 20 + 30 + 4 * 64 FLOPs at 10 are less.
        ({}, {"decode_sequences": 1, "decode_tokens": 64}, 226),
        # A long prompt computes: 20 * 1000 + 4 * 500,500 FLOPs; 1000 + 2 * 1000 bytes are less.
        ({}, {"prefill_tokens": 1000, "prefill_attended": 500_500}, 202_200),
        (
            {"reduce_us": 11.0, "reduce_us_token": 0.5, "overhead_us": 100.0},
            {"decode_sequences": 2, "decode_tokens": 128},
            251 + 11 + 1 + 100,
        ),
        ({"bytes_experts": 500.0}, {"prefill_tokens": 1, "prefill_attended": 1}, 300),  # one expert is always read
    ],
)
def test_a_roofline_step_computes_or_reads(changes: dict[str, Any], work: dict[str, int], us: int) -> None:
    assert changed(DENSE, **changes).step_us(did(**work)) == us


@given(st.integers(1, 3000), st.integers(1, 64), st.integers(0, 63))
def test_a_step_reads_the_experts_that_its_tokens_go_to(tokens: int, experts: int, others: int) -> None:
    active = max(1, experts - others)
    mixture = changed(DENSE, bytes_experts=1e9, experts=experts, experts_active=active, flops_us=1e12)
    missed = (1 - Fraction(active, experts)) ** tokens  # by a token each time with the same chance
    expected = (1000 + 2 * 100_000 + (1 - missed) * 10**9) / 5
    took = mixture.step_us(did(decode_sequences=tokens, decode_tokens=100_000))
    assert took == pytest.approx(float(expected), rel=1e-9, abs=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flops_us": 0.0}, "above 0"),
        ({"bytes_us": 0.0}, "above 0"),
        ({"bytes_weights": 0.0}, "above 0"),
        ({"overhead_us": -1.0}, "overhead_us"),
        ({"experts": 4, "experts_active": 5}, r"experts_active \(5\)"),
        ({"experts": 4, "experts_active": 0}, r"experts_active \(0\)"),
    ],
)
def test_invalid_rooflines_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        changed(DENSE, **changes)


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
