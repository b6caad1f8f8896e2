"""Stand-in for SGLang 0.5.23 with the signatures that the adapter uses. It rejects what SGLang rejects.

`Engine` and its tokenizer manager are in one process; `handle_loop` is the scheduler, too, so nothing is answered
unless somebody runs it. KV events go over real sockets.
"""

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.workers.kv_events.zmq_feed import KvSource
from tests.harness.openai_server.cache import BlocksCleared, CacheEvent, LittleCache, StandinRequest
from tests.harness.openai_server.events import EventPublisher
from tests.workers.standins.little import install_modules, next_token, struct

SERVER_ARGS: dict[str, Any] = {  # with the defaults
    "model_path": None, "served_model_name": None, "page_size": 1, "max_total_tokens": 256,
    "max_running_requests": None, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384, "dp_size": 1,
    "tp_size": 1, "nnodes": 1, "node_rank": 0, "dist_init_addr": None, "enable_lora": None, "lora_paths": None,
    "kv_events_config": None, "disaggregation_mode": "null", "disaggregation_transfer_backend": "mooncake",
    "disaggregation_bootstrap_port": 8998,
    "incremental_streaming_output": False, "enable_metrics": False, "log_level": "error", "context_length": 128,
    "is_embedding": False, "disable_radix_cache": False, "enable_priority_scheduling": False,
    "schedule_low_priority_values_first": False, "enable_memory_saver": False, "enable_weights_cpu_backup": False,
    "load_format": "auto", "dtype": "auto", "enable_dp_attention": False, "enable_deterministic_inference": False,
    "enable_hierarchical_cache": False, "dllm_algorithm": None,
}  # fmt: skip
DLLM_BLOCK = 8  # 4 for SDAR, 32 for LLaDA2
SAMPLING_PARAMS = {
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "watermark",
}  # fmt: skip


GENERATE_ARGUMENTS = dict.fromkeys((
    "prompt", "sampling_params", "input_ids", "image_data", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "token_ids_logprob", "lora_path", "stream", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank",
    "rid", "priority", "cache_salt", "external_trace_header",
))  # fmt: skip
PauseGenerationReqInput = struct("PauseGenerationReqInput", mode="abort")
ContinueGenerationReqInput = struct("ContinueGenerationReqInput", torch_empty_cache=True)
ReleaseMemoryOccupationReqInput = struct("ReleaseMemoryOccupationReqInput", tags=None)
ResumeMemoryOccupationReqInput = struct("ResumeMemoryOccupationReqInput", tags=None)
LoadLoRAAdapterReqInput = struct("LoadLoRAAdapterReqInput", lora_name="", lora_path="", pinned=False)
UnloadLoRAAdapterReqInput = struct("UnloadLoRAAdapterReqInput", lora_name="")
UpdateWeightFromDiskReqInput = struct("UpdateWeightFromDiskReqInput", model_path="", load_format=None)
EmbeddingReqInput = struct(
    "EmbeddingReqInput", rid=None, text=None, input_ids=None, lora_path=None, priority=None, dimensions=None
)
Outcome = struct("Outcome", success=True, message="", error_message=None)


class LoadSnapshot(msgspec.Struct):
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int


@dataclass
class State:
    """The state of a request in the tokenizer manager."""

    requested: StandinRequest
    finished: bool = False
    out: list[dict[str, Any]] = field(default_factory=list)
    event: asyncio.Event = field(default_factory=asyncio.Event)
    vector: bool = False
    logprobs: int | None = None
    stops: tuple[int, ...] = ()
    room: int | None = None
    denoised: bool = False


class Watchdog:
    stopped = False

    def stop(self) -> None:
        self.stopped = True


class ServerArgs:
    def __init__(self, **arguments: Any) -> None:
        unknown = set(arguments) - set(SERVER_ARGS)
        if unknown:
            raise TypeError(f"Unexpected keyword argument {unknown.pop()!r}")
        self._resolved = {**SERVER_ARGS, **arguments}
        if self._resolved["dllm_algorithm"] is not None:
            self._resolved["page_size"] = DLLM_BLOCK

    def resolved_dict(self) -> dict[str, Any]:
        return dict(self._resolved)


