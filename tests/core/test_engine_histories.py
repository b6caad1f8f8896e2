"""The engine model with disaggregation and slower tiers: what is kept, fetched and loaded, and any history of it."""

from array import array

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from forebay.engine_model.model import (
    Computed,
    EngineModel,
    EngineStage,
    EngineStep,
    Fetch,
    FirstTokenStep,
    Load,
    RequestTooLarge,
    Stored,
)
from forebay.engine_model.sequence import generate_tokens
from forebay.engine_model.timing import decode_us, prefill_us
from forebay.events.base import pack_u32
from tests.core.engine_runs import (
    BLOCK,
    VOCABULARY,
    RecordingTiming,
    Tier,
    answers,
    config,
    engine,
    finished,
    hashes,
    prompts,
    replay_cache,
    request,
    run,
    sizes,
)
from tests.depth import examples

PROMPT = list(range(18))  # four full blocks, and two tokens


def loading(model: EngineModel) -> list[Load]:
    """Run to the end, or until only loads are left. Return the loads that began."""
    begun: list[Load] = []
    while True:
        step = model.step()
        new = model.loads()
        begun += new
        if step is None and not new:
            return begun


def test_a_prompt_is_loaded_before_its_rest_is_computed() -> None:
    tier = Tier(PROMPT)
    model = engine(request("a", PROMPT, 1), match=tier.match)
    assert model.step() is None
    assert model.loads() == [Load("a", 1, 0, 4)]
    assert model.loads() == []
    assert (model.load().running, model.load().waiting, model.load().kv_blocks_used) == (0, 1, 4)
    assert model.pool.content() == set()
    assert model.loaded("a", 4)
    assert not model.loaded("a", 4)
    (step,) = run(model)
    assert step.duration_us == prefill_us(2)
    assert step.cache_changes == [Stored(None, array("Q", hashes(PROMPT)))]
    assert step.first_tokens == [FirstTokenStep("a", 1, 16)]
    assert tier.asked == [("a", 0)]


@pytest.mark.parametrize("arrived", [0, 1, 3])
def test_blocks_that_did_not_arrive_are_computed(arrived: int) -> None:
    tier = Tier(PROMPT)
    model = engine(request("a", PROMPT, 3), match=tier.match, max_num_batched_tokens=64)
    assert loading(model) == [Load("a", 1, 0, 4)]
    assert model.loaded("a", arrived)
    steps = run(model)
    assert steps[0].duration_us == prefill_us(18 - arrived * BLOCK)
    assert finished(steps)[0].cached_tokens == arrived * BLOCK
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert tier.asked == [("a", 0)]  # no second load of the same blocks
    assert replay_cache(steps) == model.pool.content() == set(hashes([*PROMPT, *answers(steps)["a"]][:20]))


def test_only_blocks_after_the_cached_ones_are_loaded_and_never_the_last_token() -> None:
    tier = Tier(PROMPT)
    model = engine(request("before", [*PROMPT[:8], 99], 1), match=tier.match)
    assert loading(model) == [Load("before", 1, 0, 2)]
    assert model.loaded("before", 2)
    run(model)
    model.submit(request("a", PROMPT[:16], 1))
    assert loading(model) == [Load("a", 1, 2, 1)]
    assert model.loaded("a", 1)
    assert finished(run(model))[0].cached_tokens == 12
    model.submit(request("again", PROMPT[:13], 1))
    assert finished(run(model))[0].cached_tokens == 12
    assert [name for name, _ in tier.asked] == ["before", "a"]


def test_loads_that_end_in_another_order_keep_their_places_in_the_queue() -> None:
    prompts = {name: [number] * 4 + PROMPT[:5] for number, name in enumerate("abcd", 100)}
    tier = Tier(*[prompts[name] for name in "abc"])
    model = EngineModel(config(max_num_seqs=4, max_num_batched_tokens=64), tier.match)
    for name in "abcd":
        model.submit(request(name, prompts[name], 1))
    step = model.step()
    assert step is not None
    assert [first.request_id for first in step.first_tokens] == ["d"]
    assert [load.request_id for load in model.loads()] == ["a", "b", "c"]
    model.submit(request("d", prompts["d"], 1, attempt=2))
    for name in "cab":
        assert model.loaded(name, 2)
    assert [first.request_id for step in run(model) for first in step.first_tokens] == ["a", "b", "c", "d"]


