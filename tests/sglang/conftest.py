"""Real SGLang on a CPU. Runs in `.venv-sglang` (`make test-sglang`); elsewhere tests are skipped with the reason."""

import importlib.util
import os
from pathlib import Path

import pytest

from tests.engines.conftest import model, oracle  # importing it also sets the environment of both engines
from tests.sglang.sglang_settings import ENVIRONMENT

__all__ = ["model", "oracle"]  # fixtures

FOLDER = Path(__file__).parent
TIMEOUT_S = 300  # of one test; starting an engine is in the first one's

os.environ.update(ENVIRONMENT)  # also of the processes that tests start
MISSING = [name for name in ("sglang", "torch", "transformers") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = f"no {', '.join(MISSING)} here: `make test-sglang` has an environment of its own"
    for item in items:
        if FOLDER in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::(forebay|infra|tests)"))  # torch warns
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=reason))
