"""Preparation of a workload before it is played: check its rows, and shorten and speed up the workload."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from msgspec.structs import replace

from forebay.simulate.workload import Survey, Turn, WorkloadOptions
from forebay.simulate.workloads.source import LATEST_US, US_PER_S, RowErrors, WorkloadSource

PARENTS_MAX = 1 << 17  # ids whose parent is remembered, about 15 MB; beyond that the check starts again


class PreparedWorkload:
    """Workload that a simulation can play: a source with `WorkloadOptions` applied."""

    def __init__(self, source: WorkloadSource, options: WorkloadOptions) -> None:
        self.name = source.name
        self.block_tokens = source.block_tokens
        self._source = source
        self._options = options

    def survey(self) -> Survey:
        """Read the workload once and check every row."""
        errors = RowErrors(skip=self._options.skip_bad_rows)
        requests = 0
        models: dict[str, None] = {}
        for turn in self._cut(errors):
            requests += 1
            if turn.model and len(models) < 2:
                models[turn.model] = None
        notes = list(self._source.notes)
        if models and not self._options.by_model:
            notes.append("all requests go to one model; the model names in the workload are ignored")
        return errors.survey(requests, notes)

    def turns(self) -> Iterator[Turn]:
        """Yield every request, with the options applied."""
        options = self._options
        for turn in self._cut(RowErrors(skip=options.skip_bad_rows)):
            played = turn
            if options.speed != 1.0 and played.at_us:
                played = replace(played, at_us=round(played.at_us / options.speed))
            if played.model and not options.by_model:
                played = replace(played, model="")
            yield played

    def _cut(self, errors: RowErrors) -> Iterator[Turn]:
        """Yield the good requests of the first `duration_s` seconds and `requests_max` requests."""
        options = self._options
        requests = 0
        for turn in _within(_checked(self._source.turns(errors), errors), options.duration_s):
            if requests == options.requests_max:
                return
            yield turn
            requests += 1
        if not requests:
            raise errors.empty_workload(self.name)


def _checked(turns: Iterator[Turn], errors: RowErrors) -> Iterator[Turn]:
    """Yield the requests that can be played, renumbered because bad rows are skipped."""
    parents: dict[int, int | None] = {}
    left_out: list[int] = []
    now_us = 0
    for turn in turns:
        reason = ""
        if turn.after:
            if left_out and any(_among(left_out, one) for one in turn.after):
                reason = "it depends on a row that was skipped"
        elif turn.at_us < now_us:
            reason = f"the timestamp is {(now_us - turn.at_us) / 1e3:g} ms before that of an earlier row"
        if turn.block_ids and not reason:
            reason = _unchained(turn.block_ids, parents)
        if reason:
            errors.report(reason)
            left_out.append(turn.number)
            continue
        if not turn.after:
            now_us = turn.at_us
        yield _renumbered(turn, left_out) if left_out else turn


def _unchained(ids: tuple[int, ...], parents: dict[int, int | None]) -> str:
    """Return why an id does not identify one prefix, that is, has two different predecessors; empty if every id does.

    Remembers the predecessors of valid ids.
    """
    before = (None, *ids[:-1])
    known = len(parents)
    found = tuple(map(parents.setdefault, ids, before))
    if found == before:
        if len(parents) > PARENTS_MAX:
            parents.clear()
        return ""
    at = next(at for at, one in enumerate(found) if one != before[at])
    places = [f"after {one}" if one is not None else "first" for one in (before[at], found[at])]
    while len(parents) > known:
        parents.popitem()
    text = f"hash id {ids[at]} comes {places[0]}, but came {places[1]} in an earlier prompt"
    return f"{text}; an id stands for its block and all blocks before it"


def _within(turns: Iterator[Turn], duration_s: float | None) -> Iterator[Turn]:
    """Yield the requests that arrive in the first `duration_s` seconds if every response is instant."""
    if duration_s is None:
        yield from turns
        return
    end_us = duration_s * US_PER_S
    earliest = array("q")
    cut: list[int] = []
    for turn in turns:
        at_us = max(turn.at_us, max((earliest[one] for one in turn.after), default=0) + turn.delay_us)
        if at_us >= end_us and not turn.after:
            return  # all later rows arrive even later
        earliest.append(min(at_us, LATEST_US))
        if at_us >= end_us:
            cut.append(turn.number)
        else:
            yield _renumbered(turn, cut) if cut else turn


def _renumbered(turn: Turn, left_out: list[int]) -> Turn:
    """Return the request numbered as if the skipped requests did not exist."""
    number = turn.number - len(left_out)
    return replace(turn, number=number, after=tuple(one - bisect_left(left_out, one) for one in turn.after))


def _among(numbers: list[int], one: int) -> bool:
    at = bisect_left(numbers, one)
    return at < len(numbers) and numbers[at] == one
