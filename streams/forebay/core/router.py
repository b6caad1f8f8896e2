"""Which worker rank gets a request: eligible options, their costs, the choice, and its explanation."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.core.cost import Cost, Option, candidate, cost_table, table_digest, terms_of
from forebay.core.fleet import Fleet, WorkerPhase
from forebay.core.lifecycle import Request
from forebay.core.load import Load
from forebay.core.prefix_index import NO_OVERLAP, PrefixIndex
from forebay.core.selection import draw, lowest, softmax_weights
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import Candidate, CostTerms


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision and what explains it."""

    option: Option
    terms: CostTerms
    table_digest: int
    candidates: int
    ties: int
    runner_up: Candidate | None


def options_for(request: Request, fleet: Fleet, index: PrefixIndex, load: Load) -> list[Option]:
    """Every rank of a ready worker of the request's pool, in order of (worker id, rank)."""
    overlaps = index.overlaps(request.blocks)
    loads = load.loads(request.blocks)
    return [
        Option(
            worker.spec.worker_id,
            worker.worker_epoch,
            worker.slot,
            rank,
            overlaps.get((worker.spec.worker_id, rank), NO_OVERLAP),
            loads[worker.spec.worker_id, rank],
        )
        for worker in fleet.workers()
        if worker.phase is WorkerPhase.READY and worker.spec.pool == request.pool
        for rank in range(worker.spec.dp_size)
    ]


def choose(pool: PoolConfigured, request: Request, options: Sequence[Option], turn: int) -> Choice:
    """Pick one of the options (at least one). `turn` counts the pool's decisions before, for round robin."""
    assert options, "somebody must be eligible"
    config = pool.router
    costs = cost_table(config, request.prompt_tokens, pool.block_size, options)
    at, ties = _pick(config, [cost.cost for cost in costs], request.tie_seed, turn)
    return Choice(
        option=options[at],
        terms=terms_of(options[at], costs[at]),
        table_digest=table_digest(options, costs),
        candidates=len(options),
        ties=ties,
        runner_up=_runner_up(options, costs, at),
    )


def _pick(config: RouterConfig, costs: Sequence[float], seed: int, turn: int) -> tuple[int, int]:
    if config.mode == "round-robin":
        return turn % len(costs), 1
    if config.temperature > 0.0:
        return draw(softmax_weights(costs, config.temperature), seed), 1
    return lowest(costs, seed)


def _runner_up(options: Sequence[Option], costs: Sequence[Cost], winner: int) -> Candidate | None:
    others = [at for at in range(len(costs)) if at != winner]
    if not others:
        return None
    best = min(others, key=lambda at: costs[at].cost)
    return candidate(options[best], costs[best])
