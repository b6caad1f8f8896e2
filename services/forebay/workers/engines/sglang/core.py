"""Start and end of SGLang: its arguments, its processes, and the signals that it would handle.

Theory of operation. `Engine` takes seconds to minutes to start, so it is built in a thread. The thread must live as
long as the engine, because the kernel kills SGLang's processes when the thread that started them ends. By default
SGLang handles SIGTERM and SIGQUIT of this process, and on a failure it kills this process with all its children. To
prevent that, forebay runs SGLang's response loop as a task of its own and stops SGLang's watchdog. This module watches
SGLang's processes, which report failures by SIGQUIT, and kills them. SGLang keeps its state in globals, so a process
can run only one engine.
"""

import asyncio
import atexit
import json
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forebay.workers.engine import EngineError, one_line
from forebay.workers.engines.free_ports import free_ports
from forebay.workers.engines.model_engine import start_errors
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_events.zmq_feed import KvSource
from forebay.workers.kv_tiers.settings import DISK_BYTES, TierSettings, require_no_fault

logger = logging.getLogger(__name__)

KILLED_S = 10.0
GB = 10**9
DISAGGREGATION = ("prefill", "decode")
PORT = "disaggregation_bootstrap_port"
FOLLOWERS_RETURN = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"  # 0: `Engine` returns on nodes that are not the first


