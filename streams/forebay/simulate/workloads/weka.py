"""Weka's traces of coding agents: one JSON object a run, with think times and sub-agents.

Theory of operation. `t` of a request is its start, in seconds from the start of its agent; `api_time` is how long the
answer took. An entry with `requests` of its own is a sub-agent, and its `t` is its end: `duration_ms` before that it
began, which is when the request before it was answered. It runs beside its parent and other sub-agents; the parent's
next request waits for those whose entries stand before it. So a request follows on the one before it of its agent and
on the last ones of those sub-agents, and its delay is what passed from the last of their ends to its start.
Source: github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md.
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
    Faults,
    Placed,
    too_many_ids,
)

BLOCK_TOKENS_MAX = 1 << 20
FILE_BYTES_MAX = 1 << 30
NESTED_MAX = 16  # sub-agents of sub-agents

Seconds = Annotated[float, msgspec.Meta(ge=0, le=TIME_MS_MAX / 1_000)]


class _Document(msgspec.Struct, frozen=True):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=BLOCK_TOKENS_MAX)]
    requests: list[msgspec.Raw]


class _Entry(msgspec.Struct, frozen=True, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    """A request; no less than the fields without defaults."""

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
    """An agent's requests and sub-agents with their places in the file; when it began, on its parent's clock."""

    entries: list[tuple[str, "_Entry | _Agent"]]
    name: str = ""
    began_s: float = 0.0


class WekaRuns:
    """Files of such runs: a session each, and none shares anything with another."""

    local_ids = True

    def __init__(self, first: Path) -> None:
        """`first` says how many tokens a block has, everywhere. Raises WorkloadUnusable."""
        self.block_tokens = _document(first).block_size
        self.notes: list[str] = []

    def starts(self, path: Path) -> list[tuple[int, str]]:
        """One, which starts with the others."""
        del path
        return [(0, "")]

    def sessions(self, path: Path, faults: Faults) -> dict[str, Placed]:
        """See RunReader. Raises WorkloadUnusable."""
        document = _document(path)
        if document.block_size != self.block_tokens:
            said = f"blocks of {document.block_size} tokens, where files before it have {self.block_tokens}"
            raise WorkloadUnusable(f"{path}: {said}")
        faults.unit = "request"
        run = _Run(self.block_tokens, faults)
        played = run.play(document.requests)
        if run.empty_answers and not self.notes:
            self.notes.append("answers without a token, as of requests that were broken off, have one")
        return {"": played}


class _Run:
    """One file's requests, put in order; `empty_answers` of them were answered by nothing."""

    def __init__(self, block_tokens: int, faults: Faults) -> None:
        self._block_tokens = block_tokens
        self._faults = faults
        self._turns: Placed = []
        self._spans: list[tuple[float, float]] = []  # of each turn, in seconds from the start of the run
        self._token_s = 0.0
        self.empty_answers = 0

    def play(self, requests: list[msgspec.Raw]) -> Placed:
        agent = _Agent(self._read(requests, ""))
        times = [one.api_time / one.output_tokens for one in _all(agent) if one.api_time and one.output_tokens]
        self._token_s = median(times) if times else 0.0
        beyond = max((max(one.hash_ids, default=-1) for one in _all(agent)), default=-1) + 1
        self._follow(agent, 0.0, -1, beyond)
        return self._turns

    def _read(self, requests: list[msgspec.Raw], prefix: str) -> "list[tuple[str, _Entry | _Agent]]":
        found: list[tuple[str, _Entry | _Agent]] = []
        for number, raw in enumerate(requests, 1):
            place = self._faults.row = f"{prefix}{number}"
            try:
                if not bytes(msgspec.json.decode(raw, type=_Kind).requests):
                    entry = msgspec.json.decode(raw, type=_Entry)
                    if len(entry.hash_ids) < entry.prompt_tokens // self._block_tokens:
                        self._faults.bad(f"{len(entry.hash_ids)} hash ids do not cover {entry.prompt_tokens} tokens")
                        continue
                    if reason := too_many_ids(len(entry.hash_ids), entry.prompt_tokens, self._block_tokens):
                        self._faults.bad(reason)
                        continue
                    found.append((place, entry))
                elif prefix.count(".") == NESTED_MAX:
                    self._faults.bad(f"is a sub-agent in {NESTED_MAX} others")
                else:
                    agent = msgspec.json.decode(raw, type=_SubAgent)
                    began_s = agent.t - agent.duration_ms / 1e3
                    found.append((place, _Agent(self._read(agent.requests, f"{place}."), agent.agent_id, began_s)))
            except NOT_JSON as error:
                self._faults.bad(str(error))
        return found

    def _follow(self, agent: _Agent, zero_s: float, spawner: int, beyond: int) -> int:
        """The turns of an agent whose times count from `zero_s`; the number of its last, -1 for none."""
        last, last_s = spawner, 0.0
        mine: list[int] = []
        joined: list[int] = []
        for place, entry in agent.entries:
            self._faults.row = place
            if isinstance(entry, _Agent):
                began_s = zero_s + entry.began_s
                of = next((one for one in reversed(mine) if self._spans[one][0] <= began_s), spawner)
                if (end := self._follow(entry, began_s, of, beyond)) >= 0:
                    joined.append(end)
                continue
            if entry.t < last_s:
                self._faults.bad(f"its time, {entry.t:g} s, is before that of the request before it, {last_s:g} s")
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
            ids = (*ids, beyond + number)  # what is no whole block has no id there, and is nobody else's
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
        raise WorkloadUnusable(f"{path}: is no run of Weka's ({error})") from error
