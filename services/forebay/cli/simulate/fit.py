"""`forebay fit`: fit an engine profile to a recording."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import click

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.simulate.against import observed_history
from forebay.cli.simulate.command import FitCommand
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.snapshots import WorkerState
from forebay.processes.notices import complain
from forebay.replay.observed_history import ObservedHistory, ObservedRequest
from forebay.runtime.errors import ConfigError
from forebay.simulate.profiles.fitting import EngineRun, FitImpossible, TimedRequest, TimingFit, fit
from forebay.simulate.profiles.profile import EngineSizes, Profile, write_linear

OF = {
    "step": "per step",
    "prefill_token": "per prompt token",
    "attended_pair": "per attention pair of a prompt token",
    "decode_step": "per step that decodes",
    "decode_sequence": "per decoding sequence",
    "context_token": "per context token of a decoding sequence",
    "work": "per request, outside the engine",
}


def run_fit(options: FitCommand) -> None:
    if options.out is not None and options.out.exists() and options.log.exists() and options.out.samefile(options.log):
        fail(f"{options.out}: --out names the recording itself; choose another file")
    with explained():
        custom = allowed_policies(options.allow_policy)
        history = observed_history(Recording(log=options.log, group=options.group), custom)
        runs = engine_runs(history, options.pool)
        reasons = Counter(one.left_out for run in runs for one in run.requests if one.left_out)
        left_out = [f"left out: {count} requests, reason: {reason}" for reason, count in reasons.items()]
        try:
            found = fit(runs)
        except FitImpossible as error:
            raise ConfigError("; ".join([str(error), *left_out])) from None
    spec = runs[0].spec
    profile = Profile(
        timing=found.timing,
        sizes=EngineSizes(
            block_size=spec.block_size,
            kv_blocks=spec.kv_blocks_total,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
        ),
        name=f"{spec.engine}, fitted",
        source=f"fitted to {options.log.name}",
        work_us=found.work_us,
    )
    title = f"fitted to {found.fitted} requests of {options.log.name} on {len(runs)} ranks of {spec.engine}"
    notes = "\n".join([title, *_lines(found), *left_out])
    complain(notes)
    text = write_linear(profile, notes)
    if options.out is None:
        click.echo(text, nl=False)
        return
    try:
        options.out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{options.out}: {error.strerror}")


def _lines(found: TimingFit) -> Sequence[str]:
    estimates = [
        f"  {one.value:14.6g} us  +- {one.error:<10.3g}  {OF[one.name]} ({one.name})" for one in found.estimates
    ]
    errors = [
        f"{name} of requests outside the fitted set: errors p50 / p90 {p50:.1%} / {p90:.1%}"
        for name, (p50, p90) in found.errors.items()
    ]
    return [*estimates, *errors, *(f"warning: {one}" for one in found.warnings)]


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
