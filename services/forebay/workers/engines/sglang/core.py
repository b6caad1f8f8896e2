"""SGLang's start and end: its arguments, its processes, and the signals that it would take from this one.

Theory of operation. `Engine` takes seconds to minutes to build, so that is done in a thread; the thread lives as long
as the engine, for SGLang's processes ask the kernel to die with the thread that started them. Left to itself SGLang
handles SIGTERM and SIGQUIT of this process, and kills it with all its children when something fails. So its loop of
answers is run as a task of ours, its watchdog is stopped, and its processes, which say by SIGQUIT that they failed,
are watched and ended from here. SGLang keeps its state in globals: there can be one engine in a process.
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

from forebay.workers.engine import EngineError
from forebay.workers.engines.free_ports import free_ports
from forebay.workers.engines.model_directory import one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_events.zmq_feed import KvSource

logger = logging.getLogger(__name__)

KILLED_S = 10.0
DISAGGREGATION = ("prefill", "decode")
PORT = "disaggregation_bootstrap_port"
FOLLOWERS_RETURN = "SGLANG_BLOCK_NONZERO_RANK_CHILDREN"  # 0: `Engine` of a node that is not the first comes back
_TAKEN = threading.Lock()


def engine_arguments(settings: EngineSettings, sources: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments of `Engine`; `sources` is the configuration of KV events. Raises EngineError."""
    block_size = settings.arguments.get("page_size", settings.block_size)
    if settings.kv_blocks is not None and block_size is None:
        raise EngineError("SGLang counts its KV cache in tokens: the number of KV blocks needs a block size, too")
    if settings.role == "encode":
        raise EngineError("the SGLang adapter is for text: it makes no encode worker")
    arguments: dict[str, Any] = {
        "model_path": str(settings.model),
        "served_model_name": settings.model_name,
        "page_size": settings.block_size,
        "max_total_tokens": None if settings.kv_blocks is None else settings.kv_blocks * block_size,
        "max_running_requests": settings.max_num_seqs,
        "chunked_prefill_size": settings.max_num_batched_tokens,
        "max_prefill_tokens": settings.max_num_batched_tokens,
        "incremental_streaming_output": True,  # an answer comes in pieces; else each comes with all before it
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
        # SGLang's own is one for all workers of a machine.
        arguments[PORT] = settings.arguments.get(PORT) or _free_ports(1)
    arguments |= settings.arguments
    if not arguments.get("incremental_streaming_output"):
        raise EngineError("the SGLang adapter needs incremental_streaming_output: leave it out of the arguments")
    return {name: value for name, value in arguments.items() if value is not None}


def own_sources(dp_size: int, sockets: Path) -> dict[str, Any]:
    """Where SGLang is to publish KV events: they hold prompts, so nobody else should read them.

    One rank has sockets in the private directory `sockets`; more need TCP on loopback, a port each. Raises EngineError.
    """
    if dp_size == 1:
        endpoints = (f"ipc://{sockets}/events", f"ipc://{sockets}/replay")
    else:
        first = _free_ports(2 * dp_size)
        endpoints = (f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + dp_size}")
    return {"publisher": "zmq", "endpoint": endpoints[0], "replay_endpoint": endpoints[1], "bind": True}


def kv_sources(arguments: Mapping[str, Any], ranks: Sequence[int]) -> dict[int, KvSource]:
    """Where each rank publishes, by our number, as SGLang was told. Raises EngineError."""
    try:
        config = json.loads(arguments.get("kv_events_config") or "{}")
        if config.get("publisher") != "zmq":
            return {}
        source = KvSource(
            config.get("endpoint", "tcp://*:5557"), config.get("replay_endpoint"), config.get("topic", "")
        )
    except (ValueError, AttributeError) as error:
        raise EngineError(f"kv_events_config is no JSON object: {error}") from None
    return {rank: source.at_rank(index) for index, rank in enumerate(ranks)}


def bootstrap_host(arguments: Mapping[str, Any]) -> str:
    """Where decode engines find a prefill engine: at its first node, or at this machine's address."""
    if given := arguments.get("dist_init_addr"):
        return str(given).rpartition(":")[0]
    try:
        from sglang.srt.utils.network import get_local_ip_auto  # noqa: PLC0415 - where there is an engine, it is
    except ImportError:
        from sglang.srt.utils import get_local_ip_auto  # noqa: PLC0415 - older releases
    host: str = get_local_ip_auto()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _free_ports(count: int) -> int:
    if (first := free_ports(count)) is None:
        raise EngineError(f"no {count} free ports in a row for SGLang: name them in its arguments")
    return first


class SglangCore:
    """One `Engine`, its loop of answers and its processes; `on_death` is called when one says that it failed."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self.engine: Any = None
        self._on_death = on_death
        self._thread: ThreadPoolExecutor | None = None
        self._building: asyncio.Future[Any] | None = None
        self._others: set[int | None] = set()  # children of this process that are not the engine's
        self._expected: set[int | None] = set()
        self._answers: asyncio.Task[None] | None = None
        self._signalled = False

    async def start(self, arguments: dict[str, Any], on_fault: Callable[[BaseException], None]) -> Any:
        """The engine, ready for requests; `on_fault` is told what its loop of answers fails by. Raises EngineError."""
        if not _TAKEN.acquire(blocking=False):
            raise EngineError("SGLang can run once in a process: give each worker a process of its own")
        loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._others = {process.pid for process in multiprocessing.active_children()}
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGQUIT, self._on_death)
            self._signalled = True
        self._building = loop.run_in_executor(self._thread, _build, arguments)
        # A cancelled start goes on in its thread; `stop` ends it.
        self.engine = await asyncio.shield(self._building)
        self._expected = {process.pid for process in self.processes()}
        if (manager := self.engine.tokenizer_manager) is not None:
            if manager._subprocess_watchdog is not None:  # its answer to a dead child is to kill this process
                await asyncio.to_thread(manager._subprocess_watchdog.stop)
            manager.event_loop = loop  # with one set, it starts no loop and takes no signals
            self._answers = asyncio.create_task(manager.handle_loop(), name="sglang answers")
            self._answers.add_done_callback(lambda task: _told(task, on_fault))
        return self.engine

    def processes(self) -> Sequence[BaseProcess]:
        """Those of the engine that live."""
        return [process for process in multiprocessing.active_children() if process.pid not in self._others]

    @property
    def is_dead(self) -> bool:
        """Whether one of its processes is gone."""
        return self.engine is None or not self._expected <= {process.pid for process in self.processes()}

    async def stop(self) -> None:
        """End the engine and its processes."""
        if self._thread is None:
            return
        if self._answers is not None:
            self._answers.cancel()
            await asyncio.gather(self._answers, return_exceptions=True)
        if self._building is not None:
            while not self._building.done():
                await asyncio.to_thread(self._kill)  # what it waits for is gone then
                await asyncio.wait([self._building], timeout=0.1)
            with suppress(Exception):  # what it fails with was told by `start`, or nobody waits for it
                self.engine = await self._building
        if (rpc := getattr(self.engine, "send_to_rpc", None)) is not None:
            rpc.close(linger=0)
            self.engine.send_to_rpc = None
        if self.engine is not None:
            atexit.unregister(self.engine.shutdown)  # it kills every child of this process
        await asyncio.to_thread(self._kill)
        if self._signalled:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        self._thread.shutdown(wait=False)
        self._thread = self.engine = self._answers = self._building = None
        _TAKEN.release()

    def _kill(self) -> None:
        processes = self.processes()
        if not processes:
            return
        from sglang.srt.utils import kill_process_tree  # noqa: PLC0415 - there are processes: it was imported

        for process in processes:
            try:
                kill_process_tree(process.pid, wait_timeout=KILLED_S)
            except RuntimeError:
                logger.exception("process %s of SGLang does not end", process.pid)
            process.join(KILLED_S)


def _told(task: "asyncio.Task[None]", on_fault: Callable[[BaseException], None]) -> None:
    if not task.cancelled():
        on_fault(task.exception() or RuntimeError("SGLang's loop of answers ended by itself"))


def _build(arguments: dict[str, Any]) -> Any:
    os.environ.setdefault(FOLLOWERS_RETURN, "0")
    try:
        from sglang.srt.entrypoints.engine import Engine  # noqa: PLC0415 - seconds to import, and only here
    except Exception as error:  # a build that does not fit this machine fails by anything
        raise EngineError(f"SGLang cannot be imported: {one_line(error)}") from error
    try:
        return Engine(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineError(f"SGLang does not take these arguments: {one_line(error)}") from error
    except Exception as error:
        raise EngineError(f"SGLang died at its start, its log says why: {one_line(error)}") from error