def test_loading_requests_take_seats_and_room() -> None:
    prompts = {name: [number] * 4 + PROMPT[:13] for number, name in enumerate("abcd", 100)}
    tier = Tier(*prompts.values())
    model = EngineModel(config(max_num_seqs=3, kv_blocks_total=10, max_num_batched_tokens=64), tier.match)
    for name in "abcd":
        model.submit(request(name, prompts[name], 1))
    assert [load.request_id for load in loading(model)] == ["a", "b"]  # two blocks are free
    assert model.loaded("a", 0)
    ends = [model.step()]
    assert [end.request_id for end in finished([step for step in ends if step])] == ["a"]
    assert [load.request_id for load in loading(model)] == ["c"]
    few = EngineModel(config(max_num_seqs=1), tier.match)
    for name in "ab":
        few.submit(request(name, prompts[name], 1))
    assert [load.request_id for load in loading(few)] == ["a"]
    assert few.loaded("a", 4)
    assert [load.request_id for load in loading(few)] == ["b"]


def test_a_preempted_sequence_loads_its_own_output() -> None:
    tier = Tier()
    names: list[tuple[int, int, bytes]] = []

    def named(parent: int, block: int, token_ids: bytes) -> None:
        names.append((parent, block, token_ids))
        tier.content.add(block)  # written at once

    model = EngineModel(config(kv_blocks_total=7), tier.match, named)
    model.submit(request("a", [1] * 5, 19))
    model.submit(request("b", [2] * 5, 19, seed=8))
    steps: list[EngineStep] = []
    loads: list[Load] = []
    tier.content.update(hashes([2] * 5))
    while True:
        step = model.step()
        new = model.loads()
        for load in new:
            assert model.loaded(load.request_id, load.blocks)
        loads += new
        if step is None and not new:
            break
        steps += [step] if step else []
    assert [load.request_id for load in loads] == ["b", "b"]
    assert loads[0] == Load("b", 1, 0, 1)
    assert loads[1].first_block + loads[1].blocks > 1
    output = answers(steps)
    assert output == {"a": generate_tokens(7, 0, 19, VOCABULARY), "b": generate_tokens(8, 0, 19, VOCABULARY)}
    assert {end.request_id: end.cached_tokens for end in finished(steps)} == {"a": 0, "b": 4}
    assert replay_cache(steps) == model.pool.content()
    for name, prompt in (("a", [1] * 5), ("b", [2] * 5)):
        turn = (prompt + output[name])[:20]
        chain = hashes(turn)
        assert {one for one in names if one[1] in chain} == {
            (chain[at - 1], chain[at], pack_u32(turn[at * BLOCK : (at + 1) * BLOCK])) for at in range(1, 5)
        }


def test_blocks_whose_tokens_do_not_determine_them_are_not_named() -> None:
    names: list[int] = []
    model = EngineModel(config(), named=lambda parent, block, token_ids: names.append(block))
    model.submit(request("short", [1, 2], 6))
    run(model)
    assert names == []  # its first block has no parent
    made = request("image", [1, 2, 3, 4, 5], 8)
    model.submit(msgspec.structs.replace(made, tail_mm_hashes=(9,)))
    (step, *_) = [step for step in reversed(run(model)) if step.cache_changes]
    assert [list(change.hashes) for change in step.cache_changes] == [names]  # only the block after the image


def test_a_prefill_stage_loads_and_a_decode_stage_fetches_what_was_not_loaded() -> None:
    tier = Tier(PROMPT[:8])
    model = engine(request("a", PROMPT, 1, stage="prefill"), match=tier.match, max_num_batched_tokens=64)
    assert loading(model) == [Load("a", 1, 0, 2)]
    assert model.loaded("a", 2)
    (step,) = run(model)
    assert (step.duration_us, step.computed) == (prefill_us(10), [Computed("a", 1, 8)])

    model = engine(request("a", PROMPT, 3, stage="decode"), match=tier.match)
    assert model.fetches() == []
    assert model.step() is None
    assert model.loads() == [Load("a", 1, 0, 2)]
    assert model.loaded("a", 2)
    assert model.fetches() == [Fetch("a", 1, 2, 5)]
    assert model.fetched("a")
    steps = run(model)
    assert steps[0].first_tokens == [FirstTokenStep("a", 1, 17)]
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert replay_cache(steps) == model.pool.content()

    failing = EngineModel(config(), tier.match)
    failing.submit(request("a", PROMPT, 3, stage="decode"))
    assert failing.fetches() == []
    assert failing.loads() == [Load("a", 1, 0, 2)]
    assert failing.loaded("a", 1)
    assert failing.fetches() == [Fetch("a", 1, 1, 5)]


