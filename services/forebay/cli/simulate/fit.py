"""`forebay fit`: fit an engine profile to a recording."""

from collections import Counter
from collections.abc import Sequence

from forebay.analysis.engine_runs import engine_runs
from forebay.cli.common.engine_profile import write_profile
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.simulate.against import observed_history
from forebay.cli.simulate.command import FitCommand
from forebay.runtime.errors import ConfigError
from forebay.simulate.profiles.fitting import FitImpossible, TimingFit, fit
from forebay.simulate.profiles.profile import EngineSizes, Profile

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
        if history.divergence is not None:
            where = f"history diverges at journal offset {history.divergence.offset}: {history.divergence.reason}"
            raise ConfigError(f"{where}; run `forebay verify` for details")
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
    write_profile(profile, "\n".join([title, *_lines(found), *left_out]), options.out)


def _lines(found: TimingFit) -> Sequence[str]:
    estimates = [
        f"  {one.value:14.6g} us  +- {one.error:<10.3g}  {OF[one.name]} ({one.name})" for one in found.estimates
    ]
    errors = [
        f"{name} of requests outside the fitted set: errors p50 / p90 {p50:.1%} / {p90:.1%}"
        for name, (p50, p90) in found.errors.items()
    ]
    return [*estimates, *errors, *(f"warning: {one}" for one in found.warnings)]
