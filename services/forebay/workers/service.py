"""Define custom engines: the decorator `@service` of a class, and `@endpoint()` of its coroutines.

The name of a service is `namespace.component`, that of an endpoint `namespace.component.endpoint`. Logs, metrics and
errors use these names. An invalid definition raises ServiceInvalid when the class is defined. The module
`forebay.workers.engines.service_engine` runs a service.
"""

import asyncio
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

from xxhash import xxh3_64_hexdigest

from forebay.engine_model.model import Removed, Stored
from forebay.events.base import U64_MASK
from forebay.events.control import Command
from forebay.events.fleet import CALLS_MAX
from forebay.events.names import unknown_name
from forebay.events.requests import Sampling, Task
from forebay.runtime.errors import ConfigError
from forebay.workers import PROCESSES_MAX
from forebay.workers.engine import CacheChange, Cleared

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
MAX_NUM_SEQS = 64
TASKS: dict[str, Task] = {"generate": "generate", "embed": "embed"}
CONTROLS = ("clear_kv_blocks", "load_lora", "unload_lora", "sleep", "wake_up", "pause", "resume")
HOOKS = {"start": (1, 2), "stop": (1,), "check": (1,)}  # allowed numbers of parameters of each hook, including self
_ENDPOINT = "__forebay_endpoint__"
_SERVICE = "__forebay_service__"
_FILE = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_][A-Za-z0-9_]*)")

Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


class Refused(Exception):
    """An endpoint of a service rejects a request or a command.

    The client gets the message: with status 400 for a request, as the outcome of the worker for a command.
    """


