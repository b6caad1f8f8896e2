"""Which engine a worker runs: options that commands share, and the engine and the worker's spec out of them.

Real engines are imported when one is built, and only that one: none of them is needed to run another.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import msgspec
import typer

from forebay.cli.common.errors import explained
from forebay.cli.common.plain_file import kind_of, read_plain_file
from forebay.cli.processes.options import (
    DpSizeOption,
    KvBytesPerTokenOption,
    KvChecksumOption,
    KvLeaseOption,
    KvTransportOption,
    LorasOption,
    adapters,
    named,
    names,
)
from forebay.engine_model.model import EngineConfig
from forebay.events.control import Role
from forebay.events.fleet import WorkerSpec
from forebay.ingress.errors import Unusable
from forebay.ingress.model import DEFAULT_MODEL, Model, model_name_of, word_token_ids
from forebay.simulate.profiles.profile import MOCKER, Profile, load_profile
from forebay.simulate.profiles.sheets import ProfileUnusable
from forebay.workers.engine import Engine
from forebay.workers.engines.encode import EncodeEngine, Encoder
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.standin_encoder import StandInEncoder
from forebay.workers.kv_transfer.own_address import address_towards, interface_of, own_address
from forebay.workers.service import load_service

MOCK = "mock"
DEFAULT_POOL = "default"
MOCKER_PROFILE = load_profile(MOCKER)
NOT_TOLD = {"speedup": "is as fast as it is", "engine_profile": "takes the time that it takes"}
MOVES_ITS_OWN = "moves its KV by itself, as its own arguments say"
APART = ("prefill", "decode")
REACHED = (MOCK, "vllm")  # engines whose KV is fetched at an address that the worker says
NOT_KNOWN = 1  # a size that the engine says when it has started


@dataclass(frozen=True, slots=True)
class Adapter:
    """Where the class of a real engine is, and the packages that it needs; the extra has the engine's name."""

    module: str
    name: str
    packages: tuple[str, ...]


