"""Terminal output of commands that read a log: control characters, wide tables, ids, and times as arguments."""

import io
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from rich.console import Console

from forebay.cli.common.tables import in_markup
from forebay.cli.common.terminal import printable
from forebay.cli.common.times import span_us, time_us
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.decisions import RequestRouted
from forebay.transport.base import Record
from forebay.transport.readable import readable
from tests.cli.in_process import error_of, forebay, on_terminal
from tests.cli.logs import written
from tests.core.worlds import PROMPTS, request
from tests.harness import fork_server
from tests.harness.samples import SAMPLES
from tests.replay.recorder import Recorder, fleet

PATIENCE_S = 60.0
HOSTILE = "[bold]\x1b[2J\u202er\r\n"
NOISY = """
print("import")
class Noisy:
    def decide(self, world, request):
        print("decide")
        return 0
"""


class First:
    """The policy of `NOISY` without its output."""

    def decide(self, world: Any, request: Any) -> int:
        return 0


def routed(*names: str, custom: CustomPolicies = ONLY_BUILT_IN, **router: Any) -> Recorder:
    made = Recorder(custom)
    made.fleet("a", "b", **router)
    for number, name in enumerate(names):
        made("requests", request(name, PROMPTS[number]))
    return made


def diverging(path: Path) -> int:
    """Write a log whose second decision diverges and return the offset of that decision."""
    made = routed("r0", "r1", "r2")
    at = [number for number, record in enumerate(made.journal) if isinstance(record, RequestRouted)][1]
    was = made.journal[at]
    assert isinstance(was, RequestRouted)
    made.journal[at] = msgspec.structs.replace(was, worker_id="b" if was.worker_id == "a" else "a")
    written(made, path)
    return at


def test_control_characters_are_escaped() -> None:
    assert printable(HOSTILE) == "[bold]\\x1b[2J\\u202er\\r\\n"
    assert printable("größer 模型") == "größer 模型"
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as shown:
        console.print(in_markup(HOSTILE))
    assert shown.get() == printable(HOSTILE) + "\n"


def test_control_characters_in_ids_are_escaped(tmp_path: Path) -> None:
    path = written(routed("r0", "r1", HOSTILE), tmp_path / "log.db")
    for command in (
        ("explain", path, HOSTILE),
        ("explain", path, HOSTILE[:8]),
        ("explain", path, HOSTILE + "?"),
        ("replay", "at", path),
        ("replay", "diff", path, "--set", "busy.active_prefill_tokens_threshold=1"),
    ):
        run = forebay(*command)
        output = run.stdout + run.stderr
        assert "[bold]\\x1b[2J" in output, command
        assert not {"\x1b", "\u202e", "\r"} & set(output), command


def test_control_characters_in_a_divergence_are_escaped(tmp_path: Path) -> None:
    made = routed(HOSTILE)
    was = made.journal[-1]
    assert isinstance(was, RequestRouted)
    made.journal[-1] = msgspec.structs.replace(was, worker_id="\x7f\x9b[red]")
    run = forebay("verify", written(made, tmp_path / "log.db"))
    assert run.returncode == 1
    assert "worker_id: recorded \\x7f\\x9b[red], derived" in run.stdout
    assert not {"\x1b", "\u202e", "\x7f", "\x9b"} & set(run.stdout)


