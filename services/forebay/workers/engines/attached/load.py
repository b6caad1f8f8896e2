"""Read the load of a server from its metrics: vLLM's and SGLang's for Prometheus, TensorRT-LLM's list of iterations."""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from forebay.events.codec import MALFORMED

VLLM = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
SGLANG = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage")
FAMILIES = (VLLM, SGLANG)
JSON_LIST = "["
NUMBER_MAX = 10**9  # larger values are malformed

Number = Annotated[int, msgspec.Meta(ge=0, lt=NUMBER_MAX)]


class MetricsUnreadable(ValueError):
    """The metrics of a server are malformed, or have none of the known names. The message tells which."""


class ServerLoad(NamedTuple):
    """Load of a server, of all its clients.

    Attributes:
        usage: share of the KV cache in use, from 0 to 1.
    """

    running: int
    waiting: int
    usage: float


class _CacheStats(msgspec.Struct, rename="camel"):
    used_num_blocks: Number = 0
    max_num_blocks: Number = 0


class _BatchStats(msgspec.Struct, rename="camel"):
    num_context_requests: Number = 0
    num_gen_requests: Number = 0
    num_queued_context_requests: Number = 0
    num_queued_gen_requests: Number = 0


class _Iteration(msgspec.Struct, rename="camel"):
    """Fields of TensorRT-LLM's statistics of one iteration that are read here."""

    kv_cache_stats: _CacheStats = msgspec.field(default_factory=_CacheStats)
    inflight_batching_stats: _BatchStats = msgspec.field(default_factory=_BatchStats)


def sample_lines(metrics: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the samples with these names. A server has some thousand samples, so the other lines are not parsed."""
    for line in metrics.split("\n"):
        if line.startswith(tuple(names)) and line.rstrip():
            yield line.rstrip()


def read_load(metrics: str) -> ServerLoad | None:
    """Return the load in the metrics of vLLM, SGLang or TensorRT-LLM. Samples of several engines are added up.

    Returns:
        None if TensorRT-LLM has run no iteration since the previous call.

    Raises:
        MetricsUnreadable: the metrics are malformed, or have none of the known names.
    """
    if metrics.startswith(JSON_LIST):
        return _load_of_iterations(metrics)
    for names in FAMILIES:
        lines = list(sample_lines(metrics, names))
        if not lines:
            continue
        found: dict[str, list[float]] = {name: [] for name in names}
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    if sample.name in found:
                        found[sample.name].append(float(sample.value))
        except ValueError as error:
            raise MetricsUnreadable(f"the metrics are malformed: {error}") from error
        running, waiting, usage = (found[name] for name in names)
        if running and all(0 <= value < NUMBER_MAX for values in found.values() for value in values):
            return ServerLoad(int(sum(running)), int(sum(waiting)), min(1.0, max(usage, default=0.0)))
        raise MetricsUnreadable(f"the metrics have no valid value of {names[0]}")
    raise MetricsUnreadable("the metrics have no known names: " + ", ".join(names[0] for names in FAMILIES))


def _load_of_iterations(metrics: str) -> ServerLoad | None:
    try:
        iterations = msgspec.json.decode(metrics, type=list[_Iteration])
    except MALFORMED as error:
        raise MetricsUnreadable(f"the statistics of iterations are malformed: {error}") from error
    if not iterations:
        return None
    batch, cache = iterations[-1].inflight_batching_stats, iterations[-1].kv_cache_stats
    return ServerLoad(
        batch.num_context_requests + batch.num_gen_requests,
        batch.num_queued_context_requests + batch.num_queued_gen_requests,
        min(1.0, cache.used_num_blocks / cache.max_num_blocks) if cache.max_num_blocks > 0 else 0.0,
    )
