"""vLLM's start and end: its arguments, its engine core in a child process, and what is wrong in an operator's words.

The engine is built in a thread, because that takes seconds to minutes. Its child processes are known as soon as they
are there, so that they can be ended whatever state vLLM is in: while it starts, or when it hangs.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forebay.workers.engine import EngineError
from forebay.workers.engines.free_ports import free_ports
from forebay.workers.engines.model_directory import one_line
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.extension import EXTENSION
from forebay.workers.engines.vllm.processes import owning
from forebay.workers.engines.vllm.transfer import LEASE_S

logger = logging.getLogger(__name__)

SHUTDOWN_S = 5.0  # for vLLM to end by itself; it has nothing to save
KILLED_S = 5.0
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
NIXL = ("nixl", "nixl_rocm")  # packages of vLLM's connector
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


def engine_arguments(settings: EngineSettings, *, kv_events: bool, sockets: Path) -> dict[str, Any]:
    """The keyword arguments of `AsyncEngineArgs`, configurations of their own as dictionaries.

    KV events go over sockets in the private directory `sockets`: they hold prompts. Ranks beyond the first need TCP.
    """
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "served_model_name": settings.model_name,
        "block_size": settings.block_size,
        # vLLM keeps one of its blocks to itself.
        "num_gpu_blocks_override": None if settings.kv_blocks is None else settings.kv_blocks + 1,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_mm_embeds": True,  # from encode workers alone; models for text do not look at it
    }
    if settings.dp_size > 1:
        arguments["data_parallel_size"] = settings.dp_size
    if settings.loras:
        arguments["enable_lora"] = True
    if kv_events:
        own = settings.dp_size == 1
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{sockets}/events" if own else "tcp://*:0",
            "replay_endpoint": f"ipc://{sockets}/replay" if own else "tcp://*:0",
        }
    if settings.role in KV_ROLES:
        arguments["kv_transfer_config"] = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[settings.role],
            "kv_load_failure_policy": "fail",  # so that it is known, and counted, that KV was not to be had
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        arguments["worker_extension_cls"] = EXTENSION
    arguments |= settings.arguments
    return {name: value for name, value in arguments.items() if value is not None}


@contextmanager
def side_channel(settings: EngineSettings) -> Iterator[None]:
    """Where the NIXL connector of each rank of a vLLM that is built meanwhile listens; as told, or at a free port.

    The address is the `kv_host` of the settings, else what vLLM's own variables say, else `near_host`: who can reach
    it can read the KV cache. Raises EngineError.
    """
    given: dict[str, str] = {}
    if settings.role in KV_ROLES:
        told = os.environ.get(HOST) or os.environ.get("VLLM_HOST_IP")
        host = given[HOST] = settings.kv_host or told or settings.near_host
        if PORT not in os.environ:
            if (first := free_ports(settings.dp_size, host)) is None:
                raise EngineError(f"no {settings.dp_size} free ports in a row for NIXL: name the first one in {PORT}")
            given[PORT] = str(first)
        logger.info("KV is fetched at %s:%s", host, given.get(PORT) or os.environ[PORT])
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def require_nixl(settings: EngineSettings) -> None:
    """Raises EngineError where the connector that a role is given cannot work."""
    own = "kv_transfer_config" in settings.arguments
    if settings.role in KV_ROLES and not own and not any(map(find_spec, NIXL)):
        raise EngineError(f"the role {settings.role} moves KV by NIXL: pip install nixl")


class VllmCore:
    """One `AsyncLLM` and the processes that it started."""

    def __init__(self) -> None:
        self.llm: Any = None
        self._started: list[BaseProcess] = []
        self._built: asyncio.Future[Any] | None = None

    async def start(self, arguments: dict[str, Any], stat_logger: Any, channel: AbstractContextManager[None]) -> Any:
        """The engine, ready for requests; `stat_logger` makes a `StatLoggerBase`. It is built in `channel`.

        Raises EngineError.
        """
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # A fork would share locks and sockets with threads of the worker that are not in the child.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        loop = asyncio.get_running_loop()
        self._built = loop.run_in_executor(None, _build, arguments, stat_logger, self._started, channel)
        # A cancelled start goes on in its thread; `stop` ends it.
        self.llm = await asyncio.shield(self._built)
        return self.llm

    def processes(self) -> Sequence[BaseProcess]:
        """Those of the engine that live."""
        return [process for process in tuple(self._started) if process.is_alive()]

    async def stop(self) -> None:
        """End the engine and its processes, by force if need be; when cancelled, at once."""
        if self._built is not None:
            try:
                await self._stop(self._built)
            finally:
                self._kill()
            self.llm = self._built = None

    async def _stop(self, built: "asyncio.Future[Any]") -> None:
        while not built.done():
            self._kill()
            await asyncio.wait([built], timeout=0.1)
        with suppress(Exception):  # what it fails with was told by `start`, or nobody waits for it
            self.llm = await built
        if self.llm is not None:
            if self.llm.output_handler is not None:
                self.llm.output_handler.cancel()  # or it takes the end for a death, and says so at length
            with suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_S + KILLED_S):
                    await asyncio.to_thread(self.llm.shutdown, timeout=SHUTDOWN_S)
        await asyncio.to_thread(self._end)

    def _kill(self) -> None:
        for process in self.processes():
            process.kill()

    def _end(self) -> None:
        processes = self.processes()
        self._kill()
        for process in processes:
            process.join(KILLED_S)


def _build(
    arguments: dict[str, Any], stat_logger: Any, started: list[BaseProcess], channel: AbstractContextManager[None]
) -> Any:
    from vllm.config import KVEventsConfig, KVTransferConfig  # noqa: PLC0415 - seconds to import, and only here
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    configs = {"kv_events_config": KVEventsConfig, "kv_transfer_config": KVTransferConfig}
    try:
        made = {
            name: configs[name](**value) if name in configs and isinstance(value, dict) else value
            for name, value in arguments.items()
        }
        engine_args = AsyncEngineArgs(**made)
        vllm_config = engine_args.create_engine_config()
    except Exception as error:
        raise EngineError(f"vLLM does not take these arguments: {one_line(error)}") from error
    try:
        with channel, owning(started):
            return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[stat_logger])
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"vLLM died at its start, its log says why: {one_line(error)}") from error