def test_at_stops_at_a_divergence(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    at = diverging(path)
    for options in (("--offset", at), (), ("--json",)):
        assert f"log.db: journal record {at} does not follow from the events (differs in worker_id)" in error_of(
            "replay", "at", path, *options, code=1
        )
    assert forebay("replay", "at", path, "--offset", at - 1).returncode == 0


@pytest.mark.slow
def test_output_of_a_policy_is_separate_from_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = routed("r0", "r1", custom={"noisy.Noisy": First}, mode="noisy.Noisy")
    path = written(made, tmp_path / "log.db")
    for command in (
        ("verify", path),
        ("explain", path, "r1"),
        ("replay", "at", path),
        ("replay", "diff", path, "--set", "attempts_max=7"),
    ):
        arguments = map(str, (*command, "--allow-policy", "noisy.Noisy", "--json"))
        environment = {**os.environ, "NO_COLOR": "1"}
        run = fork_server.run(*arguments, folder=tmp_path, environment=environment, timeout_s=PATIENCE_S)
        assert run.returncode == 0, run.stderr
        assert "decide" in run.stderr
        assert isinstance(json.loads(run.stdout), dict)


LOGS = Path(__file__).parents[1] / "logs"
WORKERS = [f"gpu-node-{number}.rack-17.cluster.example.com-12345" for number in range(3)]
REQUESTS = [f"chatcmpl-{number:032x}" for number in range(6)]
IGNORED = re.compile(r"[\u2500-\u257f]+|\d+ s ago")  # frames of tables, whose lengths differ, and passing seconds
WIDE = 2_000


def words(text: str) -> Counter[str]:
    return Counter(IGNORED.sub(" ", text).split())


def routed_names(**router: Any) -> Recorder:
    made = fleet(*WORKERS, **router)
    for number, name in enumerate(REQUESTS):
        made("requests", request(name, PROMPTS[number % 3]))
    return made


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
def test_commands_that_read_a_log_keep_ids_whole(command: tuple[str, ...], shown: list[str], tmp_path: Path) -> None:
    log = written(routed_names(), tmp_path / "run.db")
    text = check(*(log if part == "LOG" else part for part in command))
    assert all(name in text for name in shown)


@pytest.mark.parametrize("name", ["disaggregation", "lost-workers", "queue", "temperature"])
def test_tables_of_golden_recordings_keep_words_whole(name: str) -> None:
    recording = LOGS / f"{name}.rec"
    check("replay", "at", recording)
    check("status", recording)
    check("replay", "diff", recording, "--set", "mode=round-robin")


SECOND = 1_000_000
NOON_US = 1_767_268_800 * SECOND  # 2026-01-01T12:00:00Z


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the local time zone to UTC+2."""
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("90s", 90 * SECOND),
        ("5m", 300 * SECOND),
        ("2h", 7_200 * SECOND),
        ("1d", 86_400 * SECOND),
        ("0.5s", SECOND // 2),
        ("1.5h", 5_400 * SECOND),
    ],
)
def test_durations_are_parsed(text: str, span: int) -> None:
    assert span_us("--last", text) == span


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 m", "5w", "0s", "0.0000001s", "1e3s", "5m3s", "nans", "٣s٣"])
def test_invalid_durations_are_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as ended:
        span_us("--last", text)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err.startswith(f"forebay: --last {text}: not a duration; expected ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-01T12:00:00Z", 0),
        ("2026-01-01T12:00:00.25+00:00", 0.25),
        ("2026-01-01T13:00+01:00", 0),
        ("2026-01-01T14:00:00", 0),
        ("2026-01-01 14:01", 60),
        ("2026-01-01", -14 * 3_600),
        ("14:00", 0),
        ("13:59:30", -30),
        ("14:00:00.5", 0.5),
        ("00:00", -14 * 3_600),
        ("-5m", -300),
        ("-0.5s", -0.5),
    ],
)
def test_times_are_parsed(text: str, seconds: float) -> None:
    assert time_us("--from", text, NOON_US) == NOON_US + round(seconds * SECOND)


@pytest.mark.parametrize(
    "text", ["", "yesterday", "25:00", "12:61", "2026-13-01", "--5m", "-5", "1767268800", "9999999"]
)
def test_invalid_times_are_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as ended:
        time_us("--from", text, NOON_US)
    assert ended.value.exit_code == 2
    assert "forebay: --" in capsys.readouterr().err


FULL = sorted(path for path in SAMPLES.glob("*/full.*"))


def shown(path: Path) -> dict[str, Any]:
    topic = json.loads((path.parent / "expected.json").read_text())["topic"].replace("<pool>", "default")
    record = Record(topic, 0, 0, 0, path.read_bytes())
    read: dict[str, Any] = json.loads(json.dumps(readable(record)))
    return read


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.parent.name)
def test_every_event_can_be_shown(path: Path) -> None:
    assert "event" in shown(path)


def test_binary_fields_are_shown_as_their_size() -> None:
    event = shown(SAMPLES / "progress.prefill_finished" / "full.json")["event"]
    assert event["prefilled"]["descriptor"].endswith(" bytes")
