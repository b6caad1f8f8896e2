"""Settings of the whole suite: Hypothesis draws the same examples everywhere unless asked to explore."""

import pytest
from hypothesis import HealthCheck, settings

# A busy machine makes drawing slow, which says nothing about the test.
UNHURRIED = [HealthCheck.too_slow]

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=UNHURRIED)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=2_000)
settings.load_profile("ci")

DRAWN_S = 300


@pytest.hookimpl(trylast=True)  # Hypothesis marks its own in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with many examples have more time: a timeout within one is taken for a strategy that draws otherwise."""
    for item in items:
        if item.get_closest_marker("hypothesis") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(DRAWN_S))


def pytest_report_header() -> str:
    profile = settings.get_current_profile_name()
    seeded = "derandomised" if settings().derandomize else "random; failures print their seed"
    return f"hypothesis: profile {profile} ({seeded}); --hypothesis-profile=explore draws new examples"
