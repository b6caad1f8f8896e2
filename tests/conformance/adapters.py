"""What the conformance tests know about the adapters: what their functions pass to the engines, and short tables.

`python -m tests.conformance.adapters PATH VERSION SOURCE` renews the recorded interface of TensorRT-LLM, whose wheels
are not on PyPI, from a checkout or a wheel. SOURCE is a description for readers.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.workers.engines.attached import server
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import core as sglang_core
from forebay.workers.engines.sglang import engine as sglang_engine
from forebay.workers.engines.sglang import requests as sglang_requests
from forebay.workers.engines.tensorrt_llm import engine as trtllm_engine
from forebay.workers.engines.tensorrt_llm import requests as trtllm_requests
from forebay.workers.engines.vllm import core as vllm_core
from forebay.workers.engines.vllm import encoder, transfer
from forebay.workers.engines.vllm import requests as vllm_requests
from forebay.workers.engines.vllm.offloading import offloading_connector
from forebay.workers.engines.vllm.tiers.configuration import TierConfig, connector
from forebay.workers.kv_events import tensorrt_llm_wire, zmq_wire
from forebay.workers.kv_tiers.settings import TierSettings
from tests.conformance.interface import Package, Recording
from tests.conformance.uses import Adapter, differences

WORKERS = Path(__file__).parents[2] / "services/forebay/workers"
KINDS: Any = ("json_object", "json_schema", "regex", "choice", "grammar")
FORMATS = [StructuredOutput(kind=kind, text='["a"]') for kind in KINDS]
PLAIN = Sampling(max_tokens=1, seed=1, logprobs=1, top_k=1, min_tokens=1, stop_token_ids=(1,))
SAMPLING = msgspec.structs.replace(PLAIN, logit_bias=(TokenBias(token_id=1, bias=1.0),))
GB = 10**9
OWN_TIERS = connector(TierConfig(TierSettings(host_bytes=GB)))
BUCKET = TierSettings(host_bytes=GB, disk=Path("d"), store="s3://bucket/prefix", store_endpoint="http://h:1")
OFFLOADING = offloading_connector(BUCKET)
OFFLOADING_KEYS = OFFLOADING["kv_connector_extra_config"]
DIRECTORY, OBJECTS = [
    {name: value for name, value in one.items() if name != "type"} for one in OFFLOADING_KEYS["secondary_tiers"]
]


def settings(role: Any) -> EngineSettings:
    """Return settings in which every option is set that becomes an argument of an engine."""
    sizes = {"block_size": 32, "kv_blocks": 8, "max_num_seqs": 1, "max_num_batched_tokens": 64, "dp_size": 2}
    return EngineSettings(model=Path("m"), model_name="m", role=role, loras={"a": Path("a")}, **sizes)  # type: ignore[arg-type]


def by_expression(table: dict[str, str]) -> dict[str, str]:
    return {one: kind for kind, expressions in table.items() for one in expressions.split(" | ")}


def decoders(engine: str) -> list[type[msgspec.Struct]]:
    """Return the types of `zmq_wire` that decode the events of an engine."""
    structs = [one for one in vars(zmq_wire).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    tagged = [one for one in structs if one.__struct_config__.tag]
    return [one for one in tagged if ("Sglang" in one.__name__) == (engine == "SGLANG") or not one.__struct_fields__]


VLLM_ARGUMENTS = [
    vllm_core.engine_arguments(settings(role), kv_events=True, sockets=Path("s"), tiers=tiers)
    for role in ("prefill", "decode", "aggregated")
    for tiers in (None, OWN_TIERS, OFFLOADING)
]
ENCODER_ARGUMENTS = encoder.encoder_arguments(settings("encode"), Path("s"))
V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
EC = "vllm.distributed.ec_transfer.ec_connector"
TIERING = "vllm.v1.kv_offload.tiering"
KV_TRANSFER = "vllm.config.kv_transfer:KVTransferConfig"
PROTOCOL = "vllm.entrypoints.openai.engine.protocol"
ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
VLLM = Adapter(
    package="vllm",
    files=[*sorted((WORKERS / "engines/vllm").rglob("*.py")), WORKERS.parent / "ingress/parsers/selection.py"],
    receivers=by_expression({
        ASYNC_LLM: "self.llm | llm | self._llm",
        "vllm.platforms.interface:Platform": "current_platform | vllm.platforms:current_platform",  # found at first use
        "vllm.multimodal.registry:MultiModalRegistry": "MULTIMODAL_REGISTRY | vllm.multimodal:MULTIMODAL_REGISTRY",
        "vllm.v1.engine.utils:KVEventSource": "source",
        "vllm.outputs:RequestOutput": "_prefill:last | _generate:output | _encode:last",
        "vllm.multimodal.inputs:PlaceholderRange": "__init__:one.mm_position | _encode:place",
        "vllm.outputs:CompletionOutput": "_generate:one | _prefill:last.outputs[0]",
        "vllm.outputs:PoolingRequestOutput": "_embed:output",
        "vllm.outputs:PoolingOutput": "_embed:output.outputs",
        "vllm.v1.metrics.stats:RequestStateStats": "_prefill:last.metrics",
        "vllm.v1.metrics.stats:SchedulerStats": "scheduler_stats",
        "vllm.v1.metrics.stats:PrefillStats": "one.request.prefill_stats | _correct_statistics:stats",
        "vllm.logprobs:Logprob": "place[token_id]",
        "vllm.exceptions:GracefulHTTPError": "request_error:error",
        "vllm.lora.request:LoRARequest": "request.lora_request",
        "vllm.config.vllm:VllmConfig": "vllm_config | self._vllm_config",
        KV_TRANSFER: "transfer_config | self._kv_transfer_config",
        f"{V1}.nixl.pull_worker:NixlPullConnectorWorker": "forebay_block_bytes:worker | _connector_worker()",
        f"{V1}.nixl.connector:NixlPullConnector": "_connector_worker:connector",
        f"{V1}.multi_connector:MultiConnector": "_connectors:connector",
        "vllm.v1.request:Request": "add:request | one.request",
        "vllm.v1.core.block_pool:BlockPool": "self.pool",
        "vllm.v1.core.sched.output:KVConnectorBlockState": "state",
        "vllm.v1.kv_cache_interface:KVCacheConfig": "self._kv_cache_config",
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "group | kv_cache_config.kv_cache_groups[0]",
        "vllm.model_executor.layers.attention.attention:Attention": "layers[name]",
        "": "getattr(layers[name], 'isa', '')",  # set by vLLM's attention for CPUs
        "vllm.parser.abstract_parser:Parser": "self._parser",
        f"{PROTOCOL}:DeltaMessage": "delta",
        f"{PROTOCOL}:DeltaToolCall": "call",
        f"{PROTOCOL}:DeltaFunctionCall": "function",
    }),
    bases={"VllmStepStats": "vllm.v1.metrics.loggers:StatLoggerBase"},
    calls=("self._call", "self.llm"),
    keywords=[
        *(("vllm.engine.arg_utils:AsyncEngineArgs", one) for one in VLLM_ARGUMENTS),
        *((KV_TRANSFER, one.get("kv_transfer_config", ())) for one in VLLM_ARGUMENTS),
        ("vllm.config.kv_events:KVEventsConfig", VLLM_ARGUMENTS[0]["kv_events_config"]),
        ("vllm.engine.arg_utils:AsyncEngineArgs", ENCODER_ARGUMENTS),
        ("vllm.config.ec_transfer:ECTransferConfig", ENCODER_ARGUMENTS[encoder.EC_TRANSFER]),
        ("vllm.inputs.llm:TextPrompt", ["prompt", "multi_modal_data", "multi_modal_uuids"]),
        ("vllm.sampling_params:SamplingParams", vllm_requests.sampling_arguments(SAMPLING)),
        ("vllm.sampling_params:SamplingParams", ["structured_outputs", "extra_args"]),
        *(("vllm.sampling_params:StructuredOutputsParams", vllm_requests.structured_arguments(one)) for one in FORMATS),
        ("vllm.inputs.engine:TokensInput", vllm_requests.prompt_of([1], "salt")),
        ("vllm.inputs.llm:TokensPrompt", ["prompt_token_ids", "multi_modal_data", "multi_modal_uuids", "cache_salt"]),
        ("vllm.v1.worker.gpu_worker:Worker.reload_weights", []),
        *((f"{TIERING}.{one}", [*own, "offloading_spec", "primary_kv_view", "tier_type"])
          for one, own in (("fs.manager:FileSystemTierManager", DIRECTORY),
                           ("obj.manager:ObjectStoreSecondaryTierManager", OBJECTS))),
        (f"{TIERING}.obj.config:ObjStoreConfig", OBJECTS["store_config"]),
    ],
    strings={
        "vllm.envs": [
            vllm_core.HOST, vllm_core.PORT, "VLLM_HOST_IP", "VLLM_NO_USAGE_STATS", "VLLM_WORKER_MULTIPROC_METHOD",
            "VLLM_ENABLE_V1_MULTIPROCESSING",
        ],
        "vllm.v1.metrics.loggers": [*server.VLLM, "vllm:cache_config_info"],
        f"{V1}.nixl.*": [*transfer.TransferParams.__struct_fields__, *transfer.PREFILL, "kv_lease_duration"],
        "vllm.v1.engine.output_processor": ["remote_prefill_cached_tokens"],
        "vllm.distributed.kv_transfer.kv_connector.factory": [
            "NixlConnector", "MultiConnector", OFFLOADING["kv_connector"],
        ],
        f"{V1}.multi_connector": ["connectors"],
        f"{EC}.factory": [encoder.CONNECTOR],
        f"{EC}.example_connector": [encoder.DIRECTORY, encoder.FILE, encoder.TENSOR],
        f"{EC}.utils": ["metadata"],
        "vllm.model_executor.models.qwen2_5_vl": [encoder.SECONDS],
        "vllm.config.ec_transfer": ["ec_producer"],
        "vllm.v1.kv_cache_interface": zmq_wire.MAIN_ATTENTION,
        "vllm.distributed.kv_events": ["GPU", "CPU", "STORAGE"],
        "vllm.v1.kv_offload.factory": ["spec_name", OFFLOADING_KEYS["spec_name"]],
        "vllm.v1.kv_offload.cpu.spec": ["cpu_bytes_to_use"],
        "vllm.v1.kv_offload.base": ["self_describing_kv_events", "LOCAL", "REMOTE"],
        f"{TIERING}.spec": ["secondary_tiers"],
        f"{TIERING}.factory": ["type", *(one["type"] for one in OFFLOADING_KEYS["secondary_tiers"])],
    },
    events=("vllm.distributed.kv_events", decoders("VLLM"), ["session_id", "lookahead_token_ids"]),  # see `zmq_wire`
)  # fmt: skip

SERVER_ARGS = "sglang.srt.arg_groups.fields.*:*"  # SGLang joins these classes to `ServerArgs`
SGLANG_ENGINE, MANAGER = (
    "sglang.srt.entrypoints.engine:Engine",
    "sglang.srt.managers.tokenizer_manager:TokenizerManager",
)
SGLANG_SAMPLING = "sglang.srt.sampling.sampling_params:SamplingParams"
SOURCES = sglang_core.own_sources(1, Path("s"))
HICACHE = TierSettings(host_bytes=GB, disk=Path("d"))
SGLANG = Adapter(
    package="sglang",
    files=sorted((WORKERS / "engines/sglang").glob("*.py")),
    receivers=by_expression({
        SGLANG_ENGINE: "self.engine | engine | self._core.engine",
        MANAGER: "manager | self._manager",
        "sglang.srt.managers.load_snapshot:LoadSnapshot": "load",
        "=sglang.srt.managers.io_struct": "self._io",
        "sglang.srt.managers.io_struct:FlushCacheReqOutput": "_clear:flushed",
        "sglang.srt.managers.io_struct:LoRAUpdateOutput": "outcome",
        "sglang.srt.utils.watchdog:SubprocessWatchdog": "manager._subprocess_watchdog",
        "sglang.srt.server_args:ServerArgs": "engine.server_args",
        "=sglang.srt.utils.network:get_local_ip_auto": "sglang.srt.utils:get_local_ip_auto",
    }),
    calls=("self._call", "self._manager"),
    keywords=[
        *((SERVER_ARGS, sglang_core.engine_arguments(settings(role), SOURCES)) for role in ("prefill", "decode")),
        (SERVER_ARGS, sglang_core.hicache_arguments(settings("prefill"), HICACHE)),
        (SERVER_ARGS, [
            "tp_size", "pp_size", "enable_dp_attention",
            "disable_radix_cache", "enable_memory_saver", "enable_weights_cpu_backup", "enable_priority_scheduling",
            "schedule_low_priority_values_first", "dist_init_addr", "dllm_algorithm",
        ]),
        (f"{SGLANG_ENGINE}.async_generate", sglang_requests.logprob_arguments(SAMPLING)),
        (f"{SGLANG_ENGINE}.async_generate", sglang_engine.Rendezvous(host="h", port=1, room=1).arguments()),
        (f"{SGLANG_ENGINE}.async_generate", ["external_trace_header"]),
        (SGLANG_SAMPLING, sglang_requests.sampling_arguments(SAMPLING) | sglang_engine.PREFILL_SAMPLING),
        (SGLANG_SAMPLING, [sglang_requests.structured_argument(one)[0] for one in FORMATS]),
        ("sglang.srt.disaggregation.kv_events:KVEventsConfig", SOURCES),
    ],
    strings={
        "sglang.srt.observability.metrics_collector": server.SGLANG,
        "sglang.srt.entrypoints.engine": [sglang_core.FOLLOWERS_RETURN],
        "sglang.srt.managers.scheduler": ["max_total_num_tokens"],
        "sglang.srt.managers.tokenizer_manager": [
            "meta_info", "finish_reason", "output_ids", "embedding", "cached_tokens", "output_token_logprobs",
            "output_top_logprobs", "abort", "type", "status_code", "message",
        ],
        "sglang.srt.disaggregation.kv_events": ["GPU", "CPU_PINNED", "DISK", "EXTERNAL"],
        "sglang.srt.arg_groups.fields.memory": ["file"],
        "sglang.srt.mem_cache.hicache_storage": ["file_storage_path"],
        "sglang.srt.mem_cache.storage.file.lru_file_evictor": ["max_size"],
    },
    events=("sglang.srt.disaggregation.kv_events", decoders("SGLANG"), []),
)  # fmt: skip

LLM, RESULT = "tensorrt_llm:LLM", "tensorrt_llm.llmapi.llm:RequestOutput"
LLM_ARGS, CACHE_ARGS = (f"tensorrt_llm.llmapi.llm_args:{one}" for one in ("TorchLlmArgs", "KvCacheConfig"))
TRANSCEIVER = "tensorrt_llm.llmapi.llm_args:CacheTransceiverConfig"
GUIDED = "tensorrt_llm.sampling_params:GuidedDecodingParams"
TRTLLM_ARGUMENTS = [trtllm_requests.engine_arguments(settings(role), kv_events=True) for role in ("prefill", "decode")]
EVENT_PARTS: Any = [value for value in vars(tensorrt_llm_wire).values() if hasattr(value, "__struct_fields__")]
TENSORRT_LLM = Adapter(
    package="tensorrt_llm",
    files=sorted((WORKERS / "engines/tensorrt_llm").glob("*.py")),
    receivers=by_expression({
        LLM: "self._llm | llm",
        LLM_ARGS: "self._llm.args",
        RESULT: "output | _prefill:result | _generate:result",
        "tensorrt_llm.executor.result:CompletionOutput": "_prefill:one | _generate:one",
        "tensorrt_llm.metrics:MetricsCollector": "collector",
        "": "getattr(collector, 'log_metrics_dict', None)",  # of older releases
        **{f"={module}:{name}": f"self._types.{name}" for module, names in trtllm_engine.TYPES.items() for name in names
           if name not in ("LLM", "Logprob")},  # these are only passed on
    }),
    keywords=[
        *((LLM_ARGS, one) for one in TRTLLM_ARGUMENTS),
        (CACHE_ARGS, TRTLLM_ARGUMENTS[0]["kv_cache_config"]),
        (TRANSCEIVER, TRTLLM_ARGUMENTS[0]["cache_transceiver_config"]),
        (f"{LLM}.generate_async", ["scheduling_params", "lora_request", "cache_salt", "priority"]),
        (f"{LLM}.generate_async", ["disaggregated_params"]),
        ("tensorrt_llm:SamplingParams", [*trtllm_requests.sampling_arguments(PLAIN), "guided_decoding"]),
        *((GUIDED, trtllm_requests.guided_arguments(one)) for one in FORMATS),
        ("tensorrt_llm.llmapi:DisaggregatedParams", ["request_type", trtllm_engine.LOGPROBS]),
        ("tensorrt_llm.executor.result:Logprob", ["logprob", "rank"]),
    ],
    strings={
        "tensorrt_llm._utils": ["created", "stored", "removed"] + [
            name for part in EVENT_PARTS if part.__name__[0] == "_" for name in part.__struct_fields__
        ],
    },
)  # fmt: skip


def record(path: str, version: str, source: str) -> None:
    package = Package(Path(path))
    print("\n".join(differences(TENSORRT_LLM, package)))
    texts = {module: sorted(set(wanted) & package.strings(module)) for module, wanted in TENSORRT_LLM.strings.items()}
    made = Recording(version, str(datetime.now(UTC).date()), source, package.interfaces, texts)
    encoded = msgspec.json.format(msgspec.json.encode(made, order="sorted"), indent=1)
    Path(__file__).with_name("tensorrt_llm.json").write_bytes(encoded + b"\n")


if __name__ == "__main__":
    record(*sys.argv[1:])