# Disaggregation: what a prefill stage keeps, and what a decode stage fetches


def test_a_computed_prompt_emits_nothing_and_is_kept_until_release() -> None:
    model = engine(request("a", list(range(10)), 50, stage="prefill"))
    (step,) = run(model)
    assert (step.duration_us, step.emitted, step.first_tokens, step.finished) == (prefill_us(10), [], [], [])
    assert step.computed == [Computed("a", 1, 0)]
    assert (step.load.running, step.load.waiting, step.load.kv_blocks_used) == (0, 0, 3)
    assert model.pool.content() == set(hashes(list(range(10))))
    assert model.generated() == {"a": 0}
    assert model.release("a")
    assert not model.release("a")
    assert not model.cancel("a")
    assert (model.pool.used, model.pool.cached) == (0, 2)
    model.submit(request("b", list(range(10)), 1, attempt=2, stage="prefill"))
    assert run(model)[0].computed == [Computed("b", 2, 8)]


def test_what_is_kept_is_neither_evicted_nor_counted_free() -> None:
    model = EngineModel(config(kv_blocks_total=8))
    model.submit(request("kept", list(range(20)), 1, stage="prefill"))
    model.submit(request("too-much", list(range(50, 66)), 1, stage="prefill"))
    assert [one.request_id for step in run(model) for one in step.computed] == ["kept"]
    assert (model.load().waiting, model.pool.used) == (1, 5)
    model.submit(request("never-mind", [7], 3))
    assert model.step() is None  # first come, first served
    assert model.release("kept")
    assert [one.request_id for step in run(model) for one in step.computed] == ["too-much"]
    assert [model.cancel("too-much"), model.pool.used] == [True, 0]


def test_a_prefill_request_needs_no_output_blocks() -> None:
    model = engine(request("a", list(range(8)), 1_000, stage="prefill"), kv_blocks_total=2)
    assert run(model)[0].computed
    with pytest.raises(RequestTooLarge, match=r"9 prompt tokens and 0 to generate need 3 KV blocks .* has 2"):
        model.submit(request("b", list(range(9)), 1, stage="prefill"))


def test_what_was_computed_elsewhere_is_fetched_and_its_last_token_computed() -> None:
    model = EngineModel(config())
    prompt = list(range(10))
    model.submit(request("a", prompt, 3, stage="decode"))
    assert model.fetches() == [Fetch("a", 1, 0, 3)]
    assert model.fetches() == []
    assert model.step() is None
    assert (model.load().running, model.load().waiting, model.load().kv_blocks_used) == (0, 1, 3)
    assert model.pool.content() == set()
    assert model.fetched("a")
    assert not model.fetched("a")
    steps = run(model)
    assert [step.duration_us for step in steps] == [decode_us(3, 32)] * 3
    assert steps[0].cache_changes == [Stored(None, array("Q", hashes(prompt)))]
    assert steps[0].first_tokens == [FirstTokenStep("a", 1, 9)]
    assert finished(steps)[0].cached_tokens == 9
    assert answers(steps) == {"a": generate_tokens(7, 0, 3, VOCABULARY)}
    assert model.pool.used == 0


@pytest.mark.parametrize(("own", "first"), [(7, 1), (8, 2), (30, 2)])
def test_cached_blocks_are_not_fetched_except_the_last(own: int, first: int) -> None:
    model = EngineModel(config())
    prompt = list(range(12))
    model.submit(request("before", [*prompt, *range(12, 40)][:own], 1))
    run(model)
    model.submit(request("a", prompt, 2, stage="decode"))
    assert model.fetches() == [Fetch("a", 1, first, 3)]
    assert model.fetched("a")
    steps = run(model)
    assert steps[0].first_tokens == [FirstTokenStep("a", 1, 11)]
    assert answers(steps) == {"a": generate_tokens(7, 0, 2, VOCABULARY)}
    assert set(hashes(prompt)) <= model.pool.content()


