"""A source as it is played: checked row by row, cut, sped up and scaled."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from msgspec.structs import replace

from forebay.simulate.workload import Survey, Turn, WorkloadOptions
from forebay.simulate.workloads.scaling import Scaling
from forebay.simulate.workloads.source import LATEST_US, US_PER_S, Faults, Source

PARENTS_MAX = 1 << 19  # ids whose parent is remembered: some 60 MB; then the check begins anew


class Played:
    """A source under options, as a workload.

    Attributes:
        name: the source's; so is `block_tokens`.
    """

    def __init__(self, source: Source, options: WorkloadOptions) -> None:
        self.name = source.name
        self.block_tokens = source.block_tokens
        self._source = source
        self._options = options

    def survey(self) -> Survey:
        """Read it once, check every row. Raises WorkloadUnusable."""
        faults = Faults(skip=self._options.skip_bad_rows)
        requests = 0
        models: dict[str, None] = {}
        for turn in self._cut(faults):
            requests += 1
            if turn.model and len(models) < 2:
                models[turn.model] = None
        notes = list(self._source.notes)
        if models and not self._options.by_model:
            notes.append("the models that it names are played as one")
        return faults.survey(requests, notes)

    def turns(self) -> Iterator[Turn]:
        """Every request, with the options applied."""
        options = self._options
        scaling = Scaling(options, self.block_tokens)
        if scaling.changes:
            scaling.learn(self._cut(Faults(skip=options.skip_bad_rows)))
        for turn in self._cut(Faults(skip=options.skip_bad_rows)):
            played = scaling.scaled(turn) if scaling.changes else turn
            if options.speed != 1.0 and played.at_us:
                played = replace(played, at_us=round(played.at_us / options.speed))
            if played.model and not options.by_model:
                played = replace(played, model="")
            yield played

    def _cut(self, faults: Faults) -> Iterator[Turn]:
        """The good ones of the first seconds, as recorded. Raises WorkloadUnusable if there are none."""
        options = self._options
        requests = 0
        for turn in _within(_checked(self._source.turns(faults), faults), options.duration_s):
            if requests == options.requests_max:
                return
            yield turn
            requests += 1
        if not requests:
            raise faults.nothing(self.name)


def _checked(turns: Iterator[Turn], faults: Faults) -> Iterator[Turn]:
    """Those that can be played, numbered without the others."""
    parents: dict[int, int | None] = {}
    left_out: list[int] = []
    now_us = 0
    for turn in turns:
        reason = ""
        if turn.after:
            if left_out and any(_among(left_out, one) for one in turn.after):
                reason = "it follows on a row that was left out"
        elif turn.at_us < now_us:
            reason = f"the timestamp is {(now_us - turn.at_us) / 1e3:g} ms before that of a row before it"
        if turn.block_ids and not reason:
            reason = _unchained(turn.block_ids, parents)
        if reason:
            faults.bad(reason)
            left_out.append(turn.number)
            continue
        if not turn.after:
            now_us = turn.at_us
        yield _renumbered(turn, left_out) if left_out else turn


def _unchained(ids: tuple[int, ...], parents: dict[int, int | None]) -> str:
    """Why these ids are not prefix-closed: each has but one that comes before it. Remembers them."""
    before = (None, *ids[:-1])
    known = len(parents)
    found = tuple(map(parents.setdefault, ids, before))
    if found == before:
        if len(parents) > PARENTS_MAX:
            parents.clear()
        return ""
    at = next(at for at, one in enumerate(found) if one != before[at])
    said = [f"after {one}" if one is not None else "first" for one in (before[at], found[at])]
    while len(parents) > known:
        parents.popitem()
    return f"hash id {ids[at]} comes {said[0]}, and before it came {said[1]}: an id names all that is before it, too"


def _within(turns: Iterator[Turn], duration_s: float | None) -> Iterator[Turn]:
    """What comes in the first seconds if answers take no time."""
    if duration_s is None:
        yield from turns
        return
    end_us = duration_s * US_PER_S
    earliest = array("q")
    cut: list[int] = []
    for turn in turns:
        at_us = max(turn.at_us, max((earliest[one] for one in turn.after), default=0) + turn.delay_us)
        if at_us >= end_us and not turn.after:
            return  # nor does any that comes behind it
        earliest.append(min(at_us, LATEST_US))
        if at_us >= end_us:
            cut.append(turn.number)
        else:
            yield _renumbered(turn, cut) if cut else turn


def _renumbered(turn: Turn, left_out: list[int]) -> Turn:
    """As though those before it that are left out had never been."""
    number = turn.number - len(left_out)
    return replace(turn, number=number, after=tuple(one - bisect_left(left_out, one) for one in turn.after))


def _among(numbers: list[int], one: int) -> bool:
    at = bisect_left(numbers, one)
    return at < len(numbers) and numbers[at] == one
