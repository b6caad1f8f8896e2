"""Weka's traces of coding agents: one JSON object per run, with think times and sub-agents.

Theory of operation. `t` of a request is its start, in seconds from the start of its agent; `api_time` is the latency of
its response. An entry with `requests` of its own is a sub-agent, and its `t` is its end. It began `duration_ms` before
this end, when the previous request of its parent was answered. A sub-agent runs in parallel with its parent and other
sub-agents. The parent's next request waits for all sub-agents whose entries precede it. So a request depends on the
previous request of its agent and on the last requests of these sub-agents. The delay of a request is the time from the
latest end of these responses to its start. Source: github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

from forebay.simulate.workload import Turn, WorkloadUnusable
from forebay.simulate.workloads.lines import BOM
from forebay.simulate.workloads.source import (
    NOT_JSON,
    PROMPT_TOKENS_MAX,
    TIME_MS_MAX,
    US_PER_S,
    PositionedTurns,
    RowErrors,
    too_many_ids,
)

BLOCK_TOKENS_MAX = 1 << 20
FILE_BYTES_MAX = 1 << 30
NESTED_MAX = 16  # levels of sub-agents

Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MS_MAX / 1_000)]


class _Document(msgspec.Struct, frozen=True):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]
    requests: list[msgspec.Raw]


class _Entry(msgspec.Struct, frozen=True, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """Request of an agent, with its times in seconds."""

    t: Seconds
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=PROMPT_TOKENS_MAX)]
    output_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]]
    api_time: Seconds | None = None
    model: str = ""


class _SubAgent(msgspec.Struct, frozen=True):
    t: Seconds
    requests: list[msgspec.Raw]
    duration_ms: Annotated[float, msgspec.Meta(ge=0, le=TIME_MS_MAX)] = 0.0
    agent_id: str = ""


class _Kind(msgspec.Struct, frozen=True):
    requests: msgspec.Raw = msgspec.Raw()


class _Agent(NamedTuple):
    """Requests and sub-agents of an agent.

    Attributes:
        entries: requests and sub-agents, each with its position in the file.
        began_s: start in seconds of its parent's clock.
    """

    entries: list[tuple[str, "_Entry | _Agent"]]
    name: str = ""
    began_s: float = 0.0


class WekaRuns:
    """`RunReader` of Weka traces. Each file is one session, which shares no prefix with other sessions."""

    local_ids = True

    def __init__(self, first: Path) -> None:
        """Create a reader.

        Args:
            first: first file. Its block size must be the block size of all files.

        Raises:
            WorkloadUnusable: the file cannot be read.
        """
        self.block_tokens = _document(first).block_size
        self.notes: list[str] = []

    def starts(self, path: Path) -> list[tuple[int, str]]:
        """Return the only session of a file. The sessions of all files start at the same time."""
        del path
        return [(0, "")]

    def sessions(self, path: Path, errors: RowErrors) -> dict[str, PositionedTurns]:
        """Return the requests of the only session in a file. See `RunReader.sessions`."""
        document = _document(path)
        if document.block_size != self.block_tokens:
            reason = f"got blocks of {document.block_size} tokens, but earlier files have {self.block_tokens}"
            raise WorkloadUnusable(f"{path}: {reason}")
        errors.unit = "request"
        run = _Run(self.block_tokens, errors)
        played = run.play(document.requests)
        if run.empty_answers and not self.notes:
            self.notes.append("responses without tokens, such as those of aborted requests, get one token")
        return {"": played}


class _Run:
    """Requests of one file, in the order of their dependencies.

    Attributes:
        empty_answers: number of requests whose response has no tokens.
    """

    def __init__(self, block_tokens: int, errors: RowErrors) -> None:
        self._block_tokens = block_tokens
        self._errors = errors
        self._turns: PositionedTurns = []
        self._spans: list[tuple[float, float]] = []  # start and end of each turn, in seconds from the start of the run
        self._token_s = 0.0
        self.empty_answers = 0

    def play(self, requests: list[msgspec.Raw]) -> PositionedTurns:
        agent = _Agent(self._read(requests, ""))
        times = [one.api_time / one.output_tokens for one in _all(agent) if one.api_time and one.output_tokens]
        self._token_s = median(times) if times else 0.0
        beyond = max((max(one.hash_ids, default=-1) for one in _all(agent)), default=-1) + 1
        self._follow(agent, 0.0, -1, beyond)
        return self._turns

    def _read(self, requests: list[msgspec.Raw], prefix: str) -> "list[tuple[str, _Entry | _Agent]]":
        found: list[tuple[str, _Entry | _Agent]] = []
        for number, raw in enumerate(requests, 1):
            place = self._errors.row = f"{prefix}{number}"
            try:
                if not bytes(msgspec.json.decode(raw, type=_Kind).requests):
                    entry = msgspec.json.decode(raw, type=_Entry)
                    if len(entry.hash_ids) < entry.prompt_tokens // self._block_tokens:
                        self._errors.report(
                            f"{len(entry.hash_ids)} hash ids cover fewer than {entry.prompt_tokens} tokens"
                        )
                        continue
                    if reason := too_many_ids(len(entry.hash_ids), entry.prompt_tokens, self._block_tokens):
                        self._errors.report(reason)
                        continue
                    found.append((place, entry))
                elif prefix.count(".") == NESTED_MAX:
                    self._errors.report(f"sub-agents are nested more than {NESTED_MAX} levels deep")
                else:
                    agent = msgspec.json.decode(raw, type=_SubAgent)
                    began_s = agent.t - agent.duration_ms / 1e3
                    found.append((place, _Agent(self._read(agent.requests, f"{place}."), agent.agent_id, began_s)))
            except NOT_JSON as error:
                self._errors.report(str(error))
        return found

    def _follow(self, agent: _Agent, zero_s: float, spawner: int, beyond: int) -> int:
        """Add the turns of an agent whose times count from `zero_s`. Return the number of its last turn, or -1."""
        last, last_s = spawner, 0.0
        mine: list[int] = []
        joined: list[int] = []
        for place, entry in agent.entries:
            self._errors.row = place
            if isinstance(entry, _Agent):
                began_s = zero_s + entry.began_s
                of = next((one for one in reversed(mine) if self._spans[one][0] <= began_s), spawner)
                if (end := self._follow(entry, began_s, of, beyond)) >= 0:
                    joined.append(end)
                continue
            if entry.t < last_s:
                self._errors.report(f"its time, {entry.t:g} s, is before that of the previous request, {last_s:g} s")
                continue
            last_s = entry.t
            after = tuple(sorted({one for one in (last, *joined) if one >= 0}))
            last = self._add(place, entry, zero_s + entry.t, after, agent.name, beyond)
            mine.append(last)
            joined.clear()
        return mine[-1] if mine else -1

    def _add(self, place: str, entry: _Entry, at_s: float, after: tuple[int, ...], name: str, beyond: int) -> int:
        number = len(self._turns)
        ids = tuple(entry.hash_ids)
        if len(ids) * self._block_tokens < entry.prompt_tokens:
            ids = (*ids, beyond + number)  # the trace has no id for a partial block, so give it a unique one
        took_s = entry.output_tokens * self._token_s if entry.api_time is None else entry.api_time
        self.empty_answers += not entry.output_tokens
        waited_s = at_s - max(self._spans[one][1] for one in after) if after else 0.0
        turn = Turn(
            number=number,
            prompt_tokens=entry.prompt_tokens,
            output_tokens=max(1, entry.output_tokens),
            block_ids=ids,
            after=after,
            delay_us=max(0, round(waited_s * US_PER_S)),
            session_id=f"/{name}" if name else "",
            model=entry.model,
        )
        self._turns.append((place, turn))
        self._spans.append((at_s, at_s + took_s))
        return number


def _all(agent: _Agent) -> Iterator[_Entry]:
    for _, entry in agent.entries:
        if isinstance(entry, _Agent):
            yield from _all(entry)
        else:
            yield entry


def _document(path: Path) -> _Document:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise WorkloadUnusable(f"{path}: is larger than {FILE_BYTES_MAX >> 20} MiB")
        return msgspec.json.decode(path.read_bytes().removeprefix(BOM), type=_Document)
    except OSError as error:
        raise WorkloadUnusable(f"{path}: cannot be read ({error.strerror})") from error
    except NOT_JSON as error:
        raise WorkloadUnusable(f"{path}: is not a Weka trace ({error})") from error