def engine_arguments(settings: EngineSettings, sources: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of SGLang's `Engine`, of which `settings.arguments` override all others.

    Raises EngineError if SGLang does not support the settings.
    """
    block_size = settings.arguments.get("page_size", settings.block_size)
    if settings.kv_blocks is not None and block_size is None:
        raise EngineError("SGLang sizes its KV cache in tokens; pass --block-size together with --kv-blocks")
    if settings.role == "encode":
        raise EngineError("the SGLang engine supports text only, so it cannot have the role encode")
    arguments: dict[str, Any] = {
        "model_path": str(settings.model),
        "served_model_name": settings.model_name,
        "page_size": settings.block_size,
        "max_total_tokens": None if settings.kv_blocks is None else settings.kv_blocks * block_size,
        "max_running_requests": settings.max_num_seqs,
        "chunked_prefill_size": settings.max_num_batched_tokens,
        "max_prefill_tokens": settings.max_num_batched_tokens,
        "incremental_streaming_output": True,  # otherwise each output contains all previous tokens
        "enable_metrics": True,
    }
    if settings.dp_size > 1:
        arguments["dp_size"] = settings.dp_size
    if settings.loras:
        arguments["enable_lora"] = True
        arguments["lora_paths"] = {name: str(directory) for name, directory in settings.loras.items()}
    if sources is not None:
        arguments["kv_events_config"] = json.dumps(sources)
    if settings.role in DISAGGREGATION:
        arguments["disaggregation_mode"] = settings.role
        arguments["disaggregation_transfer_backend"] = "nixl"
    if settings.role == "prefill":
        # SGLang's default is the same for all workers of a machine.
        arguments[PORT] = settings.arguments.get(PORT) or _free_ports(1)
    if settings.tiers is not None:
        arguments |= hicache_arguments(settings, settings.tiers)
    arguments |= settings.arguments
    if arguments.get("dllm_algorithm"):
        _require_no_dropped(arguments)
    if not arguments.get("incremental_streaming_output"):
        raise EngineError("the SGLang engine needs incremental_streaming_output: remove it from the engine arguments")
    return {name: value for name, value in arguments.items() if value is not None}


def _require_no_dropped(arguments: Mapping[str, Any]) -> None:
    """Raise EngineError for arguments that SGLang would drop for a diffusion model, with a warning in its log only."""
    dropped = {
        "disaggregation_mode (--role)": arguments.get("disaggregation_mode", "null") != "null",
        "enable_lora (--lora)": arguments.get("enable_lora"),
        "enable_hierarchical_cache (--kv-tier)": arguments.get("enable_hierarchical_cache"),
    }
    if names := [name for name, is_set in dropped.items() if is_set]:
        raise EngineError(f"SGLang supports no {', '.join(names)} for diffusion models (dllm_algorithm); remove it")


def hicache_arguments(settings: EngineSettings, tiers: TierSettings) -> dict[str, Any]:
    """Return SGLang's arguments for the KV tiers of a worker. Raises EngineError if HiCache does not support them.

    The sizes of tiers are those of a worker rank. HiCache has a size per process, that of host memory in whole GB.
    """
    processes = settings.arguments.get("tp_size", 1) * settings.arguments.get("pp_size", 1)
    if settings.arguments.get("enable_dp_attention"):
        processes //= settings.dp_size
    gigabytes, rest = divmod(tiers.host_bytes, processes * GB)
    require_no_fault({
        "requires another role than decode: SGLang's decode workers have no prefix cache": settings.role == "decode",
        "host:size is missing: SGLang's HiCache copies KV to host memory first": not tiers.host_bytes,
        f"host:size: SGLang's HiCache needs a multiple of {processes}GB, got {tiers.host_bytes:,} bytes": rest,
        "store: SGLang's HiCache does not report the blocks of a store; use disk": tiers.store,
        "filter=on: SGLang's HiCache has no filter of a disk; remove the key": tiers.filter,
    })  # fmt: skip
    arguments = {"enable_hierarchical_cache": True, "hicache_size": gigabytes}
    if tiers.disk is not None:
        disk = {"file_storage_path": str(tiers.disk), "max_size": (tiers.disk_bytes or DISK_BYTES) // processes}
        arguments |= {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": json.dumps(disk)}
    return arguments


def own_sources(dp_size: int, sockets: Path) -> dict[str, Any]:
    """Return the configuration of SGLang's KV events, `kv_events_config`. Raises EngineError if no ports are free.

    KV events contain prompts, so other users of the machine must not be able to read them. A single rank therefore uses
    sockets in a private directory. SGLang supports several ranks only with TCP; they use two loopback ports each.
    """
    if dp_size == 1:
        endpoints = (f"ipc://{sockets}/events", f"ipc://{sockets}/replay")
    else:
        first = _free_ports(2 * dp_size)
        endpoints = (f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + dp_size}")
    return {"publisher": "zmq", "endpoint": endpoints[0], "replay_endpoint": endpoints[1], "bind": True}


def kv_sources(arguments: Mapping[str, Any], ranks: Sequence[int]) -> dict[int, KvSource]:
    """Return for each rank where this worker reads the KV events, from SGLang's arguments; empty without KV events.

    Raises EngineError if the configuration of KV events is invalid.
    """
    try:
        config = json.loads(arguments.get("kv_events_config") or "{}")
        if config.get("publisher") != "zmq":
            return {}
        source = KvSource(
            config.get("endpoint", "tcp://*:5557"), config.get("replay_endpoint"), config.get("topic", "")
        )
    except (ValueError, AttributeError) as error:
        raise EngineError(f"kv_events_config must be a JSON object: {error}") from None
    return {rank: source.at_rank(index) for index, rank in enumerate(ranks)}


def bootstrap_host(arguments: Mapping[str, Any]) -> str:
    """Return the host at which decode engines reach this prefill engine: its first node, or else this machine."""
    if given := arguments.get("dist_init_addr"):
        return str(given).rpartition(":")[0]
    try:
        from sglang.srt.utils.network import get_local_ip_auto  # noqa: PLC0415 - available once an engine runs
    except ImportError:
        from sglang.srt.utils import get_local_ip_auto  # noqa: PLC0415 - older releases
    host: str = get_local_ip_auto()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _free_ports(count: int) -> int:
    if (first := free_ports(count)) is None:
        raise EngineError(f"no {count} consecutive free ports for SGLang: set them in --engine-args")
    return first


class SglangCore:
    def __init__(self, on_death: Callable[[], None]) -> None:
        self.engine: Any = None
        self._on_death = on_death
        self._thread: ThreadPoolExecutor | None = None
        self._building: asyncio.Future[Any] | None = None
        self._others: set[int | None] = set()  # children of this process that do not belong to the engine
        self._expected: set[int | None] = set()
        self._responses: asyncio.Task[None] | None = None
        self._signalled = False

    async def start(self, arguments: dict[str, Any], on_fault: Callable[[BaseException], None]) -> Any:
        """Start the engine, or raise EngineError. `on_fault` gets an exception that ends SGLang's response loop."""
        loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._others = {process.pid for process in multiprocessing.active_children()}
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGQUIT, self._on_death)
            self._signalled = True
        self._building = loop.run_in_executor(self._thread, _build, arguments)
        # A cancelled start continues in its thread; `stop` ends it.
        self.engine = await asyncio.shield(self._building)
        self._expected = {process.pid for process in self.processes()}
        if (manager := self.engine.tokenizer_manager) is not None:
            if manager._subprocess_watchdog is not None:  # it would kill this process if a child died
                await asyncio.to_thread(manager._subprocess_watchdog.stop)
            manager.event_loop = loop  # otherwise it would start its own loop and handle signals
            self._responses = asyncio.create_task(manager.handle_loop(), name="sglang responses")
            self._responses.add_done_callback(lambda task: _report_end(task, on_fault))
        return self.engine

    def processes(self) -> Sequence[BaseProcess]:
        return [process for process in multiprocessing.active_children() if process.pid not in self._others]

    @property
    def is_dead(self) -> bool:
        return self.engine is None or not self._expected <= {process.pid for process in self.processes()}

    async def stop(self) -> None:
        if self._thread is None:
            return
        if self._responses is not None:
            self._responses.cancel()
            await asyncio.gather(self._responses, return_exceptions=True)
        if self._building is not None:
            while not self._building.done():
                await asyncio.to_thread(self._kill)  # the start fails once its processes are dead
                await asyncio.wait([self._building], timeout=0.1)
            with suppress(Exception):  # `start` has raised it, or was cancelled
                self.engine = await self._building
        if (rpc := getattr(self.engine, "send_to_rpc", None)) is not None:
            rpc.close(linger=0)
            self.engine.send_to_rpc = None
        if self.engine is not None:
            atexit.unregister(self.engine.shutdown)  # it would kill every child of this process
        await asyncio.to_thread(self._kill)
        if self._signalled:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        self._thread.shutdown(wait=False)
        self._thread = self.engine = self._responses = self._building = None

    def _kill(self) -> None:
        processes = self.processes()
        if not processes:
            return
        from sglang.srt.utils import kill_process_tree  # noqa: PLC0415 - available once an engine runs

        for process in processes:
            try:
                kill_process_tree(process.pid, wait_timeout=KILLED_S)
            except RuntimeError:
                logger.exception("cannot kill process %s of SGLang; kill it by hand to free the GPU", process.pid)
            process.join(KILLED_S)


def _report_end(task: "asyncio.Task[None]", on_fault: Callable[[BaseException], None]) -> None:
    if not task.cancelled():
        on_fault(task.exception() or RuntimeError("the response loop of SGLang ended by itself"))


def _build(arguments: dict[str, Any]) -> Any:
    os.environ.setdefault(FOLLOWERS_RETURN, "0")
    try:
        from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415 - takes seconds to import
    except Exception as error:  # a build for another machine may raise anything
        raise EngineError(f"cannot import SGLang: {one_line(error)}") from error
    with start_errors("SGLang"):
        return Engine(**arguments)
