"""`forebay fit`: fit an engine profile to a recording."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import TextColumn, TimeElapsedColumn

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.extras import require_extra
from forebay.cli.common.recording import GroupOption, Recording
from forebay.cli.common.terminal import bar
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.replay.verify import shown_progress
from forebay.cli.simulate.engine_runs import EngineRuns, engine_runs
from forebay.cli.simulate.profile import OutOption, write_profile
from forebay.core.routing.policies import CustomPolicies
from forebay.ingress.errors import Unusable
from forebay.replay.policies import require_allowed
from forebay.replay.verify.verify import OnProgress
from forebay.simulate.profiles.profile import EngineSizes, Profile
from forebay.transport.sqlite.log import SqliteLog

if TYPE_CHECKING:
    from forebay.simulate.profiles.fitting import FitError, TimingFit

OF = {
    "step": "per step",
    "prefill_token": "per prompt token",
    "attended_pair": "per attention pair of a prompt token",
    "decode_step": "per step that decodes",
    "decode_sequence": "per decoding sequence",
    "context_token": "per context token of a decoding sequence",
    "work": "per request, outside the engine",
}


def run_fit(*, log: Path, out: OutOption, pool: str, group: GroupOption, allow_policy: AllowPolicyOption) -> None:
    """Run `forebay fit`. fit_command.py documents its options."""
    require_extra("fit", "forebay fit", "numpy", "scipy")
    if out is not None and out.exists() and log.exists() and out.samefile(log):
        fail(f"{out}: --out names the recording itself; choose another file")
    with explained():
        custom = allowed_policies(allow_policy)
        with shown_progress() as on_progress:
            engines = asyncio.run(_read(Recording(log=log, group=group), pool, on_progress, custom))
        found = _fitted(engines)
    write_profile(_profile(engines, found, log), _notes(engines, found, log.name), out)


async def _read(recording: Recording, pool: str, on_progress: OnProgress, custom: CustomPolicies) -> EngineRuns:
    async with recording.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        await require_allowed(log, partition, custom)
        return await engine_runs(log, partition, pool, on_progress, custom)


def _fitted(engines: EngineRuns) -> "TimingFit":
    """Fit the timing, with a progress bar.

    Raises:
        Unusable: too few requests can be compared.
    """
    from forebay.simulate.profiles import fitting  # noqa: PLC0415 - optional dependency that takes 1 s to load

    with bar(TextColumn("engine model: {task.completed} runs"), TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=None)
        try:
            return fitting.fit(engines.runs, lambda done: progress.update(task, completed=done))
        except fitting.FitImpossible as error:
            raise Unusable(f"{error}{_why_left_out(engines)}") from None


def _why_left_out(engines: EngineRuns) -> str:
    reasons = [one.left_out for run in engines.runs for one in run.requests if one.left_out]
    counted = "; ".join(f"{reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons))
    return f" (left out: {counted})" if counted else ""


def _profile(engines: EngineRuns, found: "TimingFit", log: Path) -> Profile:
    config = engines.runs[0].config
    return Profile(
        timing=found.timing,
        sizes=EngineSizes(
            block_size=config.block_size,
            kv_blocks=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        ),
        name=f"{engines.engine}, fitted",
        source=f"fitted to {log.name}",
        work_us=found.work_us,
    )


def _notes(engines: EngineRuns, found: "TimingFit", name: str) -> str:
    """Return a summary of the fit for the user."""
    lines = [f"fitted to {found.fitted} requests of {name} on {len(engines.runs)} ranks of {engines.engine}"]
    lines += [f"  {one.value:14.6g} us  +- {one.error:<10.3g}  {OF[one.name]} ({one.name})" for one in found.estimates]
    lines += [_error_line("TTFT", found.ttft)]
    if found.itl is not None:
        lines += [_error_line("ITL", found.itl)]
    lines += [f"left out: {count} requests, reason: {reason}" for reason, count in found.left_out.items()]
    if engines.lost:
        lines += [f"{engines.lost} workers were lost during the recording; their requests in flight are left out"]
    if engines.clocks_differ:
        lines += ["the workers' clocks contradict the owner's clock, so times are those at which the owner read events"]
    return "\n".join([*lines, *(f"warning: {one}" for one in found.warnings)])


def _error_line(name: str, error: "FitError") -> str:
    recorded, modelled = (f"{times[0]:.2f} / {times[1]:.2f}" for times in (error.recorded_ms, error.modelled_ms))
    return (
        f"{name} p50 / p90 of {error.requests} requests outside the fitted set: recorded {recorded} ms, "
        f"modelled {modelled} ms; errors of single requests {error.p50:.1%} / {error.p90:.1%}"
    )
