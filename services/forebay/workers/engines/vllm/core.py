"""Start and stop vLLM: its arguments, its processes, and its errors as messages for an operator.

The engine is built in a thread, because that takes seconds to minutes. Its child processes can be killed at any time,
even while vLLM starts or when it hangs. If the worker is killed, `engine_host` kills them with their process group.
"""

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forebay.workers.engine import EngineError, PackageMissing, one_line
from forebay.workers.engines.free_ports import free_ports, reserve_ports
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.extension import EXTENSION
from forebay.workers.engines.vllm.tiers.configuration import CONNECTOR, unsupported
from forebay.workers.engines.vllm.transfer import LEASE_S

logger = logging.getLogger(__name__)

SHUTDOWN_S = 5.0  # time for vLLM to stop by itself; it has no state to save
KILLED_S = 5.0
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
NIXL = ("nixl", "nixl_rocm")  # packages of vLLM's connector
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


def device_type() -> str:
    """Return the type of device on which vLLM runs, such as `cpu` or `cuda`."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - takes seconds to import

    return str(current_platform.device_type)


def engine_arguments(
    settings: EngineSettings, *, kv_events: bool, sockets: Path, tiers: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`, of which `settings.arguments` override all others.

    Nested configurations are dictionaries; `tiers` is that of the connector for KV tiers. KV events contain prompts, so
    their sockets are in the private directory `sockets`. vLLM supports several ranks only with TCP.
    """
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "served_model_name": settings.model_name,
        "block_size": settings.block_size,
        # vLLM reserves one block for itself.
        "num_gpu_blocks_override": None if settings.kv_blocks is None else settings.kv_blocks + 1,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_mm_embeds": True,  # only from encode workers; text models ignore it
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
    connectors: list[dict[str, Any]] = []
    # A failed fetch must be reported and counted. A prefill engine fetches nothing, but it may load from tiers.
    policy = "fail" if tiers is None or settings.role == "decode" else "recompute"
    if tiers is not None:
        connectors.append({**tiers, "kv_load_failure_policy": policy})
    if settings.role in KV_ROLES:
        nixl = {
            "kv_connector": "NixlConnector",
            "kv_role": KV_ROLES[settings.role],
            "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
        }
        # vLLM's offloading may have only a part of a prompt that a decode worker can fetch as a whole.
        has_own = tiers is None or tiers["kv_connector"] == CONNECTOR
        connectors = [*connectors, nixl] if has_own else [nixl, *connectors]
    if connectors:
        combined = _transfer_config(settings, connectors)
        arguments["kv_transfer_config"] = combined | {"kv_load_failure_policy": policy}
        arguments["worker_extension_cls"] = EXTENSION
    arguments |= settings.arguments
    return {name: value for name, value in arguments.items() if value is not None}


def _transfer_config(settings: EngineSettings, connectors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one `kv_transfer_config` for all connectors. vLLM asks them for the KV of a request in this order."""
    if len(connectors) == 1:
        return connectors[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": KV_ROLES[settings.role],
        "kv_connector_extra_config": {"connectors": connectors},
    }


def side_channel(settings: EngineSettings) -> dict[str, str]:
    """Reserve the address at which vLLM's NIXL connector listens, and return vLLM's environment variables for it.

    The host is the first of these that is set: `settings.kv_host`, vLLM's environment variables, `settings.near_host`.
    The port is the one in vLLM's environment variable, otherwise a free port. Anyone who can connect to the address can
    read the KV cache. The result is empty if the role of the worker needs no KV transfers. Raises EngineError if the
    ports are in use. vLLM itself would wait for ever.
    """
    if settings.role not in KV_ROLES:
        return {}
    host = settings.kv_host or os.environ.get(HOST) or os.environ.get("VLLM_HOST_IP") or settings.near_host
    ranks = settings.dp_size
    if given := os.environ.get(PORT):
        if not given.isdecimal() or not reserve_ports(range(int(given), int(given) + ranks), host):
            raise EngineError(f"cannot listen at {host}:{given}: {PORT} must be the first of {ranks} free ports")
        port = int(given)
    elif (free := free_ports(ranks, host)) is None:
        raise EngineError(f"no {ranks} consecutive free ports for NIXL: set the first one in {PORT}")
    else:
        port = free
    logger.info("serving KV at %s:%s", host, port)
    return {HOST: host, PORT: str(port)}


def require_nixl(settings: EngineSettings) -> None:
    """Raise PackageMissing if the role of the worker needs NIXL and it is not installed."""
    own = "kv_transfer_config" in settings.arguments
    if settings.role in KV_ROLES and not own and not any(map(find_spec, NIXL)):
        raise PackageMissing(f"the role {settings.role} needs NIXL: pip install nixl")


class VllmCore:
    def __init__(self) -> None:
        self.llm: Any = None
        self._others: set[BaseProcess] = set()  # children of this process that do not belong to the engine
        self._own: set[BaseProcess] | None = None  # None while the engine starts
        self._built: asyncio.Future[Any] | None = None

    async def start(self, arguments: dict[str, Any], stat_logger: Any, environment: Mapping[str, str]) -> Any:
        """Start the engine, or raise EngineError. `stat_logger` constructs vLLM's `StatLoggerBase` for each rank."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # A forked child would share locks and sockets with threads that exist only in the worker.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        os.environ.update(environment)
        self._others, self._own = set(multiprocessing.active_children()), None
        self._built = asyncio.get_running_loop().run_in_executor(None, _build, arguments, stat_logger)
        try:
            # A cancelled start continues in its thread; `stop` ends it.
            self.llm = await asyncio.shield(self._built)
        finally:
            for name in environment:  # another engine in this process needs other values
                os.environ.pop(name, None)
        self._own = set(self.processes())
        return self.llm

    def processes(self) -> Sequence[BaseProcess]:
        running = multiprocessing.active_children()
        return [one for one in running if (one not in self._others if self._own is None else one in self._own)]

    async def stop(self) -> None:
        """Stop the engine, then kill processes that remain. If this coroutine is cancelled, kill them immediately."""
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
        with suppress(Exception):  # `start` has raised it, or was cancelled
            self.llm = await built
        if self.llm is not None:
            if self.llm.output_handler is not None:
                self.llm.output_handler.cancel()  # otherwise it logs the stop as a crash
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


def _build(arguments: dict[str, Any], stat_logger: Any) -> Any:
    from vllm.config import ECTransferConfig, KVEventsConfig, KVTransferConfig  # noqa: PLC0415 - takes seconds to import
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    configs = {
        "ec_transfer_config": ECTransferConfig,
        "kv_events_config": KVEventsConfig,
        "kv_transfer_config": KVTransferConfig,
    }
    try:
        made = {
            name: configs[name](**value) if name in configs and isinstance(value, dict) else value
            for name, value in arguments.items()
        }
        engine_args = AsyncEngineArgs(**made)
        vllm_config = engine_args.create_engine_config()
        reason = unsupported(vllm_config)
    except Exception as error:
        raise EngineError(f"vLLM rejects these arguments: {one_line(error)}") from error
    if reason:
        raise EngineError(reason)
    try:
        return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[stat_logger])
    except Exception as error:
        raise EngineError(f"vLLM died while it started; see its log for the cause: {one_line(error)}") from error