ADAPTERS = {
    "transformers": Adapter(
        "forebay.workers.engines.transformers.engine", "TransformersEngine", ("torch", "transformers")
    ),
    "vllm": Adapter("forebay.workers.engines.vllm.engine", "VllmEngine", ("vllm",)),
    "sglang": Adapter("forebay.workers.engines.sglang.engine", "SglangEngine", ("sglang",)),
    "tensorrt-llm": Adapter("forebay.workers.engines.tensorrt_llm.engine", "TensorRtLlmEngine", ("tensorrt_llm",)),
}
ENGINES = (MOCK, *ADAPTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """An engine and what it is told.

    Attributes:
        engine: one of `ENGINES`, or FILE.py:Class, a service of the user's own.
        settings: `model` is the default model's directory where none was given.
        loras: the names of the adapters.
        speedup: how much faster than the modelled GPU a mock engine runs.
        profile: a mock engine's pace, and its sizes where none are given.
    """

    engine: str
    settings: EngineSettings
    loras: tuple[str, ...] = ()
    speedup: float = 1.0
    profile: Profile = MOCKER_PROFILE

    @property
    def is_mock(self) -> bool:
        """Whether it only pretends."""
        return self.engine == MOCK

    @property
    def label(self) -> str:
        """What the engine is called: its name, or that of the user's class."""
        return self.engine.rpartition(":")[2]


def engine_choice(
    engine: Annotated[
        str, typer.Option(help=f"What workers run: {', '.join(ENGINES)}, or a service of yours: FILE.py:Class.")
    ] = MOCK,
    model: Annotated[
        Path | None, typer.Option(help="Model directory: tokenizer.json, chat template; weights for real engines.")
    ] = None,
    model_name: Annotated[str, typer.Option(help="Name in the API; the directory's name when empty.")] = "",
    engine_args: Annotated[
        str | None, typer.Option(help="The engine's own arguments by its own names: YAML or JSON file, or JSON.")
    ] = None,
    role: Annotated[str, typer.Option(help=f"Part in a request: {', '.join(get_args(Role))}.")] = "aggregated",
    speedup: Annotated[float | None, typer.Option(help="How much faster than the modelled GPU; mock only.")] = None,
    engine_profile: Annotated[
        str | None, typer.Option(help="Pace and sizes of the mock engine: a profile's file, or mocker (the default).")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens a KV block; mock: 64.")] = None,
    kv_blocks: Annotated[int | None, typer.Option(min=1, help="KV blocks a rank; mock: 16384.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences a rank runs at once; mock: 256.")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one engine step; mock: 8192.")
    ] = None,
    dp_size: DpSizeOption = 1,
    lora: LorasOption = None,
    kv_transport: KvTransportOption = None,
    kv_bytes_per_token: KvBytesPerTokenOption = None,
    kv_checksum: KvChecksumOption = None,
    kv_lease_s: KvLeaseOption = None,
) -> EngineChoice:
    """What the options say; sizes left out are the engine's own. Raises Unusable."""
    kv = {
        "kv_transport": kv_transport,
        "kv_bytes_per_token": kv_bytes_per_token,
        "kv_checksum": kv_checksum,
        "kv_lease_s": kv_lease_s,
    }
    kv = {name: value for name, value in kv.items() if value is not None}
    _require_engine(engine, model)
    _require_own(engine, {"speedup": speedup, "engine_profile": engine_profile, "engine_args": engine_args, **kv})
    if role not in get_args(Role):
        raise Unusable(f"--role {role}: there is {', '.join(get_args(Role))}")
    if speedup is not None and not (math.isfinite(speedup) and speedup > 0):
        raise Unusable(f"--speedup must be a positive number, not {speedup}")
    try:
        profile = load_profile(engine_profile or MOCKER)
    except ProfileUnusable as error:
        raise Unusable(f"--engine-profile: {error}") from None
    called = model_name_of(model, model_name)
    loras = names("--lora", lora)
    directories = {} if engine == MOCK else _directories(loras)
    settings = EngineSettings(
        model=model or DEFAULT_MODEL,
        model_name=called,
        role=cast(Role, role),
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        dp_size=dp_size,
        loras=directories,
        arguments={} if engine_args is None else _arguments(engine_args),
        **cast(dict[str, Any], kv),
    )
    return EngineChoice(
        engine=engine,
        settings=settings,
        loras=adapters(tuple(directories) or loras, called),
        speedup=speedup or 1.0,
        profile=profile,
    )


def _require_engine(engine: str, model: Path | None) -> None:
    if engine not in ENGINES and ":" not in engine:
        raise Unusable(f"--engine {engine}: there is {', '.join(ENGINES)}, and FILE.py:Class for a service of yours")
    if engine in ADAPTERS and model is None:
        raise Unusable(f"the {engine} engine needs --model DIR, a model directory with weights")


def _require_own(engine: str, given: Mapping[str, object]) -> None:
    """Refuse options that another kind of engine has."""
    for name in [name for name, value in given.items() if value is not None]:
        flag = f"--{name.replace('_', '-')}"
        if engine == MOCK and name == "engine_args":
            raise Unusable(f"{flag} belongs to real engines: the mock engine has none")
        if engine != MOCK and name != "engine_args":
            raise Unusable(f"{flag} belongs to the mock engine: {engine} {NOT_TOLD.get(name, MOVES_ITS_OWN)}")


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `engine_choice`; it takes them as one parameter `engine: EngineChoice`.

    What cannot be used ends it with a line and exit code 2.
    """
    options = signature(engine_choice).parameters

    @wraps(command)
    def with_options(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in options}
        with explained():
            choice = engine_choice(**given)
        command(**arguments, engine=choice)

    own = [parameter for parameter in signature(command).parameters.values() if parameter.name != "engine"]
    parameters = [
        parameter.replace(kind=Parameter.KEYWORD_ONLY)
        for parameter in sorted((*own, *options.values()), key=lambda one: one.default is not Parameter.empty)
    ]
    setattr(with_options, "__signature__", signature(command).replace(parameters=parameters))  # noqa: B010
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def pool_of(role: Role) -> str:
    """The pool of workers that are not told one: workers of different roles share none."""
    return DEFAULT_POOL if role == "aggregated" else role


def playing(choice: EngineChoice, role: Role) -> EngineChoice:
    """The same engine in another role."""
    return replace(choice, settings=replace(choice.settings, role=role))


def ranked_from(choice: EngineChoice, dp_start_rank: int) -> EngineChoice:
    """The same engine with its ranks numbered from another on."""
    return replace(choice, settings=replace(choice.settings, dp_start_rank=dp_start_rank))


def reached_at(choice: EngineChoice, kv_host: str | None, kafka: str) -> EngineChoice:
    """The same engine with the address at which other workers fetch its KV.

    The one that was asked for, else the one that it has on the way to `kafka`: on one machine that is loopback, and no
    other machine reaches it; on several it is in the network that they share. Raises Unusable.
    """
    settings = choice.settings
    apart = settings.role in APART
    if kv_host is not None and not (apart and choice.engine in REACHED):
        raise Unusable(f"--kv-host is for --role {' or '.join(APART)} of {' and '.join(REACHED)}: nothing is fetched")
    if kv_host is None and not apart:
        return choice
    try:
        if kv_host is not None:
            return replace(choice, settings=replace(settings, kv_host=own_address(kv_host)))
        return replace(choice, settings=replace(settings, near_host=address_towards(kafka.split(","))))
    except ValueError as error:
        option = f"--kafka {kafka}" if kv_host is None else f"--kv-host {kv_host}"
        raise Unusable(f"{option}: {error}") from None


def built(
    choice: EngineChoice,
    worker_id: str,
    *,
    pool: str,
    taints: Sequence[str] = (),
    kv_events: bool = True,
) -> tuple[Engine, WorkerSpec]:
    """An engine, not started, and its worker's spec; sizes that only the engine knows are 1 until it has started.

    Raises Unusable: the engine's package is missing, or the user's service cannot be loaded.
    """
    settings = choice.settings
    spec = WorkerSpec(
        worker_id=named("--worker-id", "worker", worker_id),
        model=settings.model_name,
        pool=named("--pool", "pool", pool or pool_of(settings.role)),
        engine=choice.label,
        block_size=settings.block_size or NOT_KNOWN,
        kv_blocks_total=settings.kv_blocks or NOT_KNOWN,
        max_num_seqs=settings.max_num_seqs or NOT_KNOWN,
        max_num_batched_tokens=settings.max_num_batched_tokens or NOT_KNOWN,
        dp_size=settings.dp_size,
        dp_start_rank=settings.dp_start_rank,
        taints=tuple(taints),
        loras=choice.loras,
        kv_events=kv_events,
        role=settings.role,
    )
    if settings.role == "encode":
        return EncodeEngine(_encoder(choice)), spec
    if choice.is_mock:
        return _mock(choice, spec)
    if choice.engine in ADAPTERS:
        return _adapted(choice.engine, settings), spec
    service = load_service(choice.engine)
    if settings.role != "aggregated":
        raise Unusable(f"{choice.label} is a service, which does all of a request: it makes no {settings.role} worker")
    return service.engine(settings), msgspec.structs.replace(spec, pool=pool or service.pool)


def _encoder(choice: EngineChoice) -> Encoder:
    """What an encode worker encodes with."""
    if choice.is_mock:
        return StandInEncoder()
    raise Unusable(f"--role encode: the {choice.label} engine has no encoder; there is {MOCK}, a stand-in")


def _mock(choice: EngineChoice, spec: WorkerSpec) -> tuple[Engine, WorkerSpec]:
    settings, known = choice.settings, choice.profile.sizes
    sizes = {
        "block_size": settings.block_size or known.block_size,
        "kv_blocks_total": settings.kv_blocks or known.blocks,
        "max_num_seqs": settings.max_num_seqs or known.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens or known.max_num_batched_tokens,
    }
    given = {name: size for name, size in sizes.items() if size is not None}
    try:
        config = EngineConfig(vocabulary=_vocabulary(settings.model), timing=choice.profile.timing, **given)
    except ValueError as error:
        raise Unusable(str(error)) from None
    engine = MockEngine(
        config,
        dp_size=settings.dp_size,
        dp_start_rank=settings.dp_start_rank,
        speedup=choice.speedup,
        kv=KvSettings(
            transport=settings.kv_transport,
            bytes_per_token=settings.kv_bytes_per_token,
            checksum=settings.kv_checksum,
            lease_s=settings.kv_lease_s,
            at=_kv_at(settings),
        ),
    )
    return engine, msgspec.structs.replace(spec, **{name: getattr(config, name) for name in sizes})


def _kv_at(settings: EngineSettings) -> str:
    """Where a mock engine's KV is fetched: an address, or for NIXL the interface of the one that was asked for."""
    if settings.kv_transport == "tcp":
        return settings.kv_host or settings.near_host
    if settings.kv_host is None or "UCX_NET_DEVICES" in os.environ:
        return ""  # UCX chooses, or was told
    try:
        return interface_of(settings.kv_host)
    except ValueError as error:
        raise Unusable(f"--kv-host: {error}") from None


@cache
def _vocabulary(model: Path) -> tuple[int, ...]:
    return word_token_ids(Model(model).tokenizer)


def _adapted(engine: str, settings: EngineSettings) -> Engine:
    adapter = ADAPTERS[engine]
    for package in adapter.packages:
        if find_spec(package) is None:
            raise Unusable(f"the {engine} engine needs the package {package}: pip install 'forebay[{engine}]'")
    made: Callable[[EngineSettings], Engine] = getattr(import_module(adapter.module), adapter.name)
    return made(settings)


def _directories(loras: Sequence[str]) -> dict[str, Path]:
    """Adapter directories by name, each given as NAME=DIR."""
    found: dict[str, Path] = {}
    for text in loras:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory):
            raise Unusable(f"--lora {text}: a real engine needs NAME=DIR, the adapter's name and its directory")
        if name in found:
            raise Unusable(f"--lora {text}: the name {name} is given twice")
        if not Path(directory).is_dir():
            raise Unusable(f"--lora {text}: there is no directory {directory}")
        found[name] = Path(directory)
    return found


def _arguments(text: str) -> Mapping[str, Any]:
    """An engine's own arguments from a file, or from JSON as it stands."""
    if text.lstrip().startswith("{"):
        try:
            raw = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise Unusable(f"--engine-args: {error}") from None
        source = "--engine-args"
    else:
        raw, source = read_plain_file(Path(text), "file of arguments"), text
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        what = "one whose keys are no names" if isinstance(raw, dict) else kind_of(raw)
        raise Unusable(f"{source}: must hold a mapping of the engine's arguments by name, not {what}")
    return raw
