"""Real engines on a CPU: a tiny model, and the settings under which vLLM needs neither a network nor a GPU.

Runs in `.venv-engines` (`make test-engines`); elsewhere every test is skipped with the reason.
"""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

from tests.engines.oracle import Transformers
from tests.engines.vllm_settings import ENVIRONMENT
from tests.integration.conftest import kafka, local_kafka, redis_url

__all__ = ["kafka", "local_kafka", "redis_url"]  # fixtures: the parts are those of the integration tests

FOLDER = Path(__file__).parent
TIMEOUT_S = 300  # of one test; starting engines is in the first one's
os.environ.update(ENVIRONMENT)  # also of the processes that tests start
MISSING = [name for name in ("torch", "transformers", "vllm") if importlib.util.find_spec(name) is None]


def pytest_configure(config: pytest.Config) -> None:
    # vLLM leaves contexts of its own to the garbage collector, which may come round to them after the last test, when
    # the filters are those of this moment. Ours are `zmq.asyncio.Context`s.
    text = r"Unclosed context <zmq\.Context\(\)"
    config.addinivalue_line("filterwarnings", f"ignore:{text}:ResourceWarning")
    warnings.filterwarnings("ignore", text, ResourceWarning)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = f"no {', '.join(MISSING)} here: `make test-engines` has an environment of its own"
    for item in items:
        if FOLDER in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            item.add_marker(pytest.mark.filterwarnings("ignore", "error:::(forebay|infra|tests)"))  # engines warn a lot
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=reason))
    # What the others lean on comes first; it also leaves vLLM's caches warm for those that start two at once.
    items.sort(key=lambda item: item.path != FOLDER / "test_oracle.py")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.harness.models import make_tiny_model  # noqa: PLC0415 - imports torch

    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model.write_model(directory)
    return directory


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.harness.models import make_tiny_model  # noqa: PLC0415 - imports torch

    directory = tmp_path_factory.mktemp("lora") / "tiny-lora"
    make_tiny_model.write_lora(directory)
    return directory


@pytest.fixture(scope="session")
def oracle(model: Path) -> Transformers:
    return Transformers(model)
