"""What the figures of a comparison mean, and where they stop being valid, in sentences for people."""

from forebay.replay.diff.report import Report

OPEN_LOOP = (
    "Open loop: the alternative world got the recorded events. KV events and load reports are history's own, "
    "whatever the alternative decided; what workers said of a request counts for whichever worker has it there."
)
AFTER_FORK = (
    "Everything before the fork is exact. After it each decision is what the alternative would decide if the caches "
    "were as they were in history. They would not be: its requests would have filled other caches."
)


def notes(report: Report) -> list[str]:
    """The sentences, most important first."""
    if report.divergence is not None:
        offset = report.divergence.offset
        return [f"The recording's own events do not lead to its record at journal offset {offset}: it ends there."]
    if report.identical:
        same = "The alternative decides everything as history did: no request moves, and this is exact."
        return [same, *_undone(report), *_answers(report)]
    told = [
        *_undone(report),
        *_own_prompts(report),
        *_landed(report),
        *_by_choice(report),
        *_progress(report),
        *_answers(report),
    ]
    return [OPEN_LOOP, AFTER_FORK, *told]


def _undone(report: Report) -> list[str]:
    return [f"{path} was set otherwise by an operator later: what is asked for here wins." for path in report.undone]


def _own_prompts(report: Report) -> list[str]:
    overlap = report.overlap
    if not overlap.later_won:
        return []
    return [
        f"Sent later than in history: {overlap.later:,} requests. History computed their prompts meanwhile, so they "
        f"find {overlap.later_won:,} blocks more, and most of these are their own: nothing was won by them. What "
        "waiting does to caches only a simulation tells."
    ]


def _landed(report: Report) -> list[str]:
    here, there = report.other.landed, report.history.landed
    if here is None or there is None:
        return []
    return [
        f"How far it went: of the prompt blocks that the alternative sent somewhere, {here:.1%} were in that "
        f"worker's cache when the request ended, as the recorded KV events tell it; of history's own, {there:.1%}."
    ]


def _by_choice(report: Report) -> list[str]:
    moved = report.moved
    if not moved.moved and not report.stages_kept:
        return []
    others = f", would let {moved.held:,} requests wait" if moved.held else ""
    others += f", would refuse {moved.refused:,}" if moved.refused else ""
    asked = (
        f"Asked {moved.asked:,} times in history's own state, the alternative chooses otherwise {moved.otherwise:,} "
        f"times{others}."
    )
    if report.booked:
        asked += (
            f" What {', '.join(report.booked)} would change shows there only in part: history had booked by its own."
        )
    if report.stages_kept:
        asked += " Each choice keeps its stage there: where a prompt is computed is history's, whatever is asked for."
    if not moved.moved:
        return [asked]
    if moved.by_choice == moved.moved:
        return [f"{asked} All requests that moved would have moved there, too."]
    drawn = f"Of the {moved.moved:,} requests that moved, {moved.by_choice:,} would have moved there, too"
    why = ", or because their prompts are computed elsewhere" if report.stages_kept else ""
    return [f"{asked} {drawn}; the others moved because of what had moved before{why}."]


def _progress(report: Report) -> list[str]:
    said, progress = [], report.progress
    if progress.late or progress.to_come:
        late = progress.late + progress.to_come
        said.append(
            f"{late:,} times a worker was heard later than in history, as much as the request was sent later; a "
            "request that was sent earlier keeps its worker busy until it ended in history."
        )
    if progress.unknown_end:
        said.append(
            f"{progress.unknown_end:,} requests that history never sent to a worker were sent to one here: nobody "
            "knows when they would have ended, so they are load until their deadline."
        )
    if progress.void:
        said.append(
            f"{progress.void:,} times a worker's word did not fit: a worker that was lost had the request in one of "
            "the worlds only."
        )
    if progress.other_stage:
        said.append(
            f"{progress.other_stage:,} times a worker's word was of a prefill or a transfer that the request does not "
            "have here, as its prompt is computed elsewhere: it is left out."
        )
    return said


def _answers(report: Report) -> list[str]:
    if not report.queries_otherwise:
        return []
    return [
        f"{report.queries_otherwise:,} of {report.queries:,} questions where a request would go are answered otherwise."
    ]
