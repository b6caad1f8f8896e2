"""Settings of the whole suite: the depth of Hypothesis tests and how long they may take."""

import gc
import signal

import pytest
from hypothesis import settings

from tests import certificates, depth

depth.register()
certificates.leave_out()
# Collecting tests creates a million objects that stay. Garbage collection would visit them again and again, which takes
# almost half of the CPU time of collecting.
gc.disable()
LONGEST = ("test_hash_seeds.py", "test_pages.py")

# A shell starts background jobs with SIGINT ignored. Commands would inherit that, and no test could interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # Hypothesis marks its tests in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Extend the timeout of Hypothesis tests, and run the longest files first.

    Hypothesis reports a timeout in an example as flaky. A long file at the end would keep one process busy alone.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)  # stable sort
    timeout = pytest.mark.timeout(depth.TIMEOUT_S[depth.profile()])
    for item in items:
        has_own = item.get_closest_marker("timeout") and depth.profile() != "explore"
        if item.get_closest_marker("hypothesis") and not has_own:
            item.add_marker(timeout, append=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, which each process of pytest does on its own."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    seeded = "the same in each run" if settings().derandomize else "new; --hypothesis-seed repeats them"
    return f"depth: Hypothesis profile {depth.profile()}, {settings().max_examples} examples ({seeded})"
