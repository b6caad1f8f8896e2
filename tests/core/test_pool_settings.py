"""Settings of pools: the events that lead to them, and the settings in effect."""

import random
from typing import ClassVar, get_args

import pytest

from forebay.core.state.pool_settings import RULES, PoolSettings
from forebay.core.state_machine import digest_of
from forebay.events.control import BusyThresholds, BusyThresholdsSet, PolicySet, PoolConfigured, RouterConfig
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRule
from tests.core.worlds import OTHER_POLICY, setting
from tests.depth import sampled


@pytest.mark.parametrize("seed", sampled(range(200), 60))
def test_the_events_of_settings_lead_to_the_same_settings(seed: int) -> None:
    chance = random.Random(seed)
    settings, again = PoolSettings(), PoolSettings()
    thresholds: dict[str, tuple[str, BusyThresholds]] = {}  # of each pool with its model, from a second fold
    changes = [setting(chance) for _ in range(chance.randint(1, 60))]
    for event in changes:
        settings.apply(event)
        assert not isinstance(event, PoolRule) or event.summary.startswith("Pool")
        if isinstance(event, PoolConfigured):
            thresholds[event.pool] = event.model, event.router.busy
        elif isinstance(event, BusyThresholdsSet):
            same = [pool for pool, (model, _) in thresholds.items() if model == event.model]
            thresholds |= dict.fromkeys(same, (event.model, event.thresholds))
    assert {name: (pool.model, pool.router.busy) for name, pool in settings.in_effect().items()} == thresholds
    for event in settings.events():
        again.apply(event)
    assert again.snapshot() == settings.snapshot()
    assert len(settings.events()) <= len(changes) + len(settings.pools), "superseded changes are left out"
    assert set(RULES) == set(get_args(PoolRule)), "a snapshot has a field for each"


def test_operators_change_the_settings_in_effect() -> None:
    settings, busy = PoolSettings(), BusyThresholds(active_prefill_tokens_threshold=5)
    settings.apply(PoolConfigured(pool="a", model="m", block_size=16))
    settings.apply(BusyThresholdsSet(model="m", thresholds=busy))
    settings.apply(PolicySet(model="m", pool="a", mode=OTHER_POLICY))
    settings.apply(PoolCanarySet(model="m", pool="a", base="b", share=0.5))
    assert settings.in_effect()["a"].router == RouterConfig(busy=busy, mode=OTHER_POLICY)
    assert settings.configured()["a"].router == RouterConfig()
    assert settings.policies() == (OTHER_POLICY,)
    assert [(one.base, one.share) for one in settings.canaries("m")] == [("b", 0.5)]
    assert [settings.canary("m", pool) for pool in "ab"] == [*settings.canaries("m"), None]


class Grown(PoolDrainSet, frozen=True, kw_only=True):
    ADDED: ClassVar = {"late": 0}
    late: int = 0


def test_a_setting_that_was_added_changes_a_digest_only_if_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, Grown, "drains")
    for changes, fields in (({}, ()), ({"late": 2}, [("late", 2)]), ({"late": 2, "operator": "o"}, ["o", ("late", 2)])):
        settings = PoolSettings()
        settings.apply(Grown(model="m", pool="a", drained=True, **changes))
        assert settings.digest_of_rules() == digest_of(("m", "a", True, 0, *fields))