def test_admission_order_is_independent_of_the_stage() -> None:
    model = EngineModel(config(max_num_seqs=3, max_num_batched_tokens=64))
    for name, stage in (("a", "aggregated"), ("b", "decode"), ("c", "aggregated"), ("d", "aggregated")):
        model.submit(request(name, [ord(name)] * 5, 30, stage=stage))  # type: ignore[arg-type]
    assert model.fetches() == []  # a is before it
    step = model.step()
    assert step is not None
    assert [first.request_id for first in step.first_tokens] == ["a", "c", "d"]
    assert model.fetches() == [Fetch("b", 1, 0, 2)]
    assert model.fetched("b")
    model.submit(request("e", [1], 1, stage="decode"))
    step = model.step()
    assert step is not None
    assert ([first.request_id for first in step.first_tokens], model.fetches()) == ([], [])
    model.cancel("a")
    assert model.fetches() == []  # b has its place
    step = model.step()
    assert step is not None
    assert [first.request_id for first in step.first_tokens] == ["b"]


def test_reset_forgets_what_is_kept_fetched_and_loaded() -> None:
    model = engine(request("kept", list(range(10)), 1, stage="prefill"), match=Tier(PROMPT).match)
    run(model)
    for name in ("a", "b"):
        model.submit(request(name, list(range(50, 60)), 1, stage="decode"))
        model.fetches()
    assert model.fetched("b")
    model.submit(request("loading", PROMPT, 3))
    assert model.step() is not None
    model.reset()
    assert [model.release("kept"), model.fetched("a"), model.loaded("loading", 1)] == [False] * 3
    assert (model.step(), model.loads(), model.pool.used, model.pool.content()) == (None, [], 0, frozenset())
    model.submit(request("kept", [1], 1))
    assert finished(run(model))


@examples(3)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 25)), min_size=1, max_size=8),
    before=st.integers(0, 4),
    until_us=st.sampled_from([0, 100_000]),
    tail=st.integers(1, 2),
    is_loaded=st.booleans(),
)
def test_a_fetched_or_loaded_prompt_is_answered_as_one_that_is_in_the_cache(
    lengths: list[tuple[int, int]], before: int, until_us: int, tail: int, is_loaded: bool
) -> None:
    """With room and seats for all, and KV that arrives before the next step."""
    prompts = [[number * 100 + at for at in range(blocks * BLOCK + tail)] for number, (blocks, _) in enumerate(lengths)]
    histories = []
    for is_cached in (False, True):
        tier = Tier() if is_cached or not is_loaded else Tier(*prompts)
        model = EngineModel(config(kv_blocks_total=200, max_num_seqs=16, timing=RecordingTiming()), tier.match)
        if is_cached:
            model.warm([block for prompt in prompts for block in hashes(prompt)])
        steps: list[EngineStep] = []

        def step(model: EngineModel = model, steps: list[EngineStep] = steps) -> bool:
            for fetch in model.fetches():
                assert model.fetched(fetch.request_id)
            if (step := model.step(until_us)) is not None and step.duration_us:
                steps.append(step)
            new = model.loads()
            for load in new:
                assert model.loaded(load.request_id, load.blocks)
            return step is not None or bool(new)

        stage: EngineStage = "aggregated" if is_cached or is_loaded else "decode"
        for number, (_, max_tokens) in enumerate(lengths):
            model.submit(request(f"r{number}", prompts[number], max_tokens, seed=number, stage=stage))
            for _ in range(before):
                step()
        while step():
            pass
        histories.append(steps)
    brought, cached = histories
    assert answers(brought) == answers(cached)
    ends = [{end.request_id: end for end in finished(steps)} for steps in histories]
    if tail == 1:  # a fetch brings all tokens but the last one, and the cache only full blocks
        assert ends[0] == ends[1]
    if tail == 1 and not is_loaded:
        for one, other in zip(brought, cached, strict=True):
            assert (one.duration_us, one.iterations, one.load) == (other.duration_us, other.iterations, other.load)
            assert (one.first_tokens, one.finished) == (other.first_tokens, other.finished)