class TokenizerManager:
    tokenizer: Any = None
    model_config = SimpleNamespace(vocab_size=512)

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.event_loop: Any = None
        self.is_generation = not arguments["is_embedding"]
        self.context_len = arguments["context_length"]
        self.watchdog = self._subprocess_watchdog = Watchdog()
        self.rid_to_state: dict[str, State] = {}
        self.is_pause = False
        self.retracted = False
        self.asleep: list[str] | None = None
        self.weights_lost = False
        self.loras: dict[str, str] = dict(arguments["lora_paths"] or {})
        self.calls: list[Any] = []
        self.requested_with: list[dict[str, Any]] = []
        self.seen: list[str] = []  # request ids, in scheduling order
        self.abort_after: dict[str, dict[str, Any]] = {}  # finish reasons after the first token, by request id
        self.abort_before: dict[str, dict[str, Any]] = {}  # finish reasons before the first token, by request id
        self.broken: BaseException | None = None
        self.deaf = False  # whether requests stop making progress
        self.step = asyncio.Event()
        self.step.set()
        pages = arguments["max_total_tokens"] // arguments["page_size"]
        self.caches = [LittleCache(arguments["page_size"], pages) for _ in range(arguments["dp_size"])]
        self.config = json.loads(arguments["kv_events_config"] or "{}")
        self.publishers: list[EventPublisher] = []

    async def handle_loop(self) -> None:
        self.event_loop = self.event_loop or asyncio.get_running_loop()
        if self.config.get("publisher") == "zmq":
            self.publishers = [EventPublisher("sglang", cache.block_size) for cache in self.caches]
            for rank, publisher in enumerate(self.publishers):
                source = KvSource(self.config["endpoint"], self.config["replay_endpoint"]).at_rank(rank)
                assert source.replay_endpoint is not None
                await publisher.open(source.endpoint, source.replay_endpoint)
        try:
            while True:
                await asyncio.sleep(0)
                await self.step.wait()
                if self.broken is not None:
                    raise self.broken
                if not (self.is_pause or self.deaf or self.asleep is not None):
                    self._scheduler_step()
                if not self.rid_to_state:
                    await asyncio.sleep(0.001)
        finally:
            for publisher in self.publishers:
                await publisher.close()

    def _scheduler_step(self) -> None:
        for name, state in list(self.rid_to_state.items()):
            requested = state.requested
            if not self._meets(state.room):
                continue
            cache = self.caches[requested.rank]
            first = name not in self.seen
            if first:
                if max(requested.prompt) >= self.model_config.vocab_size:
                    raise IndexError("index out of range in self")
                self.seen.append(name)
                requested.cached = cache.cached_tokens(requested)
                self._publish(requested.rank, cache.store(requested, requested.prompt))
            if state.vector:
                self._emit(name, state, {"embedding": [float(len(requested.prompt)), 0.5]}, {"type": "stop"})
                continue
            if (abort := self.abort_before.get(name.partition(":")[2])) is not None:
                self._emit(name, state, {"output_ids": []}, abort)
                continue
            abort = self.abort_after.get(name.partition(":")[2])
            if abort is not None and requested.generated:
                self._emit(name, state, {"output_ids": requested.generated[-1:]}, abort)
                continue
            count = 1
            if self.arguments["dllm_algorithm"] is not None:
                # A diffusion model reports a step without tokens before each block. A block may begin in the prompt.
                count = DLLM_BLOCK - (len(requested.prompt) + len(requested.generated)) % DLLM_BLOCK
                state.denoised = not state.denoised
                if state.denoised:
                    self._emit(name, state, {"output_ids": []}, None)
                    continue
            block: list[int] = []
            reason, done = "length", False
            while len(block) < count and not done:
                block.append(next_token([*requested.prompt, *requested.generated]))
                requested.generated += block[-1:]
                reason = "stop" if block[-1] in state.stops else "length"
                done = reason == "stop" or len(requested.generated) >= requested.max_tokens
            if done:
                self._publish(requested.rank, cache.store(requested, [*requested.prompt, *requested.generated[:-1]]))
            self._emit(name, state, {"output_ids": block}, {"type": reason} if done else None)

    def _meets(self, room: int | None) -> bool:
        """Return whether the other side of a request has connected; its prompt is computed only then."""
        mode = self.arguments["disaggregation_mode"]
        if mode == "null" or room is None or room < len(self.caches):
            return True  # a warm-up has no other side
        Engine.rooms.setdefault(room, set()).add(mode)
        return Engine.rooms[room] == {"prefill", "decode"}

    def _emit(self, name: str, state: State, out: dict[str, Any], reason: dict[str, Any] | None) -> None:
        requested = state.requested
        meta: dict[str, Any] = {"id": name, "finish_reason": reason, "prompt_tokens": len(requested.prompt)}
        if not state.vector:
            meta |= {"completion_tokens": len(requested.generated), "cached_tokens": requested.cached}
        if state.logprobs is not None and requested.generated:
            meta["output_token_logprobs"] = [(-0.5, requested.generated[-1], None)]
            if state.logprobs:
                meta["output_top_logprobs"] = [
                    [(-0.5, requested.generated[-1], None), (float("-inf"), 7, None)][: state.logprobs]
                ]
        if reason is not None:
            state.finished = True
            del self.rid_to_state[name]
        state.out.append({"meta_info": meta, **out})
        state.event.set()

    def _publish(self, rank: int, changes: list[CacheEvent]) -> None:
        if self.publishers and changes:
            self.publishers[rank].publish(changes)

    async def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[dict[str, Any]]:
        assert request is None
        if self.event_loop is None:
            raise AssertionError("the real one would now take this process's signals")
        if obj.rid in self.rid_to_state:
            raise ValueError(f"Duplicate request ID detected: {obj.rid}")
        vector = isinstance(obj, EmbeddingReqInput)
        params = {} if vector else obj.sampling_params
        if obj.lora_path and obj.lora_path not in self.loras:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {obj.lora_path}")
        if set(params) - SAMPLING_PARAMS:
            raise TypeError("Unexpected keyword argument")
        if not 0.0 < params.get("top_p", 1.0) <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {params['top_p']}.")
        if len(obj.input_ids) > self.context_len:
            raise ValueError("The input is longer than the model's context length.")
        if len(obj.input_ids) + params.get("max_new_tokens", 0) > self.context_len:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        requested = StandinRequest(obj.rid, list(obj.input_ids), params.get("max_new_tokens", 1), obj.lora_path or "")
        state = State(requested, vector=vector)
        if not vector:
            requested.salt = obj.cache_salt or ""
            requested.rank = obj.routed_dp_rank or 0
            state.room = obj.bootstrap_room
            state.logprobs = obj.top_logprobs_num if obj.return_logprob else None
            state.stops = () if params["ignore_eos"] else tuple(params.get("stop_token_ids", ()))
        while self.is_pause:  # noqa: ASYNC110 - it is a stand-in
            await asyncio.sleep(0.001)
        self.rid_to_state[obj.rid] = state
        try:
            while True:
                await state.event.wait()
                reported, state.out = state.out, []
                finished = state.finished
                state.event.clear()
                out = dict(reported[-1])
                if "output_ids" in out:
                    if reported[-1]["meta_info"]["finish_reason"] in self.abort_after.values():
                        out["output_ids"] = reported[-1]["output_ids"]
                    else:
                        out["output_ids"] = [one for chunk in reported for one in chunk["output_ids"]]
                    for name in ("output_token_logprobs", "output_top_logprobs"):
                        if name in out["meta_info"]:
                            out["meta_info"][name] = [one for chunk in reported for one in chunk["meta_info"][name]]
                yield out
                if finished:
                    return
        except BaseException:
            self.abort_request(obj.rid)
            raise

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        # The scheduler drops what begins with this id.
        for name in list(self.rid_to_state):
            if abort_all or (rid and name.startswith(rid)):
                del self.rid_to_state[name]
                self.calls.append(("abort", name))

    async def flush_cache(self, timeout_s: float | None = None) -> Any:
        self.calls.append("flush_cache")
        if self.rid_to_state and timeout_s is not None:  # retracted requests never become idle
            return Outcome(success=False, message="Timed out waiting for idle state.")
        if self.rid_to_state and not self.retracted:
            return Outcome(success=False, message="Cache not flushed because there are pending requests.")
        self._flush()
        return Outcome()

    def _flush(self) -> None:
        for rank, cache in enumerate(self.caches):
            cache.names.clear()
            self._publish(rank, [BlocksCleared()])

    async def pause_generation(self, obj: Any) -> None:
        self.calls.append(obj)
        self.is_pause = True
        self.retracted = obj.mode == "retract"

    async def continue_generation(self, obj: Any) -> None:
        self.calls.append(obj)
        self.is_pause = self.retracted = False

    async def release_memory_occupation(self, obj: Any, request: Any = None) -> None:
        self.calls.append(obj)
        assert not self.rid_to_state, "the scheduler dies of it"
        self.asleep = obj.tags or ["kv_cache", "weights", "cuda_graph"]
        self.weights_lost = "weights" in self.asleep and not self.arguments["enable_weights_cpu_backup"]
        self._flush()

    async def resume_memory_occupation(self, obj: Any, request: Any = None) -> None:
        self.calls.append(obj)
        assert self.asleep == (obj.tags or ["kv_cache", "weights", "cuda_graph"])
        self.asleep = None

    async def update_weights_from_disk(self, obj: Any, request: Any = None) -> tuple[bool, str, int]:
        self.calls.append(obj)
        self.weights_lost = False
        return True, "", 0

    async def load_lora_adapter(self, obj: Any, _: Any = None) -> Any:
        if "broken" in obj.lora_path:
            return Outcome(success=False, error_message="rank 0: no weights in it")
        self.loras[obj.lora_name] = obj.lora_path
        return Outcome()

    async def unload_lora_adapter(self, obj: Any, _: Any = None) -> Any:
        del self.loras[obj.lora_name]
        return Outcome()

    async def get_loads(self, include: list[str] | None = None, dp_rank: int | None = None) -> list[LoadSnapshot]:
        loads = []
        for rank, cache in enumerate(self.caches):
            running = [state for state in self.rid_to_state.values() if state.requested.rank == rank]
            total = cache.blocks * cache.block_size
            loads.append(LoadSnapshot(rank, len(running), 0, 16 * len(running), total, 48))
        return loads


