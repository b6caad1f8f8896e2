"""`forebay profile`: profiles of engines, measured or from published measurements."""

from pathlib import Path

import click

from forebay.cli.common.errors import complain, fail
from forebay.cli.simulate.command import AiconfiguratorCommand
from forebay.simulate.profiles.profile import EngineSizes, Profile, write_linear
from forebay.simulate.profiles.sheets import ProfileUnusable

BACKENDS = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}  # AIConfigurator's name of each engine


def run_aiconfigurator(options: AiconfiguratorCommand) -> None:
    from forebay.simulate.profiles.aiconfigurator import fit_estimates  # noqa: PLC0415 - other commands need it not

    try:
        found = fit_estimates(options.model, options.system, BACKENDS[options.engine], options.tensor_parallel)
    except ProfileUnusable as error:
        fail(str(error))
    profile = Profile(
        timing=found.timing,
        sizes=EngineSizes(gpus=float(options.tensor_parallel)),
        name=f"{options.model} on {options.tensor_parallel} {options.system}, {options.engine}",
        source="estimates of NVIDIA's AIConfigurator",
    )
    errors = [
        f"{name} {p50:.1%} / {p90:.1%}" for name, (p50, p90) in zip(("prefill", "decode"), found[1:], strict=True)
    ]
    write_profile(
        profile, f"relative errors of single steps against the estimates, p50 / p90: {', '.join(errors)}", options.out
    )


def write_profile(profile: Profile, notes: str, out: Path | None) -> None:
    """Write a profile with notes to a file, or to stdout if `out` is None. The notes also go to stderr."""
    complain(notes)
    text = write_linear(profile, notes)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out}: {error.strerror}")
