"""Models of `forebay up`: from `--model`, which may be repeated, or from `[[models]]` tables of the file of `--config`.

A table has options of one model. Options that it lacks have the values of the command. All models share the router's
options and the number of workers per model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from forebay.cli.common.errors import fail
from forebay.cli.common.options import Option
from forebay.cli.processes.engine_options import EngineOptions
from forebay.cli.processes.options import ModelsOption, PoolRoutingOption, pool_routing_by_model
from forebay.cli.processes.tier_options import TierOptions
from forebay.events.names import unknown_name
from forebay.events.pools import PoolRouting
from forebay.processes.names import named
from forebay.runtime.errors import ConfigError, prefixed
from forebay.simulate.pool_routing_file import routing_of
from forebay.workers.engines.settings import DEFAULT_POOL, pool_of

if TYPE_CHECKING:
    from forebay.processes.embedded_group import EmbeddedModel, WorkerPlace
    from forebay.processes.engines import EngineChoice

RANKS_MAX = 4_096  # each is an engine of this process, and a candidate of every decision
MOCK_WORKERS = 4  # enough to show routing; a real engine takes the machine for itself
OF_ONE_MODEL = ("model_name", "revision", "lora")  # options that several models cannot share


@dataclass(frozen=True, slots=True)
class Workers:
    """Number of workers that `forebay up` runs for a model, by role; of aggregated workers, by pool.

    The prompt of a request on a decode worker is computed by that worker or by a prefill worker.
    """

    aggregated: Mapping[str, int] = field(default_factory=dict)
    prefill: int = 0
    decode: int = 0

    @property
    def count(self) -> int:
        return sum(self.aggregated.values()) + self.prefill + self.decode

    def places(self, engine: "EngineChoice", used: Counter[str] | None = None) -> "dict[str, WorkerPlace]":
        """Return the role and the pool of each worker by its id.

        `used` has the number of ids that other models use, by kind. The ids of these workers are added.
        """
        from forebay.processes.embedded_group import WorkerPlace  # noqa: PLC0415 - as in `choose_models`

        used = Counter() if used is None else used
        label = engine.label.lower()
        aggregated = [WorkerPlace("aggregated", pool) for pool, count in self.aggregated.items() for _ in range(count)]
        prefill = [WorkerPlace("prefill", pool_of("prefill"))] * self.prefill
        decode = [WorkerPlace("decode", pool_of("decode"))] * self.decode
        kinds = ((label, aggregated), ("prefill", prefill), ("decode", decode))
        found: dict[str, WorkerPlace] = {}
        for name, places in kinds:
            found |= {f"{name}-{used[name] + number}": place for number, place in enumerate(places)}
            used[name] += len(places)
        return found


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options that set the number of workers of each model, their pools, and how requests are routed to the pools."""

    PANEL: ClassVar = "Workers"

    workers: Annotated[
        int | None,
        Option(min=1, max=1024, help="Workers per model. Default: 4 with the mock engine, 1 with a real engine."),
    ] = None
    prefill_workers: Annotated[
        int | None, Option(min=0, max=1024, help="Number of prefill workers. Requires --decode-workers.")
    ] = None
    decode_workers: Annotated[
        int | None, Option(min=1, max=1024, help="Number of decode workers. Requires --prefill-workers.")
    ] = None
    pool_workers: Annotated[
        list[str] | None, Option(help="NAME=COUNT: a pool and its number of workers. Repeatable.")
    ] = None
    pool_routing: PoolRoutingOption = None

    def counts(self, engine: "EngineChoice") -> Workers:
        """Return the number of workers of a model by role and pool. Contradictory options end the command."""
        prefill, decode = self.prefill_workers, self.decode_workers
        if engine.settings.role != "aggregated":
            fail(
                f"--role {engine.settings.role}: `forebay up` has no other role than aggregated; use --prefill-workers"
                " and --decode-workers"
            )
        if (prefill is None) != (decode is None):
            fail(
                "--prefill-workers and --decode-workers require each other; use --prefill-workers 0 for decode workers"
                " only"
            )
        given = ["--workers"] * (self.workers is not None) + ["--pool-workers"] * bool(self.pool_workers)
        given += ["--decode-workers"] * (decode is not None)
        if len(given) > 1:
            fail(f"{given[0]} cannot be combined with {given[1]}")
        if prefill is not None and decode is not None:
            return Workers(prefill=prefill, decode=decode)
        if self.pool_workers:
            return Workers(aggregated=_pools(self.pool_workers))
        return Workers(aggregated={DEFAULT_POOL: self.workers or (MOCK_WORKERS if engine.is_mock else 1)})

    def routing(self, model: str, places: "Iterable[WorkerPlace]", *, is_only: bool) -> PoolRouting | None:
        """Return the rules for the pools of a model in the file of `--pool-routing`, None without a file.

        If the model `is_only`, the file must have rules for it. Raises ConfigError if the file is invalid, or names a
        pool without workers.
        """
        if self.pool_routing is None:
            return None
        if is_only:
            with prefixed("--pool-routing"):
                found = routing_of(self.pool_routing, model)
        elif (rules := pool_routing_by_model(self.pool_routing).get(model)) is not None:
            found = rules
        else:
            return None
        for grid in found.grids:
            known = list(dict.fromkeys(place.pool for place in places if place.role == grid.role))
            for name in (one.pool for one in grid.pools):
                if name not in known:
                    raise ConfigError(f"--pool-routing {self.pool_routing}: {unknown_name('pool', name, known)}")
        return found


