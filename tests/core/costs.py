"""Candidates and cost tables."""

from typing import Any

from forebay.core.routing.cost import CostTable, Demand, cost_table
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.load import FleetLoad
from forebay.core.state.roster import CandidateRank, Roster
from forebay.events.control import RouterConfig
from tests.core.worlds import spec

BLOCK_SIZE = 64


def roster(**loads: tuple[int, int, int]) -> Roster:
    """Seats by worker id, each with (prefill tokens, decode blocks, active requests)."""
    load = FleetLoad()
    seats = []
    for name, (prefill_tokens, decode_blocks, active_requests) in loads.items():
        worker = FleetWorker(spec(name, taints=tuple(name.split("_")[1:])), "l", 0, 1, 0)
        rank = load.add_rank(name, 0, BLOCK_SIZE)
        for number in range(active_requests):
            first = number == 0
            load.book(
                f"{name}{number}",
                (name, 0),
                prefill_tokens=prefill_tokens if first else 0,
                blocks=range(decode_blocks) if first else [],
            )
        seats.append(CandidateRank(worker, 0, rank, (name, 0)))
    return Roster(seats)


def table(seats: Roster, prompt_tokens: int, blocks: int = 0, **changes: Any) -> CostTable:
    names = ("overlaps", "active", "preferred_taints")
    demand: dict[str, Any] = {name: changes.pop(name) for name in names if name in changes}
    fields: dict[str, Any] = {"active": {}, "overlaps": {}, **demand}
    return cost_table(RouterConfig(**changes), BLOCK_SIZE, seats, Demand(prompt_tokens, blocks, **fields))