def _unknown(_: Sequence[int]) -> str:
    raise Refused("this request has no tokenizer: there is no tokenizer.json in the model directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One attempt at a request, as an endpoint of a service receives it.

    Attributes:
        token_ids: token ids of the prompt. If this attempt continues the response of a lost worker, the output so far
            follows.
        sampling: sampling parameters. The engine cuts the output at `max_tokens` and before `stop_token_ids`.
        sequence_hashes: hash of each full KV block of the prompt. It also depends on `lora_name` and `cache_namespace`.
        lora_name: name of the LoRA adapter to use; empty for the base model.
        cache_namespace: requests may share cached blocks only if they have the same namespace.
        priority: priority of the request; requests with higher values should run sooner.
        payload: argument of a call of a named endpoint, any JSON value. Its `token_ids` are those of the request.
        detokenize: returns the text of token ids. Raises Refused for a service without a tokenizer.
        stopped: set when the request is cancelled.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    sequence_hashes: tuple[int, ...] = ()
    lora_name: str = ""
    cache_namespace: str = ""
    priority: int = 0
    payload: Any = None
    detokenize: Callable[[Sequence[int]], str] = field(default=_unknown, repr=False, compare=False)
    stopped: asyncio.Event = field(default_factory=asyncio.Event, repr=False, compare=False)

    @property
    def text(self) -> str:
        """The prompt as text. Raises Refused for a service without a tokenizer."""
        return self.detokenize(self.token_ids)

    @property
    def cancelled(self) -> bool:
        """Whether the request was cancelled. May be read on any thread."""
        return self.stopped.is_set()

    async def until_cancelled(self) -> None:
        """Wait until the request is cancelled."""
        await self.stopped.wait()


class Cache:
    """Receives the reports of a service about its KV cache. The engine sets it as `self.cache` of the service.

    Blocks are identified by their sequence hashes, see `Request.sequence_hashes`. Call the methods on the event loop
    only. Reports made while the worker is not a member of the fleet are part of what it announces when it joins.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._held: dict[int, None] = {}
        self._changes: list[CacheChange] = []
        self._hits: dict[str, int] = {}

    def stored(self, hashes: Iterable[int], parent: int | None = None) -> None:
        """Report that consecutive blocks of a prompt have entered the cache.

        Args:
            parent: sequence hash of the block before the first of them; None if they begin the prompt.
        """
        blocks = _checked(hashes)
        if blocks:
            self._held.update(dict.fromkeys(blocks))
            self._changed(Stored(parent, blocks))

    def removed(self, hashes: Iterable[int]) -> None:
        """Report that the blocks with these sequence hashes have left the cache."""
        blocks = _checked(hashes)
        if blocks:
            for block in blocks:
                self._held.pop(block, None)
            self._changed(Removed(blocks))

    def cleared(self) -> None:
        """Report that all blocks have left the cache."""
        self._held.clear()
        self._changed(Cleared())

    def hit(self, request: Request, tokens: int) -> None:
        """Report how many prompt tokens of a request were found in the cache.

        A service must call this method before it yields the first token.
        """
        self._hits[request.request_id] = max(0, min(tokens, len(request.token_ids)))

    def held(self) -> tuple[int, ...]:
        """Return the sequence hashes of the blocks in the cache."""
        return tuple(self._held)

    def take_changes(self) -> list[CacheChange]:
        """Return the changes that were reported since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def take_hit(self, request_id: str) -> int:
        """Return and forget how many prompt tokens of a request were cached; 0 if the service did not report it."""
        return self._hits.pop(request_id, 0)

    def _changed(self, change: CacheChange) -> None:
        self._changes.append(change)
        self._on_change()


def _checked(hashes: Iterable[int]) -> tuple[int, ...]:
    blocks = tuple(hashes)
    for block in blocks:
        if not isinstance(block, int) or not 0 <= block <= U64_MASK:
            raise ValueError(f"a block hash must be an unsigned 64-bit integer, got {block!r}")
    return blocks


class ServiceInvalid(TypeError):
    """A class or the arguments of its decorators do not define a valid service. The message tells why."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of each process of a service.

    Attributes:
        cpu: number of CPU cores, which determines the number of threads (OMP_NUM_THREADS); None does not set it.
        gpu: number of GPUs.
    """

    cpu: float | None = None
    gpu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Definition of a service, which `@service` creates.

    `endpoints` are the names of its methods, by the name of the endpoint. See `service` for the other attributes.
    """

    cls: type
    namespace: str
    component: str
    pool: str
    workers: int
    resources: Resources
    max_num_seqs: int
    kv_events: bool
    endpoints: Mapping[str, str]

    @property
    def name(self) -> str:
        """Full name of the service, `namespace.component`."""
        return f"{self.namespace}.{self.component}"

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks that the service supports, determined by its endpoints."""
        return tuple(task for name, task in TASKS.items() if name in self.endpoints)

    @property
    def calls(self) -> tuple[str, ...]:
        """Full names of the endpoints that execute calls."""
        return tuple(self.endpoint_name(name) for name in self.endpoints if name not in (*TASKS, *CONTROLS))

    def endpoint_name(self, endpoint: str) -> str:
        """Return the full name of an endpoint, `namespace.component.endpoint`."""
        return f"{self.name}.{endpoint}"


def endpoint(name: str = "") -> Callable[[Function], Function]:
    """Make a method an endpoint of its service. Use it as a decorator: `@endpoint()`.

    The endpoint `generate(self, request)` yields token ids or text. `embed(self, request)` returns the numbers of a
    vector. Coroutines `(self, command)` execute a command of an operator. They are named after the command:
    `clear_kv_blocks`, `load_lora`, `unload_lora`, `sleep`, `wake_up`, `pause` and `resume`. An async generator of
    another name, `(self, request)`, yields JSON values for the calls of clients. Their argument is `request.payload`.

    Args:
        name: name of the endpoint; empty for the name of the method.

    Raises:
        ServiceInvalid: the decorator was written without parentheses.
    """
    if not isinstance(name, str):
        raise ServiceInvalid("write the decorator with parentheses: @endpoint()")

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
) -> Callable[[Class], Class]:
    """Make a class a service, without changing its behaviour. Use it as a decorator: `@service(namespace="demo")`.

    The class may define these coroutines, which the worker awaits: `start(self)` or `start(self, settings)` before the
    first request; `stop(self)` at the end; `check(self)` every two seconds, which raises an exception if the service is
    broken.

    Args:
        namespace: first part of the service's name.
        pool: pool that the workers of the service join.
        component: second part of its name. The default is the class name in kebab case, `my-engine` for `MyEngine`.
        workers: number of processes that one `forebay serve` starts.
        resources: resources per process, for example `{"cpu": "2", "gpu": 1}`. The number of cores sets
            OMP_NUM_THREADS. With GPUs, each process gets its own part of CUDA_VISIBLE_DEVICES.
        max_num_seqs: maximum number of concurrent requests per process.
        kv_events: whether the class reports its KV cache with `self.cache`, a `Cache` that is set before `start`.

    Raises:
        ServiceInvalid: an argument, or the definition of the class, is invalid.
    """

    def decorate(cls: Class) -> Class:
        definition = Service(
            cls=cls,
            namespace=_part("namespace", namespace),
            component=_part("component", component or _kebab(cls.__name__)),
            pool=_part("pool", pool),
            workers=_count("workers", workers, PROCESSES_MAX),
            resources=_resources(resources or {}),
            max_num_seqs=_count("max_num_seqs", max_num_seqs, 65_536),
            kv_events=kv_events,
            endpoints=MappingProxyType(_endpoints(cls)),
        )
        _check_hooks(cls)
        _check_name(definition)
        setattr(cls, _SERVICE, definition)
        return cls

    return decorate


def service_of(cls: type) -> Service | None:
    """Return the definition of a class that is decorated with `@service`.

    The result is None for other classes, also for subclasses of a decorated class.
    """
    return vars(cls).get(_SERVICE)