def _pools(given: Sequence[str]) -> dict[str, int]:
    """Return the number of workers of each pool. Raises ConfigError if a value of --pool-workers is invalid."""
    found: dict[str, int] = {}
    for text in given:
        name, _, count = text.partition("=")
        if not count.isdecimal() or not 1 <= int(count[:6]) <= RANKS_MAX:
            raise ConfigError(f"--pool-workers {text}: expected NAME=COUNT, a pool and its number of workers from 1")
        if named("--pool-workers", "pool", name) in found:
            raise ConfigError(f"--pool-workers {text}: the name {name} appears twice")
        found[name] = int(count)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsOptions(EngineOptions):
    model: ModelsOption = None  # type: ignore[assignment]  # the option may be repeated

    def of_each(
        self, tables: Sequence[Mapping[str, Any]], workers: WorkerOptions
    ) -> list[tuple[EngineOptions, WorkerOptions]]:
        """Return the options of each model: of each `[[models]]` table, or without tables of each `--model`.

        Raises ConfigError if an option of one model is given for several.
        """
        models: list[str | None] = [*(self.model or ())] or [None]
        given = tables or [{"model": model} for model in models]
        common = {one.name: getattr(self, one.name) for one in fields(EngineOptions)}
        for name in OF_ONE_MODEL if len(given) > 1 else ():
            if common[name]:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} {_shown(common[name])} cannot apply to {len(given)} models; set {flag[2:]} in a [[models]]"
                    " table of --config for each model"
                )
        found = []
        for table in given:
            own = dict(table)
            count = own.pop("workers", None)
            of_model = workers if count is None else replace(workers, workers=count)
            found.append((EngineOptions(**{**common, "model": None, **own}), of_model))
        return found


def choose_models(
    options: ModelsOptions, workers: WorkerOptions, tiers: TierOptions, tables: Sequence[Mapping[str, Any]]
) -> "tuple[EmbeddedModel, ...]":
    """Return the models to serve. Raises ConfigError if options are invalid, contradictory, or fit no model."""
    # Imported here, because --help does not wait for engines.
    from forebay.cli.processes.engines import choose_engine, tiered  # noqa: PLC0415
    from forebay.processes.embedded_group import EmbeddedModel  # noqa: PLC0415

    chosen, of_ranks = [], tiers.settings()
    for number, (engine_options, counts) in enumerate(options.of_each(tables, workers), start=1):
        try:
            engine = tiered(choose_engine(engine_options), of_ranks)
        except ConfigError as error:
            raise ConfigError(f"[[models]] table {number}: {error}" if tables else str(error)) from error
        chosen.append((engine, counts.counts(engine)))
    _require_names([engine for engine, _ in chosen])
    _require_ranks(chosen, workers)
    used: Counter[str] = Counter()
    models = []
    for engine, counted in chosen:
        places = counted.places(engine, used)
        routing = workers.routing(engine.settings.model_name, places.values(), is_only=len(chosen) == 1)
        models.append(EmbeddedModel(engine, places, routing))
    return tuple(models)


def _require_names(engines: Sequence["EngineChoice"]) -> None:
    """Raise ConfigError if two models or adapters have one name, because requests name them by it."""
    used: dict[str, str] = {}
    for engine in engines:
        directory = f"the model in {engine.settings.model}"
        for name in (engine.settings.model_name, *engine.loras):
            if name in used:
                raise ConfigError(
                    f"{used[name]} and {directory} both serve the name {name}; set model-name or lora in [[models]]"
                    " tables of --config, so that each model and adapter has its own name"
                )
            used[name] = directory


def _require_ranks(chosen: Sequence[tuple["EngineChoice", Workers]], options: WorkerOptions) -> None:
    """Check the number of ranks of all models. Too many end the command."""
    ranks = sum(workers.count * engine.settings.dp_size for engine, workers in chosen)
    if ranks <= RANKS_MAX:
        return
    if len(chosen) > 1:
        fail(f"the workers of {len(chosen)} models have {ranks} ranks; the maximum is {RANKS_MAX}: reduce --workers")
    engine, workers = chosen[0]
    many = f"--workers {workers.count}" if options.workers is not None else f"{workers.count} workers"
    fail(f"{many} with --dp-size {engine.settings.dp_size} are {ranks} ranks; the maximum is {RANKS_MAX}")


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