@dataclass
class InitResult:
    scheduler_infos: list[dict[str, Any]]
    all_child_pids: list[int]


class Engine:
    """`made` is the newest engine; `fails` is the exception of the next constructor call."""

    made: "Engine | None" = None
    fails: Exception | None = None
    child = False  # whether an engine has a process
    rooms: dict[int, set[str]] = {}  # noqa: RUF012 - connected sides, of all engines

    def __init__(self, **kwargs: Any) -> None:
        self.server_args = ServerArgs(**kwargs)
        arguments = self.server_args.resolved_dict()
        self.processes: list[Any] = []
        if Engine.child:
            process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(3600.0,))
            process.start()
            self.processes.append(process)
        if Engine.fails is not None:
            raise Engine.fails
        Engine.made = self
        self.send_to_rpc = None
        follows = arguments["node_rank"] > 0
        if follows and os.environ.get("SGLANG_BLOCK_NONZERO_RANK_CHILDREN") != "0":
            raise AssertionError("the real one would wait here for ever")
        self.tokenizer_manager = None if follows else TokenizerManager(arguments)
        info = {"status": "ready", "max_total_num_tokens": arguments["max_total_tokens"], "max_req_input_len": 122}
        self._scheduler_init_result = InitResult([info], [process.pid for process in self.processes])

    def shutdown(self) -> None:
        raise AssertionError("the real one kills every child of this process")

    async def async_generate(self, **given: Any) -> Any:
        if unknown := given.keys() - GENERATE_ARGUMENTS.keys():
            raise TypeError(f"Unexpected keyword argument {unknown.pop()!r}")
        obj = SimpleNamespace(**GENERATE_ARGUMENTS | given)
        manager = self.tokenizer_manager
        assert manager is not None and obj.stream and obj.rid is not None and obj.input_ids
        if manager.arguments["disaggregation_mode"] != "null" and obj.bootstrap_room is None:
            raise ValueError("Disaggregated request received without bootstrap room id.")
        if obj.routed_dp_rank is not None and obj.routed_dp_rank >= len(manager.caches):
            raise ValueError(f"routed_dp_rank={obj.routed_dp_rank} out of range")
        manager.requested_with.append({name: value for name, value in given.items() if value is not None})
        return manager.generate_request(obj, None)


