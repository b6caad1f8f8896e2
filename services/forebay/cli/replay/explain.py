"""`forebay explain`: timeline of one request, with a cost table per routing decision."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import print_result, results, shown_reading, span
from forebay.cli.common.terminal import own_stdout, printable
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.command import ExplainCommand
from forebay.core.routing.policies import CustomPolicies
from forebay.core.ttft_parts import Part
from forebay.events.control import RouterConfig
from forebay.journal.groups import groups_of, partitions_of
from forebay.replay.explain.explain import explain_among
from forebay.replay.explain.explanation import (
    CandidateCost,
    ExcludedRank,
    Explanation,
    Routing,
    Submission,
    TimelineEntry,
    TokenSource,
)
from forebay.replay.explain.find import OnProgress, UnknownRequest
from forebay.replay.moment import flat
from forebay.transport.sqlite.recording import utc

CANDIDATES_SHOWN = 10  # number of the cheapest candidates shown; --all shows all
LEFT_OUT_SHOWN = 5  # maximum number of lines about excluded ranks
OTHERS_SHOWN = 5  # IDs of other requests with the searched ID
NAMES_SHOWN = 6  # maximum number of ranks per reason
INDENT = 14  # columns by which the details of a timeline entry are indented
TABLE_INDENT = 4
PARTS: dict[Part, str] = {
    "queue": "in the queue",
    "encode": "encode",
    "prefill": "prefill",
    "wait": "waiting for a worker",
    "transfer": "KV transfer",
    "decode": "network and first decode step",
}
SOURCES: dict[TokenSource, str] = {
    "device": "cached on the device",
    "host": "from host memory",
    "disk": "from disk",
    "store": "from the shared store",
    "transferred": "transferred",
    "computed": "computed",
}


def run_explain(options: ExplainCommand) -> None:
    recording = options.source.recording(options.where, "REQUEST", options.group)
    with explained():
        custom = allowed_policies(options.allow_policy)
    with explained(), shown_reading("searching the journal") as on_progress, own_stdout():
        try:
            explanation = asyncio.run(_explain(recording, options.where[-1], on_progress, custom))
        except UnknownRequest as unknown:
            fail(f"{recording.name}: {unknown}")
    print_result(explanation, options.json, lambda: show(results(), explanation, everything=options.everything))
    if explanation.divergence is not None:
        raise click.exceptions.Exit(DIVERGED)
    tell_unverified(explanation.unverified)


async def _explain(
    recording: Recording, request_id: str, on_progress: OnProgress, custom: CustomPolicies
) -> Explanation:
    async with recording.source() as log:
        placed = await groups_of(log) if recording.group else {}
        named = {placed[group] for group in (await recording.groups_among(log, placed) if recording.group else ())}
        partitions = named or await partitions_of(log)
        return await explain_among(log, partitions, request_id, progress=on_progress, custom=custom)


def show(console: Console, explanation: Explanation, *, everything: bool) -> None:
    """Print the explanation of a request. `everything` shows all candidates of each decision."""
    routings = {one.offset: one for one in explanation.routings}
    for line in _head(explanation):
        _print_hanging(console, line, 2)
    console.print()
    for moment in explanation.timeline:
        _show_moment(console, explanation, moment)
        routing = routings.get(moment.offset) if moment.what in ("routed", "answered") else None
        if routing is not None:
            _show_routing(console, routing, everything=everything)
    if explanation.ending is not None:
        _show_left_out(console, explanation.ending.left_out, everything=everything)
    console.print()
    for line in _foot(explanation):
        _print_hanging(console, line, 2)


def _head(explanation: Explanation) -> Iterator[str]:
    submission = explanation.submitted
    yield f"{explanation.kind} {explanation.request_id}: {_outcome(explanation)}"
    if submission is not None:
        yield ", ".join(_submission_text(submission))
        if caller := ", ".join(_caller_text(submission)):
            yield caller
        if submission.hints:
            yield "hints: " + ", ".join(f"{name} {_value(value)}" for name, value in submission.hints.items())
        if submission.now_us is not None:
            yield f"submitted at {utc(submission.now_us)} on the owner's clock, offset {submission.offset} of requests"
    if explanation.earlier_uses:
        times = "once" if explanation.earlier_uses == 1 else f"{explanation.earlier_uses} times"
        yield f"the ID was used {times} before; this is the last use"
    if explanation.others:
        yield _others(explanation.others)


def _others(others: Sequence[str]) -> str:
    """Name other requests with the searched ID: parts of the same request, or requests with the same client ID."""
    count = "another request has" if len(others) == 1 else f"{len(others)} other requests have"
    more = f" and {len(others) - OTHERS_SHOWN} more; --json lists them" if len(others) > OTHERS_SHOWN else ""
    shown = ", ".join(others[:OTHERS_SHOWN])
    return f"{count} this ID too: {shown}{more}"


def _outcome(explanation: Explanation) -> str:
    ending = explanation.ending
    if ending is None:
        return explanation.state
    reason = f" ({ending.reason})" if ending.reason else ""
    tokens = "" if ending.output_tokens is None else f", {ending.output_tokens:,} output tokens"
    length = "" if not ending.duration_us else f" after {_seconds(ending.duration_us)}"
    return f"{ending.state}{reason}{length}{tokens}"


def _submission_text(submission: Submission) -> Iterator[str]:
    yield f"model {submission.model}"
    if submission.lora_name:
        yield f"adapter {submission.lora_name}"
    yield f"{submission.prompt_tokens:,} prompt tokens in {submission.full_blocks:,} full blocks"
    if submission.max_tokens is not None:
        yield f"at most {submission.max_tokens:,} output tokens"
    if submission.timeout_us is not None:
        yield f"deadline after {submission.timeout_us / 1e6:g} s"
    yield f"tie seed {submission.tie_seed}"
    if submission.anonymised:
        yield "anonymised"


def _caller_text(submission: Submission) -> Iterator[str]:
    for name, value in (
        ("tenant", submission.tenant),
        ("key", submission.key_id),
        ("trace context", submission.traceparent),
    ):
        if value:
            yield f"{name} {value}"


def _foot(explanation: Explanation) -> Iterator[str]:
    divergence = explanation.divergence
    if divergence is not None:
        where = "during this request" if explanation.timeline else "before this request"
        yield f"DIVERGENCE at journal offset {divergence.offset}, {where}: {divergence.reason}"
        for name, values in divergence.differs.items():
            yield f"  {name}: recorded {_value(values['recorded'])}, derived {_value(values['derived'])}"
        yield "later events cannot be explained; `forebay verify` shows the divergence in detail"
        return
    first = explanation.first_token
    if first is not None:
        clocks = (first.ttft_us, "the owner's clock"), (first.wall_ttft_us, "the clocks of ingress and worker")
        times = [f"{_seconds(us)} on {clock}" for us, clock in clocks if us is not None]
        if times:
            yield f"time to first token {times[0]}" + "".join(f" ({other})" for other in times[1:])
        if len(parts := first.parts_us or {}) > 1:
            yield "of this: " + ", ".join(f"{PARTS[part]} {span(us)}" for part, us in parts.items())
        if first.loads_us:
            tokens = (f"{count:,} {SOURCES[source]}" for source, count in first.sources.items())
            yield f"prompt tokens: {', '.join(tokens)}"
    if explanation.derived_from < explanation.derived_to:
        offsets = f"{explanation.derived_from} to {explanation.derived_to - 1}"
        yield f"verified: journal offsets {offsets} derived again, every record equal"


def _show_moment(console: Console, explanation: Explanation, moment: TimelineEntry) -> None:
    when = "" if moment.after_us is None else f"{moment.after_us / 1e6:+.3f} s"
    text = moment.text
    if moment.now_us is None and explanation.state != "submitted":
        text += " (on the log, not in the journal yet)"
    if not moment.counted:
        text += " (no effect)"
    _print_hanging(console, f"{when:>{INDENT - 2}}  {text}", INDENT)


def _show_routing(console: Console, routing: Routing, *, everything: bool) -> None:
    settings = _settings(routing)
    if settings:
        _print_hanging(console, f"{'':{INDENT}}{routing.mode}: {settings}", INDENT + 2)
    order = sorted(range(len(routing.candidates)), key=lambda at: (routing.candidates[at].cost, at))
    shown = order if everything else order[:CANDIDATES_SHOWN]
    if routing.winner not in shown:
        shown = [*shown[:-1], routing.winner]
    console.print(_table(routing, shown))
    if len(shown) < len(order):
        most = routing.candidates[order[-1]].cost
        more = f"{len(order) - len(shown)} more candidates with costs up to {most:,.2f}; --all shows them"
        _print_hanging(console, f"{'':{INDENT}}{more}", INDENT)
    _show_left_out(console, routing.left_out, everything=everything)


def _settings(routing: Routing) -> str:
    """Return the settings that are not at their default or that the request overrode."""
    defaults = dict(flat(RouterConfig()))
    found = []
    for name, value in routing.config.items():
        if name in routing.overridden:
            found.append(f"{name} {_value(value)} (set by the request)")
        elif value != defaults[name]:
            found.append(f"{name} {_value(value)}")
    return ", ".join(found)


def _table(routing: Routing, shown: Sequence[int]) -> Table:
    columns = list(_columns(routing))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("", justify="right", width=TABLE_INDENT + 1)
    table.add_column("candidate", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    several = any(one.seen.rank for one in routing.candidates)
    for at in shown:
        one = routing.candidates[at]
        mark = "*" if at == routing.winner else ""
        name = f"{one.seen.worker_id}/{one.seen.rank}" if several else one.seen.worker_id
        cells = [Text(mark), Text(printable(name)), *(Text(cell(one)) for _, cell in columns)]
        table.add_row(*cells, style="bold" if mark else None)
    return table


def _columns(routing: Routing) -> Iterator[tuple[str, Callable[[CandidateCost], str]]]:
    """Yield column names and cell formatters; terms that are zero for all candidates are omitted."""
    candidates = routing.candidates
    yield "cost", lambda one: f"{one.cost:,.2f}"
    if any(one.probability is not None for one in candidates):
        yield "probability", lambda one: f"{100 * (one.probability or 0):.1f} %"
    yield "prefill", lambda one: f"{one.prefill_blocks:,.2f}"
    yield "credit", lambda one: f"{one.overlap_credit:,.2f}"
    yield "decode", lambda one: f"{one.decode_blocks:,.2f}"
    yield "active", lambda one: f"{one.active_requests:,}"
    if any(one.eviction_cost for one in candidates):
        yield "eviction", lambda one: f"{one.eviction_cost:,.2f}"
    if any(one.taint_factor != 1.0 for one in candidates):
        yield "taints", lambda one: f"x{one.taint_factor:.3f}"
    yield "cached", lambda one: f"{one.seen.device_overlap:,}"
    if any(one.seen.assumed_overlap for one in candidates):
        yield "assumed", lambda one: f"{one.seen.assumed_overlap:,}"
    if any(one.seen.host_overlap for one in candidates):
        yield "on host", lambda one: f"{one.seen.host_overlap:,}"
    if any(one.seen.disk_overlap for one in candidates):
        yield "on disk", lambda one: f"{one.seen.disk_overlap:,}"
    if any(one.seen.store_overlap for one in candidates):
        yield "in store", lambda one: f"{one.seen.store_overlap:,}"
    yield "cache size", lambda one: f"{one.seen.device_blocks + one.seen.host_blocks + one.seen.disk_blocks:,}"
    yield "waiting", lambda one: f"{one.seen.waiting_tokens:,}"
    if routing.reason in ("tie_computed_tokens", "tie_seed"):
        yield "computed", lambda one: f"{one.seen.computed_tokens:,}"


def _show_left_out(console: Console, left_out: Sequence[ExcludedRank], *, everything: bool) -> None:
    by_text: dict[str, list[ExcludedRank]] = {}
    for one in left_out:
        by_text.setdefault(one.text, []).append(one)
    lines = []
    for text, alike in by_text.items():
        names = [f"{one.seen.worker_id}/{one.seen.rank}" for one in alike]
        listed = names if everything else names[:NAMES_SHOWN]
        more = f" and {len(names) - len(listed)} more" if len(listed) < len(names) else ""
        lines.append(f"excluded {', '.join(listed)}{more}: {text}")
    shown = lines if everything else lines[:LEFT_OUT_SHOWN]
    for line in shown:
        _print_hanging(console, f"{'':{INDENT}}{line}", INDENT + 2)
    if len(shown) < len(lines):
        _print_hanging(console, f"{'':{INDENT}}and {len(lines) - len(shown)} more reasons; --all shows them", INDENT)


def _print_hanging(console: Console, line: str, hang: int) -> None:
    text = Text(printable(line))
    longest = max(map(len, text.plain.split()), default=0)
    for at, part in enumerate(text.wrap(console, max(console.width - hang, longest))):
        console.print(Text(" " * hang if at else "").append_text(part), soft_wrap=True)


def _seconds(us: int) -> str:
    return f"{us / 1e6:.3f} s"


def _value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
