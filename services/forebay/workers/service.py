"""Bring your own engine: `@service` on a class, `@endpoint()` on its coroutines.

A service has a name `namespace.component`, each endpoint `namespace.component.endpoint`: in logs, metrics and errors.
What is wrong with it is said where it is written. `forebay.workers.engines.service.engine` runs it as an `Engine`.
"""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from xxhash import xxh3_64_hexdigest

from forebay.events.control import Command
from forebay.events.requests import Task
from forebay.workers.engine import Engine, EngineError
from forebay.workers.engines.service.cache import Cache
from forebay.workers.engines.service.request import Refused, Request
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.pipeline import Operator

__all__ = [
    "Cache",
    "Command",
    "Refused",
    "Request",
    "Service",
    "ServiceInvalid",
    "endpoint",
    "load_service",
    "service",
    "service_of",
]

PART = re.compile(r"[a-z]([a-z0-9_-]{0,61}[a-z0-9])?")
PROCESSES_MAX = 256  # of one command
MAX_NUM_SEQS = 64
TASKS: dict[str, Task] = {"generate": "generate", "embed": "embed"}
CONTROLS = ("clear_kv_blocks", "load_lora", "unload_lora", "sleep", "wake_up", "pause", "resume")
HOOKS = {"start": (1, 2), "stop": (1,), "check": (1,)}  # how many parameters each may have, self included
_ENDPOINT = "__forebay_endpoint__"
_SERVICE = "__forebay_service__"
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


class ServiceInvalid(TypeError):
    """A class, or what it was decorated with, makes no service; the text says why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process of a service gets: CPU cores, whole GPUs. None leaves the number of threads alone."""

    cpu: float | None = None
    gpu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A class that was decorated, and what is known of it.

    Attributes:
        pool: the pool that its workers join.
        workers: how many processes one `forebay serve` starts.
        max_num_seqs: how many requests run at once in each; others wait.
        kv_events: whether the class tells what it has cached.
        pipeline: operators around `generate`, the innermost first.
        endpoints: the methods by the names of their endpoints.
    """

    cls: type
    namespace: str
    component: str
    pool: str
    workers: int
    resources: Resources
    max_num_seqs: int
    kv_events: bool
    pipeline: tuple[Operator, ...]
    endpoints: Mapping[str, str]

    @property
    def name(self) -> str:
        """`namespace.component`."""
        return f"{self.namespace}.{self.component}"

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What it can be asked for."""
        return tuple(task for name, task in TASKS.items() if name in self.endpoints)

    def endpoint_name(self, endpoint: str) -> str:
        """`namespace.component.endpoint`."""
        return f"{self.name}.{endpoint}"

    def engine(self, settings: EngineSettings) -> Engine:
        """One instance of it, not started."""
        from forebay.workers.engines.service.engine import ServiceEngine  # noqa: PLC0415 - what runs services knows them

        return ServiceEngine(self, settings)


def endpoint(name: str = "") -> Callable[[Function], Function]:
    """Make a coroutine an endpoint of its service, under its own name unless another is given. Raises ServiceInvalid.

    `generate(self, request)` yields token ids, or text. `embed(self, request)` returns the numbers of a vector.
    Every other one is a control endpoint, `(self, command)`: `clear_kv_blocks`, `load_lora`, `unload_lora`, `sleep`,
    `wake_up`, `pause` and `resume` do what an operator asks.
    """
    if not isinstance(name, str):
        raise ServiceInvalid("@endpoint is written with parentheses: @endpoint()")

    def mark(function: Function) -> Function:
        setattr(function, _ENDPOINT, name or function.__name__)
        return function

    return mark


def service(
    *,
    namespace: str,
    pool: str = "default",
    component: str = "",
    workers: int = 1,
    resources: Mapping[str, str | float] | None = None,
    max_num_seqs: int = MAX_NUM_SEQS,
    kv_events: bool = False,
    pipeline: Sequence[Operator] = (),
) -> Callable[[Class], Class]:
    """Make a class a service; the class itself stays as it is. Raises ServiceInvalid.

    It may have coroutines `start(self)` or `start(self, settings)`, awaited before anything else; `stop(self)`; and
    `check(self)`, awaited every two seconds, whose exception says that the service is broken.

    Args:
        namespace: the first part of its name.
        pool: the pool that its workers join.
        component: the second part of its name; the name of the class when empty, `MyEngine` as `my-engine`.
        workers: processes that one `forebay serve` starts.
        resources: for each of them, `{"cpu": "2", "gpu": 1}`: cores become OMP_NUM_THREADS, GPUs a slice of
            CUDA_VISIBLE_DEVICES.
        max_num_seqs: requests that run at once in one process.
        kv_events: it tells what it has cached through `self.cache`, a `Cache` that it is given before `start`.
        pipeline: operators around `generate`, the innermost first.
    """

    def decorate(cls: Class) -> Class:
        made = Service(
            cls=cls,
            namespace=_part("namespace", namespace),
            component=_part("component", component or _kebab(cls.__name__)),
            pool=_part("pool", pool),
            workers=_count("workers", workers, PROCESSES_MAX),
            resources=_resources(resources or {}),
            max_num_seqs=_count("max_num_seqs", max_num_seqs, 65_536),
            kv_events=kv_events,
            pipeline=tuple(pipeline),
            endpoints=MappingProxyType(_endpoints(cls)),
        )
        _check_hooks(cls)
        _check_name(made)
        setattr(cls, _SERVICE, made)
        return cls

    return decorate