def kill_process_tree(
    parent_pid: int, include_parent: bool = True, skip_pid: int | None = None, wait_timeout: float | None = 60
) -> None:
    for process in multiprocessing.active_children():
        if process.pid == parent_pid:
            process.kill()


def get_local_ip_auto(fallback: str | None = None) -> str:
    return "127.0.0.1"


def install(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """Make the stand-in importable as SGLang."""
    io_struct = (
        PauseGenerationReqInput, ContinueGenerationReqInput, ReleaseMemoryOccupationReqInput,
        ResumeMemoryOccupationReqInput, LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput, EmbeddingReqInput,
        UpdateWeightFromDiskReqInput,
    )  # fmt: skip
    contents: dict[str, tuple[Any, ...]] = {
        "sglang": (),
        "sglang.srt": (),
        "sglang.srt.entrypoints": (),
        "sglang.srt.entrypoints.engine": (Engine,),
        "sglang.srt.managers": (),
        "sglang.srt.managers.io_struct": io_struct,
        "sglang.srt.utils": (kill_process_tree,),
        "sglang.srt.utils.network": (get_local_ip_auto,),
    }
    install_modules(monkeypatch, contents)
    monkeypatch.setattr(Engine, "made", None)
    monkeypatch.setattr(Engine, "fails", None)
    monkeypatch.setattr(Engine, "child", False)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    return Engine
