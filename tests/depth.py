"""The depth of tests: the Hypothesis profile sets the number of examples and whether cases are sampled.

`quick` is the default, `full` is used by CI, and `explore` searches with new examples. Tests do not set a number of
examples; a test that needs more or fewer examples scales the number of the profile.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings

# On a busy machine generation is slow, which is not a fault of the test.
UNHURRIED = [HealthCheck.too_slow]
EXAMPLES = {"quick": 20, "full": 60, "explore": 1_000}
TIMEOUT_S = {"quick": 120, "full": 300, "explore": 7_200}  # per Hypothesis test
EXAMPLES_MIN = 5

Case = TypeVar("Case")


def register() -> None:
    """Register the profiles and load `quick`; `--hypothesis-profile` replaces it before test modules are imported."""
    for name, count in EXAMPLES.items():
        settings.register_profile(
            name,
            max_examples=count,
            derandomize=name != "explore",
            deadline=None,
            print_blob=True,
            suppress_health_check=UNHURRIED,
        )
    settings.load_profile("quick")


def profile() -> str:
    name = settings.get_current_profile_name()
    return name if name in EXAMPLES else "full"


def is_quick() -> bool:
    """Return whether the tests run at the depth of `make test`."""
    return profile() == "quick"


def examples(scale: float, **changes: Any) -> settings:
    """Return settings with `scale` times the examples of the profile, and with other changes."""
    return settings(max_examples=max(EXAMPLES_MIN, round(settings().max_examples * scale)), **changes)


def sampled(cases: Sequence[Case], count: int) -> Sequence[Case]:
    """Return `count` evenly spaced cases under `quick`, the first and the last among them; otherwise all."""
    if not is_quick() or len(cases) <= count:
        return cases
    last = len(cases) - 1
    return [cases[round(number * last / (count - 1))] for number in range(count)]
