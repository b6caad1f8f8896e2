"""Compare the derived cost table of a decision with the recorded cost table.

The journal holds the cost terms of the winner (the selected candidate) and of the runner-up, and a digest over all
candidates. Only the record of an answered route query holds every candidate.
"""

from collections.abc import Iterator

import msgspec

from forebay.core.routing.cost import CostTable
from forebay.core.routing.plan import Plan
from forebay.events.base import hex_digest
from forebay.events.decisions import CostTerms, JournalRecord, RequestRouted, RouteAnswered, ScoredCandidate

WINNER, RUNNER_UP = "winner", "runner-up"


class CostTableRow(msgspec.Struct, kw_only=True):
    """One candidate in the derived or the recorded cost table. A place is `winner`, `runner-up` or empty."""

    worker_id: str
    rank: int
    derived: CostTerms | None
    recorded: CostTerms | None
    place: str = ""
    recorded_place: str = ""
    differs: tuple[str, ...] = ()


class CostTables(msgspec.Struct, kw_only=True):
    """The derived and the recorded cost table of a decision.

    Attributes:
        digest: digest over every term of every derived candidate.
        comparable: whether the recorded decision is about the same request. Otherwise there are no recorded terms.
        recorded_in_full: whether the journal holds the terms of every recorded candidate.
    """

    request_id: str
    pool: str
    mode: str
    digest: str
    rows: list[CostTableRow]
    comparable: bool
    recorded_in_full: bool
    recorded_digest: str | None
    recorded_candidates: int | None


def tables(plan: Plan, record: JournalRecord) -> CostTables:
    derived, request_id = plan.table, plan.request.request_id
    next_best = plan.runner_up()
    second = None if next_best is None else (next_best.worker_id, next_best.rank)
    rows: dict[tuple[str, int], CostTableRow] = {}
    for at in range(len(derived.costs)):
        one = derived.candidate(at)
        key = one.worker_id, one.rank
        place = WINNER if at == plan.at else RUNNER_UP if key == second else ""
        rows[key] = CostTableRow(worker_id=key[0], rank=key[1], derived=one.terms, recorded=None, place=place)
    about = record if isinstance(record, RequestRouted | RouteAnswered) and record.request_id == request_id else None
    for place, known in () if about is None else _recorded(about):
        row = rows.setdefault(
            (known.worker_id, known.rank),
            CostTableRow(worker_id=known.worker_id, rank=known.rank, derived=None, recorded=None),
        )
        row.recorded = known.terms
        row.recorded_place = place or row.recorded_place
        row.differs = _differing(row.derived, known.terms)
    return CostTables(
        request_id=request_id,
        pool=plan.pool.pool,
        mode=plan.config.mode,
        digest=digest_of(derived),
        rows=list(rows.values()),
        comparable=about is not None,
        recorded_in_full=isinstance(about, RouteAnswered),
        recorded_digest=None if about is None else about.table_digest,
        recorded_candidates=None if about is None else _candidates(about),
    )


def digest_of(table: CostTable) -> str:
    return hex_digest(table.digest())


def _recorded(record: RequestRouted | RouteAnswered) -> Iterator[tuple[str, ScoredCandidate]]:
    """Yield the recorded candidates of a decision, each with its place (`winner`, `runner-up` or empty)."""
    if isinstance(record, RequestRouted):
        yield WINNER, ScoredCandidate(worker_id=record.worker_id, rank=record.rank, terms=record.terms)
        if record.runner_up is not None:
            yield RUNNER_UP, record.runner_up
        return
    for one in record.candidates:
        yield "", one
    if record.choice is not None:
        yield WINNER, record.choice


def _candidates(record: RequestRouted | RouteAnswered) -> int:
    return record.candidates if isinstance(record, RequestRouted) else len(record.candidates)


def _differing(derived: CostTerms | None, recorded: CostTerms) -> tuple[str, ...]:
    if derived is None:
        return ()
    return tuple(name for name in recorded.__struct_fields__ if getattr(derived, name) != getattr(recorded, name))
