"""The route `/metrics` of the stand-in: metrics of vLLM 0.32 and SGLang 0.5.23 that others read."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tests.harness.openai_server.engine import StandInEngine
from tests.harness.openai_server.settings import Counters, ServerSettings

MALFORMED = 'vllm:num_requests_running{engine="0" 1.0\nsglang:num_running_reqs{} one\n'


class EngineCollector(Collector):
    def __init__(self, settings: ServerSettings, engine: StandInEngine, counters: Counters, model_name: str) -> None:
        self._settings = settings
        self._engine = engine
        self._counters = counters
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        yield from self._vllm() if self._settings.flavor == "vllm" else self._sglang()

    def _vllm(self) -> Iterable[Metric]:
        engine, counters, settings = self._engine, self._counters, self._settings
        labels = {"engine": "0", "model_name": self._model_name}
        yield _gauge("vllm:num_requests_running", "Requests in execution batches.", labels, engine.running)
        yield _gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", labels, engine.waiting)
        used = engine.cache.used / engine.cache.total
        yield _gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels, used)
        yield _counter("vllm:prefix_cache_queries", "Queried tokens.", labels, counters.prompt_tokens)
        yield _counter("vllm:prefix_cache_hits", "Cached tokens.", labels, counters.cached_tokens)
        external = counters.prompt_tokens - counters.cached_tokens if settings.kv_transfer else 0
        yield _counter("vllm:external_prefix_cache_queries", "Queried tokens of the connector.", labels, external)
        yield _counter("vllm:external_prefix_cache_hits", "Fetched tokens.", labels, counters.fetched_tokens)
        yield _counter("vllm:prompt_tokens", "Number of prefill tokens processed.", labels, counters.prompt_tokens)
        yield _counter("vllm:generation_tokens", "Generation tokens processed.", labels, counters.generated_tokens)
        info = {
            "block_size": str(settings.block_size),
            "num_gpu_blocks": str(settings.kv_blocks),
            "enable_prefix_caching": "True",
            "cache_dtype": "auto",
            "gpu_memory_utilization": "0.9",
            "num_gpu_blocks_override": str(settings.kv_blocks),
            "prefix_caching_hash_algo": "sha256",
            "engine": "0",
        }
        yield _gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", info, 1)

    def _sglang(self) -> Iterable[Metric]:
        engine, counters, settings = self._engine, self._counters, self._settings
        ranks = dict.fromkeys(("tp_rank", "pp_rank", "moe_ep_rank"), "0")
        labels = {"model_name": self._model_name, "engine_type": "unified", **ranks}
        tokens, used = engine.cache.total * settings.block_size, engine.cache.used * settings.block_size
        rate = counters.cached_tokens / max(1, counters.prompt_tokens)
        yield _gauge("sglang:num_running_reqs", "The number of running requests.", labels, engine.running)
        yield _gauge("sglang:num_queue_reqs", "The number of requests in the waiting queue.", labels, engine.waiting)
        yield _gauge("sglang:token_usage", "The token usage.", labels, used / tokens)
        yield _gauge("sglang:num_used_tokens", "The number of used tokens.", labels, used)
        yield _gauge("sglang:cache_hit_rate", "The prefix cache hit rate.", labels, rate)
        yield _gauge("sglang:max_total_num_tokens", "Maximum total number of tokens.", labels, tokens)
        yield _gauge("sglang:page_size", "Page size.", labels, settings.block_size)
        yield _gauge("sglang:num_pages", "Number of pages.", labels, engine.cache.total)
        yield _gauge("sglang:context_len", "Context length.", labels, engine.max_model_len)
        yield _counter("sglang:prompt_tokens", "Prefill tokens processed.", labels, counters.prompt_tokens)
        yield _counter("sglang:generation_tokens", "Generation tokens processed.", labels, counters.generated_tokens)
        yield _counter("sglang:cached_tokens", "Cached prompt tokens.", labels, counters.cached_tokens)


def metrics_text(collector: EngineCollector) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family
