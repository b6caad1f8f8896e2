"""`forebay planner status` on logs, and errors of `planner set`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest

from forebay.events.scaling import PlannerStopped, Reason, ScalingDecided, ScalingEvent, SimulatedSize, SizesSimulated
from forebay.replay.scaling.decisions import OUTCOMES, REASONS, DecisionOutcome, ScalingDecisions
from forebay.replay.scaling.status import PlannerStatus
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, forebay
from tests.cli.scaling_log import DECODE, GROUP, PREFILL, SETTINGS, PlannerDay, a_day, write_log
from tests.core.scaling.scene import observation, worker

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
PREFILL_POOL, DECODE_POOL = f"{GROUP}/prefill", f"{GROUP}/decode"
FIRST, REFUSED, MANUAL, PAUSED, REPLIED, STALE, OPEN = 3, 10, 13, 18, 20, 22, 25


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("scaling") / "day.db", a_day().records)


def words(command: str, arguments: Sequence[object]) -> list[str]:
    """Return the arguments of `forebay planner` that show the status, the history, or a decision after the log."""
    if command == "explain":
        *log, decision = map(str, arguments)
        return ["status", *log, "--decision", decision]
    return ["status", *map(str, arguments), *(["--history"] if command == "history" else [])]


def planner(command: str, *arguments: object, code: int = 0) -> Any:
    run = forebay("planner", *words(command, arguments), "--json")
    assert run.returncode == code, run.stdout + run.stderr
    if command == "explain":  # bases of different methods have no tag
        return json.loads(run.stdout, object_hook=lambda fields: SimpleNamespace(**fields))
    kind: Any = {"status": PlannerStatus, "history": ScalingDecisions}[command]
    return msgspec.json.decode(run.stdout, type=kind)


def text(command: str, *arguments: object, code: int = 0) -> str:
    run = forebay("planner", *words(command, arguments))
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout


def tampered(path: Path, records: Sequence[ScalingEvent], offset: int) -> Path:
    """Write records with a decision that does not follow from those before it."""
    decided = records[offset]
    assert isinstance(decided, ScalingDecided)
    first = msgspec.structs.replace(decided.pools[0], to_size=9)
    wrong = msgspec.structs.replace(decided, pools=(first, *decided.pools[1:]))
    return write_log(path, [*records[:offset], wrong, *records[offset + 1 :]])


def test_the_status_has_planner_pools_and_newest_decisions(log: Path) -> None:
    found = planner("status", log)
    assert (found.planner_id, found.problems, found.paused, found.advisory) == ("p", [], False, False)
    assert (found.method, found.ttft_ms, found.itl_ms, found.gpus, found.gpu_budget) == ("throughput", 500, 50, 14, 16)
    (waiting,) = found.open
    assert (waiting.decision, waiting.pool, waiting.size, waiting.overdue) == (OPEN, PREFILL_POOL, 4, False)
    prefill, decode = found.pools
    assert (prefill.size, prefill.ready, prefill.min_size, prefill.max_size) == (4, 1, 1, 6)
    assert (prefill.ttft_ms, prefill.observed.requests_per_s, prefill.forecast.requests_per_s) == (120, 40, 40)
    assert (prefill.decision.offset, prefill.change.offset, prefill.change.outcome) == (OPEN, OPEN, "open")
    assert (decode.manual_size, decode.manual_by, decode.size) == (5, "alice", 5)
    assert (decode.decision.offset, decode.change.offset, decode.change.outcome) == (OPEN, MANUAL, "applied")
    shown = text("status", log)
    for part in ("5 by alice", "14, at most 16", f"decision {OPEN} since", "1 -> 4", "TTFT 500 ms, ITL 50 ms"):
        assert part in shown


def test_a_planner_that_has_stopped_or_waits_too_long_is_a_problem(tmp_path: Path) -> None:
    day = PlannerDay(msgspec.structs.replace(SETTINGS, action_timeout_s=5.0))
    day.round(20.0, 1, 2)
    day.round(20.0, 1, 2)
    overdue = write_log(tmp_path / "overdue.db", day.records[:-1])
    (problem,) = planner("status", overdue, code=1).problems
    assert problem.startswith(f"decision {FIRST} has no reply for {DECODE_POOL}, {PREFILL_POOL} after 5 s")
    day.add(PlannerStopped(planner_epoch=0, at_us=day.now_us))
    found = planner("status", write_log(tmp_path / "stopped.db", day.records), code=1)
    assert found.problems[0] == "the planner p has stopped, and no other one is active"
    assert found.stopped_us == day.now_us
    assert "problem    the planner p has stopped" in text("status", tmp_path / "stopped.db", code=1)


def test_a_paused_or_advisory_planner_is_shown(tmp_path: Path) -> None:
    day = a_day()
    found = planner("status", write_log(tmp_path / "paused.db", day.records[: PAUSED + 1]))
    assert (found.paused, found.paused_by) == (True, "bob")
    assert "paused by bob since" in text("status", tmp_path / "paused.db")
    advisory = PlannerDay(msgspec.structs.replace(SETTINGS, advisory=True, method="load", min_gpus=2, gpu_budget=0))
    advisory.round(20.0, 1, 2)
    shown = text("status", write_log(tmp_path / "advisory.db", advisory.records))
    assert "advisory: decisions are only recorded" in shown
    assert "no limit, at least 2" in shown


def test_the_history_has_outcome_and_verification_of_each_decision(log: Path) -> None:
    found = planner("history", log)
    assert [(one.offset, one.outcome, one.verification) for one in found.decisions] == [
        (FIRST, "applied", "equal"),
        (7, "unchanged", "equal"),
        (REFUSED, "refused", "equal"),
        (MANUAL, "applied", "equal"),
        (PAUSED, "unchanged", "equal"),
        (REPLIED, "applied", "equal"),
        (STALE, "stale", "stale"),
        (OPEN, "open", "equal"),
    ]
    refused = found.decisions[2]
    (reply,) = refused.replies
    assert (reply.actuator, reply.message) == ("processes", "failed: no free GPU")
    assert [(one.pool, one.from_size, one.to_size, one.proposed, one.reason) for one in refused.pools] == [
        ("prefill", 2, 5, 6, "gpu_budget"),
        ("decode", 4, 5, 14, "gpu_budget"),
    ]
    verification = found.verification
    assert (verification.decisions, verification.equal, verification.stale, verification.different) == (8, 7, 1, 0)
    shown = text("history", log)
    assert re.search(
        rf"{FIRST}\s+2026-05-28T20:26:50Z\s+{PREFILL_POOL}\s+1 -> 2\s+2\s+scale_up\s+applied by processes", shown
    )
    assert "7 of 8 decisions derived again: equal, 1 stale" in shown


def test_the_history_is_selected_by_pool_change_time_and_number(log: Path) -> None:
    changes = planner("history", log, "--pool", DECODE_POOL, "--changes")
    assert [one.offset for one in changes.decisions] == [FIRST, REFUSED, MANUAL]
    assert {one.pool for entry in changes.decisions for one in entry.pools} == {"decode"}
    newest = planner("history", log, "--limit", 2)
    assert ([one.offset for one in newest.decisions], newest.selected) == ([STALE, OPEN], 8)
    assert "the 2 newest of 8 decisions" in text("history", log, "--limit", 2)
    late = planner("history", log, "--from", "2026-05-28T20:27:20Z")
    assert [one.offset for one in late.decisions] == [PAUSED, REPLIED, STALE, OPEN]
    assert "decisions: none" in text("history", log, "--from", "2027-01-01")


def test_a_decision_that_does_not_follow_is_found(tmp_path: Path) -> None:
    path = tampered(tmp_path / "log.db", a_day().records, REFUSED)
    found = planner("history", path)
    assert found.verification.different >= 1
    assert found.verification.first[0].offset == REFUSED
    assert found.verification.first[0].differs == {f"{PREFILL_POOL} to_size": {"recorded": 9, "derived": 5}}
    assert "recorded 9, derived 5" in text("history", path)
    assert "DIFFERENT" in text("explain", path, REFUSED, code=1)
    differs = vars(planner("explain", path, REFUSED, code=1).differs)[f"{PREFILL_POOL} to_size"]
    assert (differs.recorded, differs.derived) == (9, 5)


def test_decisions_of_another_version_are_not_verified(tmp_path: Path) -> None:
    records = a_day().records
    records[0] = msgspec.structs.replace(records[0], rules_version=99)
    path = write_log(tmp_path / "log.db", records)
    run = forebay("verify", path)
    assert (run.returncode, "7 scaling-rules" in run.stderr) == (1, True)
    assert forebay("verify", path, "--allow", "scaling-rules").returncode == 0
    found = planner("explain", path, FIRST)
    assert (found.decision.verification, found.gpus, found.pools[0].proposals) == ("other_rules", None, [])
    assert "a planner of another version made it" in text("explain", path, FIRST)


def test_replay_verify_derives_scaling_decisions_again(log: Path, tmp_path: Path) -> None:
    run = forebay("verify", log, "--json")
    assert (run.returncode, json.loads(run.stdout)["scaling"]["equal"]) == (0, 7), run.stderr
    assert "7 of 8 decisions derived again: equal, 1 stale" in forebay("verify", log).stdout
    different = tampered(tmp_path / "different.db", a_day().records, REFUSED)
    run = forebay("verify", different)
    assert run.returncode == 1
    assert f"{REFUSED}: {PREFILL_POOL} to_size: recorded 9, derived 5" in run.stdout


def test_a_decision_is_explained_by_the_numbers_of_the_formula(log: Path) -> None:
    found = planner("explain", log, FIRST)
    assert (found.decision.offset, found.decision.outcome, vars(found.differs)) == (FIRST, "applied", {})
    prefill, decode = found.pools
    proposal = prefill.proposals[0].proposal
    (stage,) = proposal.basis
    assert (stage.isl, stage.tokens_per_s) == (750, 15_000)
    assert stage.workers == stage.tokens_per_s / stage.worker_tokens_per_s
    assert proposal.size == -(-stage.workers // 1) == prefill.decided.proposed
    (stage,) = decode.proposals[0].proposal.basis
    assert (stage.worker_tokens_per_s, stage.covered) == (1_000, False)
    assert decode.meaning == REASONS["profile_exceeded"]
    shown = text("explain", log, FIRST)
    for part in (
        "20 requests/s x 750 uncached prompt tokens = 15,000 tokens/s",
        "(500 per GPU)",
        "derived again: equal",
    ):
        assert part in shown


def test_limits_budget_guards_and_replies_are_explained(log: Path) -> None:
    refused = planner("explain", log, REFUSED)
    assert (refused.gpus, [pool.limited for pool in refused.pools]) == (18, [6, 6])
    shown = text("explain", log, REFUSED)
    assert "6 for this pool, 18 for all pools; at most 16" in shown
    assert "refused by processes: failed: no free GPU" in shown
    manual = planner("explain", log, MANUAL).pools[1]
    assert (manual.proposals, manual.limited, manual.decided.reason) == ([], None, "manual")
    assert "not derived again, because the decision has no effect" in text("explain", log, STALE)


def test_a_decision_is_found_by_time_or_as_the_latest(log: Path) -> None:
    assert planner("explain", log, "latest").decision.offset == OPEN
    assert planner("explain", log, "2026-05-28T20:26:50Z").decision.offset == FIRST
    assert planner("explain", log, "2026-05-28T20:26:50.000000Z").decision.offset == FIRST
    several = error_of("planner", "status", log, "--decision", "2026-05-28T20:27:10Z")
    assert f"give the offset: {REFUSED} (" in several
    assert "no decision at offset 4; the nearest are 3 (2026-05-28T20:26:50" in error_of(
        "planner", "status", log, "--decision", 4
    )
    assert "no decision at 2026-05-28T20:26:55" in error_of(
        "planner", "status", log, "--decision", "2026-05-28T20:26:55Z"
    )
    assert error_of("planner", "status", log, "--decision", "yesterday").startswith("--decision yesterday: not a time")


def test_the_other_methods_are_explained(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SETTINGS, pools=(PREFILL, DECODE), method="both", min_observations=2)
    both = PlannerDay(settings)
    for load in (1_000, 2_000, 3_000):
        workers = (worker(load, load, ttft_ms=load / 10, itl_ms=load / 100),) * 2
        pools = (observation(2, workers, requests=4, isl=1_000.0, osl=100.0),) * 2
        names = ("prefill", "decode")
        both.observe(
            *(msgspec.structs.replace(one, group=GROUP, pool=name) for one, name in zip(pools, names, strict=True))
        )
    both.forecast()
    both.decide()
    shown = text("explain", write_log(tmp_path / "both.db", both.records), "latest")
    for part in (
        "no_demand: There is no forecast",
        "TTFT       300 ms now, 600 ms with one worker less",
        "load       proposes",
    ):
        assert part in shown
    simulate = PlannerDay(msgspec.structs.replace(SETTINGS, method="simulate"))
    simulate.round(20.0, 1, 2)
    sizes = tuple(SimulatedSize(group=GROUP, pool="prefill", size=size, attained=size / 4) for size in (3, 4))
    simulate.add(SizesSimulated(planner_epoch=0, forecast=2, target=0.9, sizes=sizes))
    simulate.decide()
    found = planner("explain", write_log(tmp_path / "simulate.db", simulate.records), "latest").pools[0].proposals[0]
    assert (found.method, found.proposal.size) == ("simulate", 4)
    assert found.proposal.basis[0].sizes == [[3, 0.75], [4, 1.0]]
    assert "by size: 3: 75.0%, 4: 100.0%" in text("explain", tmp_path / "simulate.db", "latest")


def test_errors_name_the_value_and_the_remedy(log: Path, tmp_path: Path) -> None:
    assert (
        error_of("planner", "status", log, "--history", "--pool", f"{GROUP}/decode2")
        == f"unknown pool '{GROUP}/decode2'; did you mean {DECODE_POOL}?"
    )
    assert error_of("planner", "status", log, "--changes") == "--pool, --from, --changes and --limit require --history"
    assert (
        error_of("planner", "status", log, "--history", "--decision", "3")
        == "--history and --decision exclude each other"
    )
    empty = tmp_path / "empty.db"
    SqliteLog.open(empty).close()
    for more in ((), ("--history",), ("--decision", "latest")):
        assert (
            error_of("planner", "status", empty, *more)
            == "no planner has claimed the topic scaling; start one with `forebay planner run`"
        )
    idle = write_log(tmp_path / "idle.db", a_day().records[:1])
    assert (
        error_of("planner", "status", idle, "--decision", "latest")
        == "the planner has made no decision with an effect yet"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PREFILL_POOL,), "expected one of: GROUP/POOL and its size, --pause, --resume"),
        ((), "expected one of: GROUP/POOL and its size, --pause, --resume"),
        ((PREFILL_POOL, "10001"), "N: expected auto or a number from 0 to 10000, got 10001"),
        ((PREFILL_POOL, "3", "--operator", "x" * 300), "--operator: expected at most 256 printable characters"),
        ((PREFILL_POOL, "3", "--kafka", "127.0.0.1:1"), "Kafka at 127.0.0.1:1 cannot be used"),
    ],
)
def test_an_order_that_cannot_be_recorded_is_an_error(arguments: tuple[str, ...], message: str) -> None:
    assert error_of("planner", "set", *arguments).startswith(message)


def test_every_reason_and_outcome_has_words_and_is_documented() -> None:
    assert set(REASONS) == set(get_args(Reason))
    assert set(OUTCOMES) == set(get_args(DecisionOutcome))
    page = PAGE.read_text()
    assert [name for name in (*REASONS, *OUTCOMES) if f"`{name}`" not in page] == []


def test_the_page_shows_the_present_output(log: Path) -> None:
    blocks = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    shown = [text("history", "--changes", "--pool", DECODE_POOL, log), text("explain", log, REFUSED)]
    for output in shown:
        lines = [line.rstrip() for line in output.splitlines()]
        assert any(block.splitlines() == lines[: len(block.splitlines())] for block in blocks), output