# Any history


STAGES: tuple[EngineStage, ...] = ("aggregated", "prefill", "decode")


class History:
    """A history of one model, with whoever fetches, loads and keeps. It ends with all of that done and released.

    A tier gets every stored block, and loses every `lost`-th block that it has.
    """

    def __init__(self, sizes: dict[str, int], lost: int) -> None:
        self.tier = Tier()
        self.lost = lost
        self.model = EngineModel(config(**sizes), self.tier.match)
        self.steps: list[EngineStep] = []
        self.fetching: list[str] = []
        self.kept: list[str] = []
        self.loads: list[Load] = []
        self.steps_before_clear = 0
        self.is_cleared = False
        self.wanted: dict[str, tuple[EngineStage, int]] = {}
        self.gone: set[str] = set()

    def do(self, action: str, prompt: list[int], number: int) -> None:
        match action:
            case "submit":
                name, stage = f"r{len(self.wanted)}", STAGES[number % 3]
                self.wanted[name] = stage, number
                self.model.submit(request(name, prompt, number, seed=number, stage=stage))
            case "step":
                for _ in range(number):
                    self.step()
            case "fetched" if self.fetching:
                name = self.fetching.pop(number % len(self.fetching))
                assert self.model.fetched(name) == (name not in self.gone) or self.is_cleared
            case "loaded" if self.loads:
                load = self.loads.pop(number % len(self.loads))
                arrived = self.model.loaded(load.request_id, number % (load.blocks + 1))
                assert arrived or load.request_id in self.gone or self.is_cleared
            case "release" if self.kept:
                name = self.kept.pop(number % len(self.kept))
                assert self.model.release(name) == (name not in self.gone) or self.is_cleared
            case "cancel" if self.model.cancel(f"r{number}"):
                assert f"r{number}" in self.wanted.keys() - self.gone
                assert all(end.request_id != f"r{number}" for end in finished(self.steps))
                self.gone.add(f"r{number}")
            case "clear":
                self.model.clear_cache()
                assert self.model.pool.content() == set()
                self.steps_before_clear = len(self.steps)
                self.is_cleared = True
            case _:
                pass

    def step(self) -> bool:
        self.fetching += [fetch.request_id for fetch in self.model.fetches()]
        step = self.model.step()
        if step is not None:
            self.steps.append(step)
            self.kept += [one.request_id for one in step.computed]
            for change in step.cache_changes:
                if isinstance(change, Stored):
                    self.tier.content.update(block for block in change.hashes if block % self.lost)
        new = self.model.loads()
        self.loads += new
        return step is not None or bool(new)

    def end(self) -> None:
        while self.step() or self.fetching or self.loads or self.kept:
            for action in ("fetched", "loaded", "release"):
                self.do(action, [], 7)


ACTIONS = ("submit", "submit", "step", "step", "fetched", "loaded", "release", "cancel", "clear")


@examples(3)
@given(
    sizes=sizes,
    lost=st.sampled_from([1, 2, 5, 1 << 62]),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), prompts, st.integers(1, 25)), max_size=60),
)
def test_any_history_conserves_requests_tokens_and_blocks(
    sizes: dict[str, int], lost: int, actions: list[tuple[str, list[int], int]]
) -> None:
    history, again = History(sizes, lost), History(sizes, lost)
    for one in (history, again):
        for action in actions:
            one.do(*action)
        one.end()
    assert again.steps == history.steps
    ends = finished(history.steps)
    event(f"waited: {any(step.load.waiting for step in history.steps)}")
    computed = [one.request_id for step in history.steps for one in step.computed]
    assert len(set(computed)) == len(computed)
    assert {end.request_id for end in ends} | set(computed) | history.gone == set(history.wanted)
    output = answers(history.steps)
    for end in ends:
        stage, number = history.wanted[end.request_id]
        assert stage != "prefill"
        assert end.output_tokens == number
        assert output[end.request_id] == generate_tokens(number, 0, number, VOCABULARY)
        assert 0 <= end.cached_tokens < end.prompt_tokens
    assert not output.keys() & set(computed)
    assert all(one.load.running <= sizes["max_num_seqs"] for one in history.steps)
    assert replay_cache(history.steps[history.steps_before_clear :]) == history.model.pool.content()
    assert (history.model.pool.used, history.model.load().waiting) == (0, 0)


