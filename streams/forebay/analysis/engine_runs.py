"""Requests of each engine in a recording, to which `forebay.simulate.profiles.fitting` fits a timing."""

from bisect import bisect_right

from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.snapshots import WorkerState
from forebay.replay.observed_history import ObservedHistory, ObservedRequest
from forebay.runtime.errors import ConfigError
from forebay.simulate.profiles.fitting import EngineRun, TimedRequest


def engine_runs(history: ObservedHistory, pool: str) -> list[EngineRun]:
    """Return the requests of each rank of a pool, from each join of its worker. Empty `pool`: of the only one.

    Raises ConfigError if there are none, or the workers differ.
    """
    joined: dict[str, list[tuple[int, WorkerSpec]]] = {}
    for chunk in history.state:
        if isinstance(chunk, WorkerState):
            joined[chunk.spec.worker_id] = [(0, chunk.spec)]
    for at_us, event in history.external_events:
        if isinstance(event, WorkerJoined):
            joined.setdefault(event.spec.worker_id, []).append((at_us, event.spec))
    runs: dict[tuple[str, int, int], EngineRun] = {}
    for one in history.requests:
        if one.worker is None:
            continue
        name, rank = one.worker
        at = bisect_right(joined[name], one.at_us, key=lambda join: join[0]) - 1
        spec = joined[name][max(at, 0)][1]
        runs.setdefault((name, rank, at), EngineRun(spec)).requests.append(_observed(one))
    found = [run for run in runs.values() if not pool or run.spec.pool == pool]
    if not found:
        known = sorted({run.spec.pool for run in runs.values()})
        there = f"; pools are: {', '.join(known)}" if known else ""
        raise ConfigError(f"no request was routed to a worker{f' of pool {pool!r}' if pool else ''}{there}")
    kinds = sorted({(run.spec.pool, run.spec.engine, _sizes(run.spec)) for run in found})
    if len(kinds) > 1:
        kinds_text = "; ".join(f"{name}: {engine} with {sizes}" for name, engine, sizes in kinds)
        raise ConfigError(f"workers differ in engine or cache or batch size; choose a pool with --pool ({kinds_text})")
    return found


def _observed(one: ObservedRequest) -> TimedRequest:
    left_out = ""
    if one.in_flight or one.attempts > 1:
        left_out = "continued on another worker, or in flight at the beginning"
    elif one.prefiller is not None:
        left_out = "prefilled by another worker"
    elif not one.output_tokens or not one.first_us:
        left_out = "cancelled, failed, without output or unfinished"
    return TimedRequest(
        one.at_us, one.prompt_tokens, one.output_tokens or 1, one.cached_tokens, one.first_us, one.last_us,
        one.cancelled_us, left_out,
    )  # fmt: skip


def _sizes(spec: WorkerSpec) -> str:
    cache = f"{spec.kv_blocks_total} blocks of {spec.block_size} tokens"
    return f"{cache}, {spec.max_num_seqs} sequences, {spec.max_num_batched_tokens} tokens per step"
