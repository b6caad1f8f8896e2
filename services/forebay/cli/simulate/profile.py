"""`forebay profile`: engine profiles from other people's measurements."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.errors import complain, fail
from forebay.simulate.profiles.profile import Profile, Sizes, write_linear
from forebay.simulate.profiles.sheets import ProfileUnusable

app = typer.Typer(no_args_is_help=True, help="Engine profiles from other people's measurements.")


@app.callback()
def _group() -> None:
    """Engine profiles from other people's measurements."""


@app.command("aiconfigurator")
def aiconfigurator(
    model: Annotated[str, typer.Argument(help="A model that it knows by its name on Hugging Face.")],
    system: Annotated[str, typer.Option(help="Its name of the GPU, as h100_sxm, h200_sxm or b200_sxm.")] = "h100_sxm",
    backend: Annotated[str, typer.Option(help="Its name of the engine: vllm, sglang or trtllm.")] = "vllm",
    tensor_parallel: Annotated[int, typer.Option(min=1, max=1024, help="GPUs that share each matrix.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", dir_okay=False, help="Write the profile; on stdout when left out.")
    ] = None,
) -> None:
    """Write a profile of what NVIDIA's AIConfigurator estimates of a model's steps.

    How near the profile is to these estimates is told on stderr and in the file.
    """
    if find_spec("aiconfigurator_core") is None:
        fail("its measurements are an extra: pip install 'forebay[aiconfigurator]'")
    from forebay.simulate.profiles.aiconfigurator import estimated  # noqa: PLC0415 - an extra, and seconds to load

    try:
        found = estimated(model, system, backend, tensor_parallel)
    except ProfileUnusable as error:
        fail(str(error))
    profile = Profile(
        timing=found.timing,
        sizes=Sizes(gpus=float(tensor_parallel)),
        name=f"{model} on {tensor_parallel} {system}, {backend}",
        source="estimates of NVIDIA's AIConfigurator",
    )
    errors = [
        f"{name} {p50:.1%} / {p90:.1%}" for name, (p50, p90) in zip(("prefill", "decode"), found[1:], strict=True)
    ]
    notes = f"single steps against its estimates, relative errors p50 / p90: {', '.join(errors)}"
    complain(notes)
    text = write_linear(profile, notes)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{out}: {error.strerror}")
