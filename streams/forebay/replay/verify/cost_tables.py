"""The cost table of a decision as derived, beside what the journal holds of the recorded one.

The journal has the winner's and the runner-up's terms and a digest over all; only an answered route query has every
candidate. So the recorded table in full is not on the log, and is not made up here.
"""

from collections.abc import Iterator

import msgspec

from forebay.core.routing.cost import CostTable
from forebay.core.routing.router import Selection
from forebay.events.base import hex_digest
from forebay.events.decisions import CostTerms, JournalRecord, RequestRouted, RouteAnswered, ScoredCandidate

WINNER, RUNNER_UP = "winner", "runner-up"


class Row(msgspec.Struct, kw_only=True):
    """One candidate of either table, with its terms in both.

    `derived` is None for one that is no candidate as derived, `recorded` for one whose terms the journal does not have.
    `place` and `recorded_place` say who won and who was next. `differs` names the terms that are not the same.
    """

    worker_id: str
    rank: int
    derived: CostTerms | None
    recorded: CostTerms | None
    place: str = ""
    recorded_place: str = ""
    differs: tuple[str, ...] = ()


class Table(msgspec.Struct, kw_only=True):
    """Both tables of a decision; digests are over every term of every candidate.

    `comparable` is whether the record decides the same request, `recorded_in_full` whether the journal has every row.
    """

    request_id: str
    pool: str
    mode: str
    digest: str
    rows: list[Row]
    comparable: bool
    recorded_in_full: bool
    recorded_digest: str | None
    recorded_candidates: int | None


def tables(pool: str, request_id: str, choice: Selection, record: JournalRecord) -> Table:
    """The table of a choice beside what `record` holds."""
    derived = choice.table
    next_best = choice.runner_up()
    second = None if next_best is None else (next_best.worker_id, next_best.rank)
    rows: dict[tuple[str, int], Row] = {}
    for at in range(len(derived.costs)):
        one = derived.candidate(at)
        key = one.worker_id, one.rank
        place = WINNER if at == choice.at else RUNNER_UP if key == second else ""
        rows[key] = Row(worker_id=key[0], rank=key[1], derived=one.terms, recorded=None, place=place)
    about = record if isinstance(record, RequestRouted | RouteAnswered) and record.request_id == request_id else None
    for place, known in () if about is None else _recorded(about):
        row = rows.setdefault(
            (known.worker_id, known.rank),
            Row(worker_id=known.worker_id, rank=known.rank, derived=None, recorded=None),
        )
        row.recorded = known.terms
        row.recorded_place = place or row.recorded_place
        row.differs = _differing(row.derived, known.terms)
    return Table(
        request_id=request_id,
        pool=pool,
        mode=choice.config.mode,
        digest=digest_of(derived),
        rows=list(rows.values()),
        comparable=about is not None,
        recorded_in_full=isinstance(about, RouteAnswered),
        recorded_digest=None if about is None else about.table_digest,
        recorded_candidates=None if about is None else _candidates(about),
    )


def digest_of(table: CostTable) -> str:
    """The digest of a table as the journal writes it."""
    return hex_digest(table.digest())


def _recorded(record: RequestRouted | RouteAnswered) -> Iterator[tuple[str, ScoredCandidate]]:
    """What the journal holds of the table of a decision, with the place of each."""
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
