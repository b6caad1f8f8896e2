"""Write the notes of a comparison: what the results mean, and where they stop being valid."""

from forebay.replay.diff.report import DiffReport
from forebay.transport.history.release import rules_text

OPEN_LOOP = (
    "Open loop: the alternative receives the recorded events. KV events and load reports are those of history, "
    "whatever the alternative decides. Progress of a request counts for the worker that has it in the alternative."
)
AFTER_FORK = (
    "Everything before the fork is exact. After it, each decision assumes that the caches are as they were in history. "
    "In reality the moved requests would have filled other caches."
)


def notes(report: DiffReport) -> list[str]:
    if report.divergence is not None:
        offset = report.divergence.offset
        return [
            f"The comparison ended at journal offset {offset}: that record does not follow from the recorded events."
        ]
    if report.identical:
        same = "The alternative makes the same decisions as history: no request moves. This result is exact."
        return [same, *_left_out(report), *_undone(report), *_answers(report)]
    details = [
        *_left_out(report),
        *_undone(report),
        *_own_prompts(report),
        *_landed(report),
        *_by_choice(report),
        *_progress(report),
        *_answers(report),
    ]
    return [OPEN_LOOP, AFTER_FORK, *details]


def _left_out(report: DiffReport) -> list[str]:
    found = []
    for part in report.left_out:
        count = f"{part.decisions:,} decision{'' if part.decisions == 1 else 's'}"
        found.append(
            f"Left out: {count} at journal offsets {part.first} to {part.end - 1}, made by"
            f" {rules_text(part.rules, part.release)}. Only that version can compare them. Afterwards the alternative"
            " begins again with the recorded state."
        )
    return found


def _undone(report: DiffReport) -> list[str]:
    return [
        f"An operator changed {path} during the recording; the requested value takes precedence."
        for path in report.undone
    ]


def _own_prompts(report: DiffReport) -> list[str]:
    overlap = report.overlap
    if not overlap.later_won:
        return []
    return [
        f"Sent later than in history: {overlap.later:,} requests. History computed their prompts in the meantime, so "
        f"they find {overlap.later_won:,} more blocks. Most of these blocks are their own, so they are no gain. Only "
        "a simulation shows the effect of waiting on caches."
    ]


def _landed(report: DiffReport) -> list[str]:
    here, there = report.other.landed, report.history.landed
    if here is None or there is None:
        return []
    return [
        f"Validity: when their request ended, {here:.1%} of the prompt blocks that the alternative routed were in the "
        f"selected worker's cache, according to the recorded KV events. In history it was {there:.1%}."
    ]


def _by_choice(report: DiffReport) -> list[str]:
    moved = report.moved
    if not moved.moved and not report.stages_kept:
        return []
    others = f", would hold {moved.held:,} requests" if moved.held else ""
    others += f", would reject {moved.refused:,}" if moved.refused else ""
    summary = (
        f"Of {moved.evaluated:,} decisions repeated on history's own state, the alternative selects another rank in "
        f"{moved.otherwise:,}{others}."
    )
    if report.booked:
        summary += (
            f" The effect of {', '.join(report.booked)} shows there only in part, because history booked requests "
            "under its own configuration."
        )
    if report.stages_kept:
        summary += " Each repeated decision keeps its stage, so prompts are computed where history computed them."
    if report.pools_kept:
        summary += " Each repeated decision keeps its pool."
    if not moved.moved:
        return [summary]
    if moved.by_choice == moved.moved:
        return [f"{summary} All moved requests also move there."]
    share = f"Of the {moved.moved:,} moved requests, {moved.by_choice:,} also move there"
    why = ", or because their prompts are computed elsewhere" if report.stages_kept else ""
    why += ", or because another pool was chosen" if report.pools_kept else ""
    return [f"{summary} {share}. The others moved as a consequence of earlier moves{why}."]


def _progress(report: DiffReport) -> list[str]:
    lines, progress = [], report.progress
    if progress.late or progress.to_come:
        late = progress.late + progress.to_come
        lines.append(
            f"{late:,} progress events were delayed, because their request was sent later than in history. A request "
            "that was sent earlier occupies its worker until its end in history."
        )
    if progress.unknown_end:
        lines.append(
            f"{progress.unknown_end:,} requests were sent to a worker only by the alternative. Their end is unknown: "
            "they count as load until their deadline."
        )
    if progress.void:
        lines.append(
            f"{progress.void:,} progress events did not fit, because a lost worker had the request in only one of the "
            "worlds."
        )
    if progress.other_stage:
        lines.append(
            f"{progress.other_stage:,} progress events were ignored: they belong to a prefill or transfer that the "
            "request does not have in the alternative."
        )
    return lines


def _answers(report: DiffReport) -> list[str]:
    if not report.queries_otherwise:
        return []
    return [f"{report.queries_otherwise:,} of {report.queries:,} route queries select another rank."]
