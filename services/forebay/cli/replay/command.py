"""Commands that derive the decisions of a log again, to verify, explain and compare them, or show a past state."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from forebay.cli.common.options import Argument, JsonOption, Option
from forebay.cli.common.recording import GroupOption, KafkaSource, Recording
from forebay.cli.common.unverified import allow_option
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.policies.alternative import AlternativeOptions
from forebay.journal.checks import FOREIGN_RECORDS, UNKNOWN_EVENTS, UNREAD_FIELDS, UNVERIFIED

DIFF_CHECKS = (FOREIGN_RECORDS, UNREAD_FIELDS, UNKNOWN_EVENTS)  # checks that `replay diff` may skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainCommand:
    """Show a request's timeline: every routing decision with all costs, its reason, and the outcome.

    Every decision is derived again and compared with the journal. Exits 1 if the journal diverges before the request's
    end.
    """

    RUN: ClassVar = "replay.explain:run_explain"

    where: Annotated[
        list[str],
        Argument(
            metavar="[LOG] REQUEST",
            help="LOG: log file of `forebay up` (may be in use) or recording; omit with --kafka. REQUEST: its ID.",
        ),
    ]
    source: KafkaSource
    group: GroupOption = ""
    everything: Annotated[bool, Option("--all", help="Show every candidate, not only the cheapest.")] = False
    allow_policy: AllowPolicyOption = None
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AtCommand:
    """Show a group's state at a time, or right after a journal record, by default the last one."""

    RUN: ClassVar = "replay.at:run_at"

    recording: Recording
    time: Annotated[
        str,
        Option(
            help="Time on the owner's clock: 2026-01-31T12:00:00Z, 12:30 that day, -5m before the end, or microseconds."
        ),
    ] = ""
    offset: Annotated[int | None, Option(min=0, help="Offset of a record of the journal `decisions`.")] = None
    allow_policy: AllowPolicyOption = None
    json: Annotated[bool, Option("--json", help="Print the complete state as one JSON object.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffCommand:
    """Compare a recorded history with another configuration: which requests move, and the effect on caches and load.

    Open loop: the alternative receives the recorded events, including KV events. Exits 1 if history itself cannot be
    verified.
    """

    RUN: ClassVar = "replay.diff:run_diff"

    other_options: AlternativeOptions
    recording: Recording
    start: Annotated[
        str, Option("--from", metavar="TIME", help="Compare decisions from this time on; a time as in `replay at`.")
    ] = ""
    end: Annotated[str, Option("--to", metavar="TIME", help="Compare decisions before this time.")] = ""
    allow: Annotated[list[str] | None, allow_option(DIFF_CHECKS)] = None
    allow_policy: AllowPolicyOption = None
    json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCommand:
    """Derive every routing and scaling decision again. Exits 1 if a decision differs from the recorded one.

    A part of the journal that owners with other decision rules wrote is named with the version that can verify it.
    Exits 3 if there is no other part.
    """

    RUN: ClassVar = "replay.verify:run_verify"

    recording: Recording
    allow: Annotated[list[str] | None, allow_option(UNVERIFIED)] = None
    allow_policy: AllowPolicyOption = None
    json: JsonOption = False