@examples(2)
@given(
    sizes=sizes,
    requests=st.lists(st.tuples(prompts, st.integers(1, 25)), max_size=12),
    until_us=st.sampled_from([0, 100_000]),
)
def test_a_tier_that_has_nothing_changes_nothing(
    sizes: dict[str, int], requests: list[tuple[list[int], int]], until_us: int
) -> None:
    histories = []
    for match in (None, Tier().match):
        model = EngineModel(config(**sizes), match)
        for number, (prompt, max_tokens) in enumerate(requests):
            model.submit(request(f"r{number}", prompt, max_tokens, seed=number))
        histories.append(run(model, until_us))
        assert model.loads() == []
    assert histories[0] == histories[1]


@examples(3)
@given(
    sizes=sizes,
    requests=st.lists(st.tuples(prompts, st.integers(1, 25)), max_size=12),
    load_us=st.integers(1, 100_000),
)
def test_iterations_made_at_once_until_a_load_ends_are_the_same_as_single_ones(
    sizes: dict[str, int], requests: list[tuple[list[int], int]], load_us: int
) -> None:
    histories = []
    for at_once in (False, True):
        tier = Tier(*(prompt for prompt, _ in requests[::2]))
        model = EngineModel(config(**sizes), tier.match)
        for number, (prompt, max_tokens) in enumerate(requests):
            model.submit(request(f"r{number}", prompt, max_tokens, seed=number))
        now_us = 0
        loads: list[tuple[int, Load]] = []
        ends: dict[str, tuple[int, int]] = {}
        while True:
            for end_us, load in [one for one in loads if one[0] <= now_us]:
                loads.remove((end_us, load))
                assert model.loaded(load.request_id, load.blocks)
            until_us = (loads[0][0] if loads else 1 << 40) - now_us
            step = model.step(until_us if at_once else 0)
            loads += [(now_us + load_us, load) for load in model.loads()]
            if step is not None:
                now_us += step.duration_us
                ends.update((end.request_id, (now_us, end.cached_tokens)) for end in step.finished)
            elif loads:
                now_us = loads[0][0]
            else:
                break
        assert len(ends) == len(requests)
        histories.append(ends)
    assert histories[0] == histories[1]


def test_cancelling_during_or_after_a_fetch_frees_the_blocks() -> None:
    model = engine(request("first", [1] * 5, 5), request("a", list(range(10)), 3, stage="decode"))
    model.step()
    assert model.cancel("a")  # it has its blocks, and no fetch was requested
    assert model.fetches() == []
    model.submit(request("b", list(range(10)), 3, stage="decode"))
    model.submit(request("c", list(range(50, 60)), 3, stage="decode"))
    assert [fetch.request_id for fetch in model.fetches()] == ["b", "c"]
    assert model.cancel("b")
    assert not model.fetched("b")
    assert model.fetched("c")
    assert model.cancel("c")
    assert [model.cancel("first"), model.pool.used] == [True, 0]
    # What was stored when it came is reported, although no sequence runs.
    step = model.step()
    assert step is not None
    assert (step.duration_us, step.iterations) == (0, 0)
    assert replay_cache([step]) == set(hashes(list(range(50, 60)))) <= model.pool.content()
    assert model.step() is None


def test_a_cleared_cache_computes_what_was_being_loaded() -> None:
    tier = Tier(PROMPT, [9] * 12)
    model = EngineModel(config(max_num_seqs=2), tier.match)
    model.submit(request("a", PROMPT, 3))
    model.submit(request("b", [9] * 12, 3, stage="decode"))
    assert [load.request_id for load in loading(model)] == ["a", "b"]
    model.clear_cache()
    assert (model.pool.content(), model.pool.used, model.load().waiting) == (frozenset(), 0, 2)
    assert not model.loaded("a", 4)
    step = model.step()
    assert step is not None
    assert model.loads() == []
    assert model.fetches() == [Fetch("b", 1, 0, 3)]
    assert model.fetched("b")
    steps = [step, *run(model)]
    assert {end.request_id: end.cached_tokens for end in finished(steps)} == {"a": 0, "b": 11}
    assert replay_cache(steps) == model.pool.content()