def load_service(target: str) -> Service:
    """Execute a Python file and return the service that it defines.

    Args:
        target: `FILE.py:Class`.

    Raises:
        ConfigError: the target is invalid, the file cannot be executed, or the class is not a service.
    """
    file, name, module = run_target(target, "service")
    found = getattr(module, name, None)
    definition = service_of(found) if isinstance(found, type) else None
    if definition is not None:
        return definition
    if hasattr(found, "encode_all"):
        raise ConfigError(f"{name} of {file} is an encoder, not a service; use forebay worker --role encode")
    others = [key for key, value in vars(module).items() if isinstance(value, type) and service_of(value)]
    known = f"; services in the file: {', '.join(others)}" if others else ""
    if found is None:
        raise ConfigError(f"{file} has no class {name}{known}")
    raise ConfigError(f"{name} of {file} is not a service: decorate the class with @service(...){known}")


def run_target(target: str, kind: str) -> tuple[str, str, ModuleType]:
    """Execute the file of `FILE.py:Class`, and return the file, the name of the class and the module.

    Raises ConfigError if the target is invalid or the file cannot be executed.
    """
    match = _FILE.fullmatch(target)
    if match is None:
        raise ConfigError(f"invalid {kind} {target!r}: expected FILE.py:Class")
    return match["file"], match["name"], _run_file(Path(match["file"]))


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    whole = path.resolve()
    # Executed once per process, so that all its workers share the class.
    name = f"forebay_service_{whole.stem}_{xxh3_64_hexdigest(str(whole).encode())}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, whole)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(whole.parent) not in sys.path:
        sys.path.append(
            str(whole.parent)
        )  # Appended, so that modules beside the file can be imported, but do not hide installed modules.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    return module


_TAKEN: dict[str, type] = {}


def _check_name(definition: Service) -> None:
    """Reject a name that another class of the same module has. Redefining the same class is allowed."""
    other = _TAKEN.get(definition.name)
    same_module = other is not None and other.__module__ == definition.cls.__module__
    if other is not None and same_module and other.__qualname__ != definition.cls.__qualname__:
        raise ServiceInvalid(
            f"the classes {other.__qualname__} and {definition.cls.__qualname__} have the same service name"
            f" {definition.name}; give one of them another name with @service(component=...)"
        )
    _TAKEN[definition.name] = definition.cls


def _part(what: str, text: str) -> str:
    if not isinstance(text, str) or PART.fullmatch(text) is None:
        raise ServiceInvalid(
            f"invalid {what} {text!r}: expected 1 to 63 characters of a-z, 0-9, - and _. The first must be a letter,"
            " the last a letter or a digit"
        )
    return text


def _count(what: str, value: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ServiceInvalid(f"{what} must be an integer from 1 to {most}, got {value!r}")
    return value


def _kebab(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).strip("_").lower()


def _resources(requested: Mapping[str, str | float]) -> Resources:
    unknown = sorted(set(requested) - {"cpu", "gpu"})
    if unknown:
        raise ServiceInvalid(unknown_name("resource", unknown[0], ("cpu", "gpu")))
    cpu, gpu = requested.get("cpu"), requested.get("gpu", 0)
    try:
        cores = None if cpu is None else float(cpu)
        devices = float(gpu)
    except (TypeError, ValueError):
        raise ServiceInvalid(f"resources must be numbers, got {dict(requested)}") from None
    if cores is not None and not 0 < cores <= 65_536:
        raise ServiceInvalid(f"cpu must be a number of cores above 0, got {cpu}")
    if not 0 <= devices <= PROCESSES_MAX or not devices.is_integer():
        raise ServiceInvalid(f"gpu must be an integer from 0 to {PROCESSES_MAX}, got {gpu}")
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
    calls = found.keys() - TASKS.keys() - {*CONTROLS}
    if not calls and not found.keys() & TASKS.keys():
        raise ServiceInvalid(f"{cls.__qualname__} has no generate endpoint: put @endpoint() on an async generator")
    if len(calls) > CALLS_MAX:
        raise ServiceInvalid(f"{cls.__qualname__} has {len(calls)} endpoints for calls; the limit is {CALLS_MAX}")
    return found


def _check_endpoint(cls: type, name: str, function: Callable[..., Any]) -> None:
    where = f"{cls.__qualname__}.{function.__name__}"
    if name == "generate" and not inspect.isasyncgenfunction(function):
        raise ServiceInvalid(f"{where}: generate must be an async generator: `async def` with `yield`")
    if name in ("embed", *CONTROLS) and not inspect.iscoroutinefunction(function):
        raise ServiceInvalid(f"{where}: the endpoint {name} must be a coroutine: `async def` without `yield`")
    if name not in (*TASKS, *CONTROLS) and not inspect.isasyncgenfunction(function):
        text = unknown_name("endpoint", name, (*TASKS, *CONTROLS))
        raise ServiceInvalid(f"{where}: {text}; one for calls must be an async generator: `async def` with `yield`")
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