def service_of(cls: type) -> Service | None:
    """What `@service` made of this very class; None for every other."""
    return vars(cls).get(_SERVICE)


def load_service(target: str) -> Service:
    """The service that `FILE.py:Class` names; the file is run. Raises EngineError."""
    match = _FILE.fullmatch(target)
    if match is None:
        raise EngineError(f"{target}: a service is named FILE.py:Class")
    module, name = _run_file(Path(match["file"])), match["name"]
    found = getattr(module, name, None)
    made = service_of(found) if isinstance(found, type) else None
    if made is not None:
        return made
    others = [key for key, value in vars(module).items() if isinstance(value, type) and service_of(value)]
    known = f"; services there: {', '.join(others)}" if others else ""
    if found is None:
        raise EngineError(f"{match['file']} has no {name}{known}")
    raise EngineError(f"{name} of {match['file']} is no service: decorate the class with @service(...){known}")


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise EngineError(f"{path}: there is no such file")
    whole = path.resolve()
    # Once a process: each of its workers has the same class.
    name = f"forebay_service_{whole.stem}_{xxh3_64_hexdigest(str(whole).encode())}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))  # what lies beside it can be imported, and hides nothing that is installed
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise EngineError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module


_TAKEN: dict[str, type] = {}


def _check_name(made: Service) -> None:
    """Two classes of one module cannot share a name; the same class may be defined anew."""
    other = _TAKEN.get(made.name)
    same_module = other is not None and other.__module__ == made.cls.__module__
    if other is not None and same_module and other.__qualname__ != made.cls.__qualname__:
        raise ServiceInvalid(
            f"{made.name} is {other.__qualname__} already: give {made.cls.__qualname__} another component"
        )
    _TAKEN[made.name] = made.cls


def _part(what: str, text: str) -> str:
    if not isinstance(text, str) or PART.fullmatch(text) is None:
        raise ServiceInvalid(
            f"{what} {text!r}: a name is 1 to 63 of a-z, 0-9, - and _, from a letter to a letter or digit"
        )
    return text


def _count(what: str, value: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ServiceInvalid(f"{what} must be a number from 1 to {most}, not {value!r}")
    return value


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).strip("_").lower()


def _resources(asked: Mapping[str, str | float]) -> Resources:
    unknown = sorted(set(asked) - {"cpu", "gpu"})
    if unknown:
        raise ServiceInvalid(f"resources has {unknown[0]!r}; known are cpu and gpu")
    cpu, gpu = asked.get("cpu"), asked.get("gpu", 0)
    try:
        cores = None if cpu is None else float(cpu)
        devices = float(gpu)
    except (TypeError, ValueError):
        raise ServiceInvalid(f"resources must be numbers, not {dict(asked)}") from None
    if cores is not None and not 0 < cores <= 65_536:
        raise ServiceInvalid(f"resources: cpu must be a number of cores above 0, not {cpu}")
    if not 0 <= devices <= PROCESSES_MAX or not devices.is_integer():
        raise ServiceInvalid(f"resources: gpu must be a whole number from 0 to {PROCESSES_MAX}, not {gpu}")
    return Resources(cores, int(devices))


def _endpoints(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for method, function in inspect.getmembers(cls, inspect.isroutine):
        name = getattr(function, _ENDPOINT, None)
        if name is None:
            continue
        _part(f"{cls.__qualname__}.{method}: endpoint", name)
        if name in found:
            raise ServiceInvalid(f"{cls.__qualname__} has two endpoints {name}: {found[name]} and {method}")
        found[name] = method
        _check_endpoint(cls, name, function)
    if not found.keys() & TASKS.keys():
        raise ServiceInvalid(f"{cls.__qualname__} has no endpoint generate: put @endpoint() on an async generator")
    return found


def _check_endpoint(cls: type, name: str, function: Callable[..., Any]) -> None:
    where = f"{cls.__qualname__}.{function.__name__}"
    if name == "generate" and not inspect.isasyncgenfunction(function):
        raise ServiceInvalid(f"{where}: generate must be an async generator: `async def` with `yield`")
    if name != "generate" and not inspect.iscoroutinefunction(function):
        raise ServiceInvalid(f"{where}: the endpoint {name} must be a coroutine: `async def` without `yield`")
    if name not in TASKS and name not in CONTROLS:
        known = ", ".join((*TASKS, *CONTROLS))
        raise ServiceInvalid(f"{where}: nobody can ask for an endpoint {name}; known are {known}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ServiceInvalid(f"{where}: the endpoint {name} must take self and one argument") from None


def _check_hooks(cls: type) -> None:
    for name, counts in HOOKS.items():
        hook = getattr(cls, name, None)
        if hook is None:
            continue
        if not inspect.iscoroutinefunction(hook) or len(inspect.signature(hook).parameters) not in counts:
            raise ServiceInvalid(f"{cls.__qualname__}.{name} must be a coroutine: `async def {name}(self)`")
