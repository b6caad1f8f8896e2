"""Results of `forebay profile run`: tables on the terminal, and an engine profile."""

from pathlib import Path

from rich.table import Table

from forebay.cli.common.engine_profile import write_profile
from forebay.cli.common.tables import results, table
from forebay.cli.profiler.profile_file import MeasuredProfile
from forebay.simulate.profiles.profile import EngineSizes, Profile


def show(profile: MeasuredProfile) -> None:
    """Print the measured points as tables, and the points that were left out."""
    console = results()
    if profile.prefill:
        console.print(_table("prefill", ("isl", "ttft_ms", "tokens_per_s"), profile))
    if profile.decode:
        console.print(_table("decode", ("context", "concurrency", "itl_ms", "tokens_per_s"), profile))
    for one in profile.left_out:
        console.print(f"left out: {one.point}: {one.reason}", markup=False)


def write_engine_profile(profile: MeasuredProfile, batched_tokens: int, out: Path) -> None:
    """Fit an engine profile to the points and write it. Raises ConfigError if there are too few points."""
    from forebay.simulate.profiles.measured import fit_measured  # noqa: PLC0415 - an extra, which takes 1 s to import

    found = fit_measured(profile.prefill, profile.decode, batched_tokens)
    name = profile.settings.worker or profile.settings.model
    errors = (f"{stage} {p50:.1%} / {p90:.1%}" for stage, (p50, p90) in zip(("TTFT", "ITL"), found[2:], strict=True))
    write_profile(
        Profile(
            timing=found.timing,
            sizes=EngineSizes(max_num_batched_tokens=batched_tokens),
            name=f"{name}, measured",
            source="forebay profile run",
            work_us=found.work_us,
        ),
        f"relative errors against the measured points, p50 / p90: {', '.join(errors)}",
        out,
    )


def _table(stage: str, columns: tuple[str, ...], profile: MeasuredProfile) -> Table:
    shown = table(stage, columns, left=0)
    for point in getattr(profile, stage):
        values = (getattr(point, column) for column in columns)
        shown.add_row(*(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values))
    return shown
