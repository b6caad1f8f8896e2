"""The planner of a simulation, from its file."""

from collections.abc import Iterator
from pathlib import Path

from forebay.cli.planner.planner_file import PlannerFile, read_planner_file
from forebay.events.scaling import DemandForecast, SimulatedSize
from forebay.planner.predictors import predictor
from forebay.planner.simulation import simulated_sizes
from forebay.runtime.errors import prefixed
from forebay.simulate.planned import Planning, require_plannable
from forebay.simulate.settings import Settings
from forebay.simulate.slo import Slo


def read_planner(path: Path, settings: Settings) -> PlannerFile:
    """Read the file of a planner. Raises ConfigError if it is invalid, or cannot scale the fleet."""
    planner = read_planner_file(path)
    with prefixed(f"--planner {path}"):
        require_plannable(planner.settings, settings)
    return planner


def planning_of(planner: PlannerFile) -> Planning:
    """Return the planner of a simulation with its predictor."""
    settings, engines = planner.settings, planner.engines

    def simulate(forecast: DemandForecast, target: float) -> Iterator[SimulatedSize]:
        return simulated_sizes(forecast, settings, engines, target)

    return Planning(settings, predictor(settings.predictor), simulate)


def targets_of(planner: PlannerFile | None) -> Slo | None:
    """Return the targets of a planner as SLO, None without a planner."""
    return None if planner is None else Slo(ttft_ms=planner.settings.ttft_ms, itl_ms=planner.settings.itl_ms)
