"""Converter of published traces of agents to forebay's workload format: Weka's coding agents, and LMCache's agents.

`python -m tests.harness.agent_traces OUT FILE…` writes the sessions of all files as one workload, side by side.
Sessions of Weka start at the same time, those of LMCache at their recorded times, unless `--spacing-s` is set.

Weka (github.com/callanjfox/kv-cache-tester, docs/trace_replay_tester.md): one JSON object per session. `t` of a request
is its start, in seconds from the start of its agent; `api_time` is the latency of its response. An entry with requests
is a sub-agent. Its `t` is its end, and it began `duration_ms` earlier, when the previous request of its parent was
answered. It runs in parallel with its parent, whose next request waits for all sub-agents before it.

LMCache (github.com/LMCache/lmcache-agent-trace): unordered JSON lines of timestamp (us), input, output (text) and
session_id. A call arrives at its recorded time, but not before the response to the previous call of its session.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from forebay.simulate.workload import Turn
from forebay.simulate.workloads.rows import WorkloadHeader, encode_workload

US_PER_S = 1_000_000
TOKEN_CHARACTERS = 4
LMCACHE_BLOCK_TOKENS = 64
ID_BITS_CUT = 11  # leaves 53 bits, because other JSON readers round larger integers

Session = tuple[int, str, list[Turn]]  # start in us, name, requests with times from the start of the session


class _WekaSession:
    def __init__(self, document: dict[str, Any], name: str) -> None:
        self._name = name
        self._size: int = document["block_size"]
        times = [one["api_time"] / one["out"] for one in _requests(document) if one.get("api_time") and one["out"]]
        self._token_s = median(times) if times else 0.0
        self._beyond = max((max(one["hash_ids"], default=-1) for one in _requests(document)), default=-1) + 1
        self.turns: list[Turn] = []
        self._spans: list[tuple[float, float]] = []  # start and end of each turn, in seconds from the start of the run
        self._follow(document, 0.0, -1, "")

    def _follow(self, agent: dict[str, Any], zero_s: float, spawner: int, name: str) -> int:
        """Add the turns of an agent whose times count from `zero_s`. Return the number of its last turn, or -1."""
        last = spawner
        mine: list[int] = []
        joined: list[int] = []
        for entry in agent["requests"]:
            if "requests" in entry:
                began_s = zero_s + entry["t"] - entry.get("duration_ms", 0.0) / 1e3
                of = next((one for one in reversed(mine) if self._spans[one][0] <= began_s), spawner)
                if (end := self._follow(entry, began_s, of, entry.get("agent_id", ""))) >= 0:
                    joined.append(end)
                continue
            after = tuple(sorted({one for one in (last, *joined) if one >= 0}))
            last = self._add(entry, zero_s + entry["t"], after, name)
            mine.append(last)
            joined.clear()
        return mine[-1] if mine else -1

    def _add(self, entry: dict[str, Any], at_s: float, after: tuple[int, ...], name: str) -> int:
        number, ids = len(self.turns), tuple(entry["hash_ids"])
        if len(ids) * self._size < entry["in"]:
            ids = (*ids, self._beyond + number)  # the trace has no id for a partial block, so give it a unique one
        took_s = entry["out"] * self._token_s if entry.get("api_time") is None else entry["api_time"]
        waited_s = at_s - max(self._spans[one][1] for one in after) if after else 0.0
        turn = Turn(
            number=number,
            prompt_tokens=entry["in"],
            output_tokens=max(1, entry["out"]),
            block_ids=ids,
            after=after,
            delay_us=max(0, round(waited_s * US_PER_S)),
            session_id=f"{self._name}/{name}" if name else self._name,
            model=entry.get("model", ""),
        )
        self.turns.append(turn)
        self._spans.append((at_s, at_s + took_s))
        return number


def _requests(agent: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for entry in agent["requests"]:
        if "requests" in entry:
            yield from _requests(entry)
        else:
            yield entry


def _lmcache_sessions(path: Path) -> Iterator[Session]:
    calls: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        call = json.loads(line)
        calls.setdefault(call.get("session_id", ""), []).append(call)
    for name, of in calls.items():
        of.sort(key=lambda call: call["timestamp"])
        session = path.stem if name == path.stem else f"{path.stem}/{name}"
        turns = [
            Turn(
                number=number,
                prompt_tokens=_tokens(call["input"]),
                output_tokens=max(1, _tokens(call["output"])),
                block_ids=tuple(_block_ids(call["input"])),
                at_us=call["timestamp"] - of[0]["timestamp"],
                after=(number - 1,) if number else (),
                session_id=session,
            )
            for number, call in enumerate(of)
        ]
        yield of[0]["timestamp"], session, turns


def _tokens(text: str) -> int:
    return -(-len(text) // TOKEN_CHARACTERS)


def _block_ids(text: str) -> Iterator[int]:
    before, size = 0, LMCACHE_BLOCK_TOKENS * TOKEN_CHARACTERS
    for at in range(0, len(text), size):
        before = xxh3_64_intdigest(text[at : at + size].encode("utf-32-le"), before)
        yield before >> ID_BITS_CUT


def _is_lmcache(path: Path) -> bool:
    with path.open() as file:
        try:
            return "input" in json.loads(file.readline())
        except ValueError:
            return False


def turns(paths: Sequence[Path], spacing_s: float | None = None) -> tuple[int, list[Turn]]:
    """Return the tokens per block id, and the requests of all sessions, in the order in which these start."""
    sessions: list[Session] = []
    block_tokens = LMCACHE_BLOCK_TOKENS
    are_ids_local = False
    for path in paths:
        if _is_lmcache(path):
            sessions += _lmcache_sessions(path)
            continue
        document = json.loads(path.read_text())
        block_tokens, are_ids_local = document["block_size"], True
        sessions.append((0, path.stem, _WekaSession(document, path.stem).turns))
    sessions.sort(key=lambda session: session[0])
    found: list[Turn] = []
    base = 0
    for at, (began_us, _, of) in enumerate(sessions):
        start_us = began_us - sessions[0][0] if spacing_s is None else round(at * spacing_s * US_PER_S)
        number = len(found)
        found += [
            replace(
                turn,
                number=number + turn.number,
                after=tuple(number + one for one in turn.after),
                block_ids=tuple(base + one for one in turn.block_ids),
                at_us=0 if turn.after and not turn.at_us else start_us + turn.at_us,
            )
            for turn in of
        ]
        if are_ids_local:
            base = max((max(turn.block_ids, default=-1) for turn in found), default=-1) + 1
    return block_tokens, found


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert traces of agents to forebay's workload format.")
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--spacing-s", type=float, help="seconds between the starts of consecutive sessions")
    options = parser.parse_args()
    block_tokens, found = turns(options.files, options.spacing_s)
    with options.out.open("wb") as file:
        file.writelines(encode_workload(found, WorkloadHeader(block_tokens=block_tokens)))


if __name__ == "__main__":
    main()
