"""`forebay profile`: profiles of engines, measured or from published measurements."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.errors import complain, fail
from forebay.cli.common.extras import require_extra
from forebay.cli.profiler.command import run
from forebay.events.names import unknown_name
from forebay.simulate.profiles.profile import EngineSizes, Profile, write_linear
from forebay.simulate.profiles.sheets import ProfileUnusable

BACKENDS = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm"}  # AIConfigurator's name of each engine
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", dir_okay=False, help="Write the profile to this file, not to stdout.")
]

app = typer.Typer(no_args_is_help=True, help="Measure a live worker, or create an engine profile.")


@app.callback()
def _group() -> None:
    """Measure a live worker, or create an engine profile."""


app.command("run")(run)


@app.command("aiconfigurator")
def aiconfigurator(
    model: Annotated[str, typer.Argument(help="Name of a model on Hugging Face that AIConfigurator supports.")],
    system: Annotated[str, typer.Option(help="GPU system, such as h100_sxm, h200_sxm or b200_sxm.")] = "h100_sxm",
    engine: Annotated[str, typer.Option(help=f"Engine: {', '.join(BACKENDS)}.")] = "vllm",
    tensor_parallel: Annotated[int, typer.Option(min=1, max=1024, help="Tensor-parallel GPUs per engine.")] = 1,
    out: OutOption = None,
) -> None:
    """Write a profile that approximates NVIDIA AIConfigurator's estimates of a model's step times.

    Errors against these estimates are printed on stderr and written to the file.
    """
    if engine not in BACKENDS:
        fail(f"--engine: {unknown_name('engine', engine, BACKENDS)}")
    require_extra("aiconfigurator", "forebay profile aiconfigurator", "aiconfigurator_core", "numpy", "scipy")
    from forebay.simulate.profiles.aiconfigurator import fit_estimates  # noqa: PLC0415 - optional and slow to load

    try:
        found = fit_estimates(model, system, BACKENDS[engine], tensor_parallel)
    except ProfileUnusable as error:
        fail(str(error))
    profile = Profile(
        timing=found.timing,
        sizes=EngineSizes(gpus=float(tensor_parallel)),
        name=f"{model} on {tensor_parallel} {system}, {engine}",
        source="estimates of NVIDIA's AIConfigurator",
    )
    errors = [
        f"{name} {p50:.1%} / {p90:.1%}" for name, (p50, p90) in zip(("prefill", "decode"), found[1:], strict=True)
    ]
    write_profile(
        profile, f"relative errors of single steps against the estimates, p50 / p90: {', '.join(errors)}", out
    )


def write_profile(profile: Profile, notes: str, out: Path | None) -> None:
    """Write a profile with notes to a file, or to stdout if `out` is None. The notes also go to stderr."""
    complain(notes)
    text = write_linear(profile, notes)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out}: {error.strerror}")
