"""`make demo-models`: servers that already run, two models under load, and an ingress with 50 models.

1. Prefill and decode on two attached servers: each response equals that of a worker that does both.
2. Two models with default pools under load, and an alias that is moved from one to the other: no error, and no work
   item reaches a worker of the other model.
3. An ingress with 50 models, each with a tokenizer of its own: memory, and TTFT of the first and second request.

The servers are stand-ins for vLLM, and all workers are mock workers. Exits 1 unless the first two hold and the third
gets all its responses. Kafka and Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL).
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from forebay.ingress.model import DEFAULT_MODEL
from forebay.transport.kafka.topics import TopicPlan
from tests.harness.cluster import GROUP, Cluster, remove_topics
from tests.harness.demos import demo
from tests.harness.local import free_ports
from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import ServerSettings
from tests.integration.stream_clients import BLOCK, StreamClients, StreamResult, prompt

OTHER, SPLIT, ALIAS = "other-model", "split-model", "prod"
TOKENS = 24
PROMPTS = 30
LOAD_S = 8.0  # before and after the alias is moved
EVERY_S = 0.05
TIMEOUT_S = 120.0
MISDIRECTED = ("other_group", "other_worker")  # reasons for which a worker skips a work item


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"demo-models: {text}", flush=True)


@dataclass
class Result:
    """Result of the demo.

    Attributes:
        problems: what did not hold.
    """

    problems: list[str] = field(default_factory=list)

    def require(self, *, holds: bool, problem: str) -> None:
        """Add a problem unless a requirement holds."""
        if not holds:
            self.problems.append(problem)
            report(f"FAILED: {problem}")

    def line(self) -> str:
        return f"FAILED: {'; '.join(self.problems)}" if self.problems else "everything holds"


async def split(kafka: str, redis_url: str, folder: Path, result: Result) -> None:
    """Compute prompts on one attached server, and generate the responses on another."""
    settings = ServerSettings(block_size=BLOCK, model_name=SPLIT, kv_events=True, kv_transfer=True)
    plan = TopicPlan(groups=2, slots=8, replies=1, kafka_api=1)
    async with (
        OpenAiServer(settings) as prefill,
        OpenAiServer(settings) as decode,
        Cluster(kafka, redis_url, f"demo-split-{uuid.uuid4().hex[:8]}", folder, plan) as cluster,
        httpx.AsyncClient(timeout=TIMEOUT_S) as http,
    ):
        cluster.router("split-router")
        url = cluster.ingress("split-ingress")
        cluster.worker("prefill", "--upstream", prefill.url, "--role", "prefill")
        cluster.worker("decode", "--upstream", decode.url, "--role", "decode")
        cluster.worker("whole", "--speedup", "1000")
        await cluster.until_serving(1)
        await cluster.until_serving(2, SPLIT)
        clients = StreamClients(http, [url], "split")
        prompts = [prompt(number) for number in range(PROMPTS)]
        whole = await clients.answers(prompts, TOKENS)
        apart = [clients.submit(one, TOKENS, SPLIT) for one in prompts]
        await clients.all()
        equal = sum(one.text == other.text != "" for one, other in zip(whole, apart, strict=True))
        fetched = prefill.counters.kv_fetched
        report(f"prefill and decode on two servers: {equal} of {PROMPTS} responses equal, {fetched} prompts fetched")
        result.require(holds=equal == PROMPTS, problem=f"{PROMPTS - equal} responses differ")
        result.require(holds=fetched == PROMPTS, problem=f"only {fetched} of {PROMPTS} prompts were fetched")
        await verify(cluster, (GROUP, SPLIT), result)
    await remove_topics(kafka, cluster.namespace)


async def two_models(kafka: str, redis_url: str, folder: Path, result: Result) -> None:
    """Load two models and an alias, and move the alias."""
    plan = TopicPlan(groups=2, slots=8, replies=2, kafka_api=1)
    names = {GROUP: ("a1", "a2"), OTHER: ("b1", "b2")}
    first = free_ports(4)
    metrics = {name: first + at for at, name in enumerate(sum(names.values(), ()))}
    async with (
        Cluster(kafka, redis_url, f"demo-models-{uuid.uuid4().hex[:8]}", folder, plan) as cluster,
        httpx.AsyncClient(timeout=TIMEOUT_S) as http,
    ):
        cluster.router("router")
        url = cluster.ingress("ingress")
        for model, workers in names.items():
            for name in workers:
                options = ("--model-name", model) if model != GROUP else ()
                cluster.worker(name, "--speedup", "20", "--metrics-port", str(metrics[name]), *options)
        for model, workers in names.items():
            await cluster.until_serving(len(workers), model)
        await alias(cluster, GROUP)
        await cluster.processes.until("the alias is listed", partial(_is_listed, http, url, ALIAS))
        clients = StreamClients(http, [url], "models")
        before = await load(clients)
        await alias(cluster, OTHER)
        during = await load(clients)
        await clients.all()
        wrong = {one.request_id: one.problem for one in clients.results if one.problem or one.ends != 1}
        result.require(holds=not wrong, problem=f"{len(wrong)} responses failed: {dict(list(wrong.items())[:2])}")
        strays = [
            one
            for results in (before, during)
            for model, sent in results.items()
            if model != ALIAS
            for one in sent
            if one.served and one.worker not in names[model]
        ]
        result.require(holds=not strays, problem=f"{len(strays)} responses are from workers of the other model")
        skipped = {name: await misdirected(http, port) for name, port in metrics.items()}
        result.require(holds=not any(skipped.values()), problem=f"work items reached wrong workers: {skipped}")
        moved = during[ALIAS][-5:]
        result.require(
            holds=all(one.served and one.worker in names[OTHER] for one in moved), problem="the alias was not moved"
        )
        report(
            f"two models: {len(clients.results)} streams without an error, {sum(skipped.values())} work items at a"
            f" wrong worker; the alias moved from {GROUP} to {OTHER}"
        )
        await verify(cluster, names, result)
    await remove_topics(kafka, cluster.namespace)


async def load(clients: StreamClients) -> dict[str, list[StreamResult]]:
    """Send streams to both models and the alias for `LOAD_S` seconds, and return their results by model."""
    sent: dict[str, list[StreamResult]] = {GROUP: [], OTHER: [], ALIAS: []}
    ends_s, number = time.monotonic() + LOAD_S, 0
    while time.monotonic() < ends_s:
        model = (GROUP, OTHER, ALIAS)[number % 3]
        sent[model].append(clients.submit(prompt(number % 40), TOKENS, model))
        number += 1
        await asyncio.sleep(EVERY_S)
    return sent


async def alias(cluster: Cluster, model: str) -> None:
    where = ["--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace]
    code, _ = await cluster.command("alias", "model", "alias", ALIAS, model, *where, within_s=TIMEOUT_S)
    assert code == 0, "the alias was not stored"


async def misdirected(http: httpx.AsyncClient, port: int) -> int:
    """Return how many work items a worker skipped because they were for another group or worker."""
    text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(
        int(sample.value)
        for sample in samples
        if sample.name == "forebay_worker_items_skipped_total" and sample.labels["reason"] in MISDIRECTED
    )


async def many(kafka: str, redis_url: str, folder: Path, result: Result, models: int, vocabulary: int) -> None:
    """Send two requests to each of many models behind one ingress. Each model has one attached server."""
    plan = TopicPlan(groups=models, slots=models, replies=1, kafka_api=1)
    names = [f"model-{number:02}" for number in range(models)]
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            Cluster(kafka, redis_url, f"demo-many-{uuid.uuid4().hex[:8]}", folder, plan)
        )
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S))
        servers = []
        for number, name in enumerate(names):
            directory = write_model(folder / name, vocabulary, number)
            server = OpenAiServer(ServerSettings(model=directory, model_name=name, block_size=BLOCK))
            servers.append(await stack.enter_async_context(server))
        cluster.router("many-router")
        url = cluster.ingress("many-ingress")
        await cluster.processes.until("the ingress responds", partial(_responds, http, url))
        empty = resident_mib(cluster, "many-ingress")
        options = [option for server in servers for option in ("--upstream", server.url)]
        cluster.processes.start("many-workers", [*cluster.command_of("worker"), *options])
        for name in names:
            await cluster.processes.until(f"{name} is listed", partial(_is_listed, http, url, name), within_s=TIMEOUT_S)
        listed = resident_mib(cluster, "many-ingress")
        first = [await ttft_ms(http, url, name) for name in names]
        loaded = resident_mib(cluster, "many-ingress")
        second = [await ttft_ms(http, url, name) for name in names]
        result.require(holds=all(first) and all(second), problem="a model did not answer")
        report(
            f"{models} models with {vocabulary} tokens each: the ingress takes {empty} MiB, with all models listed"
            f" {listed}, with all loaded {loaded}; TTFT of the first request {spread(first)}, of the second"
            f" {spread(second)}"
        )
    await remove_topics(kafka, cluster.namespace)


def write_model(directory: Path, vocabulary: int, number: int) -> Path:
    """Write a model directory whose tokenizer has further tokens that no text contains, and return it."""
    directory.mkdir()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        source = DEFAULT_MODEL / name
        if source.is_file():
            (directory / name).write_bytes(source.read_bytes())
    tokenizer: dict[str, Any] = json.loads((DEFAULT_MODEL / "tokenizer.json").read_text())
    known: dict[str, int] = tokenizer["model"]["vocab"]
    begin = 1 + max(*known.values(), *(one["id"] for one in tokenizer["added_tokens"]))
    known |= {f"unused{number:02}token{at:06}": at for at in range(begin, vocabulary)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def resident_mib(cluster: Cluster, name: str) -> int:
    status = Path(f"/proc/{cluster.processes[name].process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) >> 10


async def ttft_ms(http: httpx.AsyncClient, url: str, model: str) -> float:
    """Return the milliseconds until the first chunk of a stream; 0 if it failed."""
    body = {"model": model, "prompt": "what is on the log?", "max_tokens": 2, "stream": True}
    began_s = time.perf_counter()
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and '"error"' not in line:
                return (time.perf_counter() - began_s) * 1e3
    return 0.0


def spread(values: Sequence[float]) -> str:
    """Return median and maximum in milliseconds."""
    return f"p50 {statistics.median(values):.1f} ms, max {max(values):.1f} ms"


async def verify(cluster: Cluster, groups: Sequence[str] | dict[str, Any], result: Result) -> None:
    """Derive all decisions of some groups again."""
    for group in groups:
        found = await cluster.verify(group)
        verified, decisions = found["verified"], found["decisions"]
        report(f"{group}: {verified} of {decisions} decisions verified")
        result.require(holds=verified == decisions > 0, problem=f"{group}: {found['divergence']}")


async def _is_listed(http: httpx.AsyncClient, url: str, name: str) -> bool:
    if not await _responds(http, url):
        return False
    return any(one["id"] == name for one in (await http.get(f"{url}/v1/models")).json()["data"])


async def _responds(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/v1/models")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def main() -> int:
    """Run the demo and return its exit code."""
    parser = argparse.ArgumentParser("make demo-models", description=__doc__)
    parser.add_argument("--models", type=int, default=50, help="models of the third part")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens of each of these models' tokenizers")
    given = parser.parse_args()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # of the stand-ins: it reports each stop

    async def run(kafka: str, redis_url: str, folder: Path, _: bool) -> Result:
        result = Result()
        await split(kafka, redis_url, folder, result)
        await two_models(kafka, redis_url, folder, result)
        await many(kafka, redis_url, folder, result, given.models, given.vocabulary)
        return result

    return demo(report, run)


if __name__ == "__main__":
    sys.exit(main())
