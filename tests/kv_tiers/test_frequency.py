"""The offload filter against its definition: 1 at first, doubled per offer, 1 less per tick, bounded."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.kv_tiers.frequency import FREQUENCY_MAX, FrequencyFilter, FrequencyLimits

keys = st.integers(0, 6)


@given(st.lists(st.none() | st.lists(keys, max_size=5)))
def test_frequencies_follow_the_definition(steps: list[list[int] | None]) -> None:
    one: FrequencyFilter[int] = FrequencyFilter(FrequencyLimits())
    expected: dict[int, int] = {}
    for step in steps:
        if step is None:
            one.tick()
            expected = {key: count - 1 for key, count in expected.items() if count > 1}
            continue
        one.offer(step)
        for key in step:
            expected[key] = min(2 * expected[key], FREQUENCY_MAX) if key in expected else 1
        assert one.passing(range(7)) == [key for key in range(7) if expected.get(key, 0) >= 2]
    assert {key: one.frequency(key) for key in range(7)} == {key: expected.get(key, 0) for key in range(7)}
    assert len(one) == len(expected)


@given(st.lists(st.none() | st.lists(st.integers(0, 20), max_size=8)), st.integers(1, 8))
def test_the_filter_is_bounded(steps: list[list[int] | None], keys_max: int) -> None:
    one: FrequencyFilter[int] = FrequencyFilter(FrequencyLimits(keys_max=keys_max))
    for step in steps:
        if step is None:
            one.tick()
        else:
            one.offer(step)
            assert not step or one.frequency(step[-1]) >= 1
        assert len(one) <= keys_max


def test_a_full_filter_forgets_the_rarest_key() -> None:
    one: FrequencyFilter[str] = FrequencyFilter(FrequencyLimits(keys_max=3))
    one.offer(["a", "a", "b", "c", "c", "d"])
    assert [one.frequency(key) for key in "abcd"] == [2, 0, 2, 1]
    one.offer(["d", "e"])
    assert [one.frequency(key) for key in "acde"] == [0, 2, 2, 1]


def test_clear_forgets_all_keys() -> None:
    one: FrequencyFilter[str] = FrequencyFilter(FrequencyLimits())
    one.offer("aab")
    one.clear()
    assert (len(one), one.frequency("a")) == (0, 0)
    one.offer("a")
    one.tick()
    assert len(one) == 0
