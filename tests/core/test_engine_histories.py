"""The engine model through whatever may happen to it: nothing is lost, and the same is answered in another way."""

from hypothesis import event, given
from hypothesis import strategies as st

from forebay.engine_model.model import EngineModel, EngineStage, EngineStep, Load, Stored
from forebay.engine_model.sequence import generate_tokens
from tests.core.engine_runs import (
    BLOCK,
    VOCABULARY,
    RecordingTiming,
    Tier,
    answers,
    config,
    finished,
    hashes,
    replay_cache,
    request,
    run,
)
from tests.depth import examples


@examples(2)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 25)), min_size=1, max_size=8),
    before=st.integers(0, 4),
    until_us=st.sampled_from([0, 100_000]),
)
def test_a_prompt_loaded_at_once_is_answered_as_one_that_is_in_the_cache(
    lengths: list[tuple[int, int]], before: int, until_us: int
) -> None:
    """With room and seats for all, and loads that end before the next step."""
    prompts = [[number * 100 + at for at in range(blocks * BLOCK + 2)] for number, (blocks, _) in enumerate(lengths)]
    histories = []
    for is_loaded in (True, False):
        tier = Tier(*prompts) if is_loaded else Tier()
        model = EngineModel(config(kv_blocks_total=200, max_num_seqs=16, timing=RecordingTiming()), tier.match)
        if not is_loaded:
            model.warm([block for prompt in prompts for block in hashes(prompt)])
        steps: list[EngineStep] = []

        def step(model: EngineModel = model, steps: list[EngineStep] = steps) -> bool:
            if (step := model.step(until_us)) is not None and step.duration_us:
                steps.append(step)
            new = model.loads()
            for load in new:
                assert model.loaded(load.request_id, load.blocks)
            return step is not None or bool(new)

        for number, (_, max_tokens) in enumerate(lengths):
            model.submit(request(f"r{number}", prompts[number], max_tokens, seed=number))
            for _ in range(before):
                step()
        while step():
            pass
        histories.append(steps)
    loaded, cached = histories
    assert answers(loaded) == answers(cached)
    ends = [{end.request_id: end for step in steps for end in step.finished} for steps in histories]
    assert ends[0] == ends[1]


sizes = st.fixed_dictionaries(
    {
        "kv_blocks_total": st.sampled_from([15, 18, 40]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 40),
    }
)
drawn_prompts = st.builds(
    lambda root, size: [root] * min(size, 3) + list(range(size)), st.integers(0, 2), st.integers(1, 30)
)
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
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), drawn_prompts, st.integers(1, 25)), max_size=60),
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
    requests=st.lists(st.tuples(drawn_prompts, st.integers(1, 25)), max_size=12),
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
    requests=st.lists(st.tuples(drawn_prompts, st.integers(1, 25)), max_size=12),
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
