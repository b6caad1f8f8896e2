"""Generated routing cases of the determinism check of policies, the same in every process.

They contain ties, idle fleets, one candidate and many, caches on every tier and every kind of request. Numbers are
drawn from a fixed seed by `mix64`, so no case depends on Python's random number generator.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from forebay.core.routing.policies import Candidate, RoutingRequest, RoutingWorld
from forebay.core.routing.selection import mix64
from forebay.core.state.prefix_index import Overlap
from forebay.events.control import RouterConfig
from forebay.events.requests import RoutingHints

CASES = 320
SIZES = (1, 2, 3, 4, 7, 8, 16, 33, 64)
BLOCK_SIZE = 64
TAINTS = ((), ("zone-a",), ("zone-b",), ("zone-a", "spot"))


class Candidates(Sequence[Candidate]):
    """Candidates as a Sequence that is not a list, like the router's, so that a policy cannot rely on list methods."""

    def __init__(self, candidates: Iterable[Candidate]) -> None:
        self._candidates = list(candidates)

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...

    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        return self._candidates[at]


class _Numbers:
    """Pseudorandom integers from a seed."""

    def __init__(self, seed: int) -> None:
        self._state = mix64(seed)

    def below(self, end: int) -> int:
        """Return the next integer from 0 to `end` - 1."""
        self._state = mix64(self._state)
        return self._state % end


def case(number: int, mode: str) -> tuple[RoutingWorld, RoutingRequest]:
    """Return one routing case as new objects, so that changes by a policy do not affect its next decision.

    Args:
        number: Case number, from 0 to CASES - 1.
    """
    numbers = _Numbers(number)
    prompt_blocks = 1 + numbers.below(40)
    request = RoutingRequest(
        request_id=f"request-{number}",
        prompt_tokens=prompt_blocks * BLOCK_SIZE + numbers.below(BLOCK_SIZE),
        blocks=[mix64(number << 16 | at) for at in range(prompt_blocks)],
        tie_seed=mix64(number),
        attempt=1 + (number % 11 == 0),
        hints=RoutingHints(
            session_id=f"session-{number % 5}" if number % 3 == 0 else "",
            priority=number % 7 if number % 4 == 0 else 0,
            expected_output_tokens=100 if number % 6 == 0 else 0,
        ),
        lora_name="adapter" if number % 13 == 0 else "",
    )
    config = RouterConfig(mode=mode, temperature=0.5 if number % 8 == 0 else 0.0)
    candidates = Candidates(_candidates(numbers, number, prompt_blocks))
    costs = [_cost(config, candidate, prompt_blocks) for candidate in candidates]
    now_us = 1_700_000_000_000_000 + number * 1_000
    computed_tokens = [numbers.below(1_000) * (number % 2) for _ in costs]
    return RoutingWorld(candidates, costs, computed_tokens, config, BLOCK_SIZE, number * 3, now_us), request


def _candidates(numbers: _Numbers, number: int, prompt_blocks: int) -> Iterator[Candidate]:
    count = SIZES[number % len(SIZES)]
    ranks = 2 if number % 5 == 0 else 1
    kind = number // len(SIZES) % 4  # idle and empty; idle with caches; all equal; all different
    for at in range(count):
        cached = [numbers.below(prompt_blocks + 1) if kind in {1, 3} else 0 for _ in range(3)]
        busy = numbers.below(12) if kind == 3 else 3 * (kind == 2)
        yield Candidate(
            worker_id=f"worker-{at // ranks:02}",
            rank=at % ranks,
            overlap=Overlap(cached[0], cached[1] if number % 2 else 0, cached[2] if number % 7 == 0 else 0),
            prefill_tokens=busy * 512,
            decode_blocks=busy * 9.5 + prompt_blocks,
            active_requests=busy,
            kv_blocks_total=16_384,
            kv_blocks_used=None if at % 3 == 0 else busy * 20,
            max_num_batched_tokens=8_192,
            taints=TAINTS[(number + at) % len(TAINTS)] if number % 2 else (),
        )


def _cost(config: RouterConfig, candidate: Candidate, prompt_blocks: int) -> float:
    prefill = candidate.prefill_tokens / BLOCK_SIZE + prompt_blocks
    overlap = candidate.overlap
    credit = overlap.device + config.host_cache_hit_weight * overlap.host + config.disk_cache_hit_weight * overlap.disk
    return max(prefill - credit, 0.0) + candidate.decode_blocks
