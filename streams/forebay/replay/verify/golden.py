"""Recordings as regression tests: verify a recorded incident with every later version of the program.

Example:
    RECORDINGS = sorted(Path("tests/logs").glob("*.rec"))

    @pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
    def test_recorded_decisions(recording: Path) -> None:
        check_recording(recording)
"""

import asyncio
from collections.abc import Iterator, Set
from pathlib import Path

import msgspec

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.journal.groups import groups_of
from forebay.journal.records import OtherRules
from forebay.replay.policies import require_allowed
from forebay.replay.verify.divergence import DivergenceReport
from forebay.replay.verify.verify import VerifyReport, include_scaling, verify
from forebay.transport.base import Log, PolicyNotAllowed
from forebay.transport.sqlite.log import SqliteLog


def check_recording(
    path: Path | str, allow: Set[str] = frozenset(), custom: CustomPolicies = ONLY_BUILT_IN
) -> dict[str, VerifyReport]:
    """Derive every decision of a recording again. Do not call this function inside an event loop.

    Args:
        allow: kinds of records that may stay unverified, as for `forebay verify --allow`.
        custom: classes of the custom policies that may run, by dotted path.

    Returns:
        The verification report of each group, by group name.

    Raises:
        AssertionError: a derived decision differs from the recorded one, or this program cannot derive it. The message
            contains the first such decision, the differing fields and the events before it. If a program with other
            decision rules wrote the recording, the message contains `OtherRules` and the remedy.
        LogError: the file is damaged, truncated, or not a recording.
    """
    return asyncio.run(_check(Path(path), allow, custom))


async def _check(path: Path, allow: Set[str], custom: CustomPolicies) -> dict[str, VerifyReport]:
    log = SqliteLog.open(path, readonly=True)
    try:
        log.check()
        groups = await groups_of(log)
        reports = {name: await _verified(path, log, at, allow, custom) for name, at in groups.items()}
    finally:
        log.close()
    if not any(report.decisions for report in reports.values()):
        raise AssertionError(f"{path}: the recording contains no decision")
    return reports


async def _verified(path: Path, log: Log, partition: int, allow: Set[str], custom: CustomPolicies) -> VerifyReport:
    try:
        await require_allowed(log, partition, custom)
        report = await verify(log, partition, allow=allow, custom=custom)
        if report.others:  # a test must not pass because its decisions were not derived
            other_span = report.others[0]
            raise OtherRules(other_span.first, other_span.rules, other_span.release)
    except PolicyNotAllowed as refused:
        raise AssertionError(f"{path}: {refused}, or its class as `custom`") from refused
    except OtherRules as other:
        text = f"{path}: OtherRules: {other}. Record it again, or verify it with the program that wrote it"
        raise AssertionError(text) from other
    if report.divergence is not None:
        raise AssertionError("\n".join([f"{path}: {_headline(report.divergence)}", *_lines(report.divergence)]))
    await include_scaling(log, report)
    if report.scaling is not None and report.scaling.different:
        lines = (f"  decision {one.offset}: {_short(one.differs)}" for one in report.scaling.first)
        headline = f"{report.scaling.different} scaling decisions do not follow from the records before them"
        raise AssertionError("\n".join([f"{path}: {headline}", *lines]))
    if report.failed:
        found = ", ".join(f"{count} {name}" for name, count in report.failed.items())
        raise AssertionError(f"{path}: not verified: {found}; if this is expected, pass these names as `allow`")
    return report


def _headline(divergence: DivergenceReport) -> str:
    return f"divergence at journal offset {divergence.offset}, a {divergence.recorded['type']}: {divergence.reason}"


def _lines(divergence: DivergenceReport) -> Iterator[str]:
    if divergence.hint:
        yield f"  {divergence.hint}"
    for name, values in divergence.differs.items():
        yield f"  {name}: recorded {_short(values['recorded'])}, derived {_short(values['derived'])}"
    if divergence.derived is None:
        yield f"  recorded {_short(divergence.recorded)}, derived nothing"
    for event in divergence.events:
        yield f"  applied before: {event.topic} {event.offset} {event.type}: {event.text}"
    yield "  more, with both cost tables: forebay verify"


def _short(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
