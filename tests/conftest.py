"""Settings of the whole suite: Hypothesis draws the same examples everywhere unless asked to explore."""

from hypothesis import HealthCheck, settings

# A busy machine makes drawing slow, which says nothing about the test.
UNHURRIED = [HealthCheck.too_slow]

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=UNHURRIED)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=2_000)
settings.load_profile("ci")


def pytest_report_header() -> str:
    profile = settings.get_current_profile_name()
    seeded = "derandomised" if settings().derandomize else "random; failures print their seed"
    return f"hypothesis: profile {profile} ({seeded}); --hypothesis-profile=explore draws new examples"
