"""Tables and lines on a narrow terminal: ids stay whole, so that a user can copy them."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.control import QueueConfig
from forebay.events.decisions import RequestRouted
from tests.cli.in_process import on_terminal
from tests.core.worlds import PROMPTS, request
from tests.replay.recorder import Recorder, fleet

LOGS = Path(__file__).parents[1] / "logs"
WORKERS = [f"gpu-node-{number}.rack-17.cluster.example.com-12345" for number in range(3)]
REQUESTS = [f"chatcmpl-{number:032x}" for number in range(6)]
IGNORED = re.compile(r"[\u2500-\u257f]+|\d+ s ago")  # frames of tables, whose lengths differ, and passing seconds
WIDE = 2_000


def words(text: str) -> Counter[str]:
    return Counter(IGNORED.sub(" ", text).split())


def routed(**router: Any) -> Recorder:
    made = fleet(*WORKERS, **router)
    for number, name in enumerate(REQUESTS):
        made("requests", request(name, PROMPTS[number % 3]))
    return made


def diverging() -> Recorder:
    """Return a recording in which a decision names another worker than the one that replay selects."""
    made = routed()
    at = [number for number, record in enumerate(made.journal) if isinstance(record, RequestRouted)][2]
    was = made.journal[at]
    assert isinstance(was, RequestRouted)
    made.journal[at] = msgspec.structs.replace(was, worker_id=next(one for one in WORKERS if one != was.worker_id))
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Recorder], Path]:
    def written(made: Recorder) -> Path:
        path = tmp_path / "run.db"
        asyncio.run(made.log(path)).close()
        return path

    return written


def check(*command: object) -> str:
    """Check that a command prints the same words on a terminal of any width. Return its output."""
    text = on_terminal(WIDE, *command)
    for columns in (40, 60, 80):
        assert words(on_terminal(columns, *command)) == words(text), columns
    return text


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("explain", "LOG", REQUESTS[1]), [REQUESTS[1], *WORKERS]),
        (("replay", "at", "LOG"), [*REQUESTS, *WORKERS]),
        (("verify", "LOG"), []),
        (("replay", "diff", "LOG", "--set", "mode=round-robin"), [*REQUESTS[:2], *WORKERS]),
        (("status", "LOG"), WORKERS),
        (("topics", "list", "LOG"), []),
    ],
)
def test_commands_that_read_a_log_keep_ids_whole(
    command: tuple[str, ...], shown: list[str], write: Callable[[Recorder], Path]
) -> None:
    log = write(routed())
    text = check(*(log if part == "LOG" else part for part in command))
    assert all(name in text for name in shown)


def test_requests_in_the_queue_keep_their_ids_whole(write: Callable[[Recorder], Path]) -> None:
    assert REQUESTS[5] in check("replay", "at", write(routed(queue=QueueConfig(threshold=0.01))))


def test_a_divergence_keeps_ids_whole(write: Callable[[Recorder], Path]) -> None:
    log = write(diverging())
    assert WORKERS[0] in check("verify", log)
    assert WORKERS[0] in check("explain", log, REQUESTS[2])


@pytest.mark.parametrize("name", ["disaggregation", "lost-workers", "queue", "temperature"])
def test_tables_of_golden_recordings_keep_words_whole(name: str) -> None:
    recording = LOGS / f"{name}.rec"
    check("replay", "at", recording)
    check("status", recording)
    check("replay", "diff", recording, "--set", "mode=round-robin")


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("config", "worker", "--id", WORKERS[0]), WORKERS[0]),
        (
            ("workload", "show", "synthetic:requests=9,prompt=100,output=20,groups=3,turns=2"),
            "synthetic:requests=9,prompt=100,output=20,groups=3,turns=2",
        ),
        (
            ("simulate", "synthetic:requests=3", "--policy", "kv:temperature=0.2,overlap_score_credit=0.5"),
            "kv:temperature=0.2,overlap_score_credit=0.5",
        ),
        (
            ("sweep", "synthetic:requests=3", "--policy", "kv:overlap_score_credit=0.5", "--set", "temperature=0,1"),
            "kv:overlap_score_credit=0.5",
        ),
    ],
)
def test_other_tables_keep_names_whole(command: tuple[str, ...], shown: str) -> None:
    assert shown in check(*command)
