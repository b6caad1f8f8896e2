"""A cluster whose workers are real vLLM, watched from three sides: its clients, its log, and the engines themselves."""

import itertools
import json
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import unpack_u64
from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted
from forebay.events.kv import BlocksStored
from forebay.events.request_ids import client_id_of
from forebay.events.topics import DECISIONS, TOKENS
from forebay.transport.kafka.log import KafkaLog
from infra.kafka.kafka import HOST
from tests.harness.cluster import INGRESSES_MAX, PLAN, Cluster
from tests.harness.local import free_ports
from tests.integration import kafka_api

MODEL = "tiny"
BLOCK = 32  # tokens; vLLM on a CPU wants a multiple of 32
BLOCKS = 72  # of KV cache, one of which vLLM keeps for itself: a few long prompts fill it
CONTEXT_TOKENS = 1024
LORA_RANK_MAX = 8
LEASE_TTL_S = 5.0  # two cores may be busy for a second or two
TIMEOUT_S = 120.0
STARTED_WITHIN_S = 240.0  # two vLLM side by side on two cores
PORTS = 2  # of each worker: the replay of its KV events, its metrics
SERVER_PORTS = 4  # of each server: its API, its KV events, their replay, NIXL's side channel
SERVER_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
READ_MAX = 1_000
NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of a worker's metrics and of its engine's replay socket."""

    replay: int
    metrics: int


def ports_of(names: Iterable[str]) -> dict[str, Ports]:
    """Return free ports for each worker, after those of the ingresses."""
    workers = list(names)
    first = free_ports(INGRESSES_MAX + PORTS * len(workers)) + INGRESSES_MAX
    return {name: Ports(*range(first + PORTS * at, first + PORTS * (at + 1))) for at, name in enumerate(workers)}


def vllm_options(model: Path, ports: Ports, events: Path) -> list[str]:
    """Options of `forebay worker` for the tiny model, whose engine publishes its KV events at the socket `events`."""
    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": CONTEXT_TOKENS,
        "enable_lora": True,
        "max_lora_rank": LORA_RANK_MAX,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{events}",
            "replay_endpoint": f"tcp://{HOST}:{ports.replay}",
            "topic": "kv-events",
        },
    }
    options = {
        "engine": "vllm",
        "model": model,
        "model-name": MODEL,
        "block-size": BLOCK,
        "kv-blocks": BLOCKS,
        "max-num-seqs": 8,
        "max-num-batched-tokens": CONTEXT_TOKENS,
        "lease-ttl-s": LEASE_TTL_S,
        "metrics-port": ports.metrics,
        "engine-args": json.dumps(arguments),
    }
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


@dataclass(frozen=True, slots=True)
class VllmServer:
    """Addresses of a vLLM server that workers attach.

    Attributes:
        first_port: first of its `SERVER_PORTS` ports.
    """

    model_names: tuple[str, ...]
    first_port: int

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.first_port}"

    @property
    def ports(self) -> Ports:
        """Ports of its metrics, which the API serves, and of its replay socket."""
        return Ports(replay=self.first_port + 2, metrics=self.first_port)

    def command(self, model: Path, *options: str) -> list[str]:
        """Return the command that serves the model, with further options of `vllm serve`."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.first_port + 1}",
            "replay_endpoint": f"tcp://*:{self.first_port + 2}",
            "topic": "kv-events",
        }
        nixl = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.first_port + 3)}
        values: dict[str, Any] = {
            "model": model,
            "host": HOST,
            "port": self.first_port,
            "dtype": "float32",
            "max-model-len": CONTEXT_TOKENS,
            "block-size": BLOCK,
            "max-num-seqs": 8,
            "num-gpu-blocks-override": BLOCKS,
            "kv-events-config": json.dumps(events),
        }
        return [
            *("env", *(f"{name}={value}" for name, value in (SERVER_ENVIRONMENT | nixl).items())),
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"),
            *(text for name, value in values.items() for text in (f"--{name}", str(value))),
            *("--served-model-name", *self.model_names),
            *options,
        ]

    def upstream(self) -> list[str]:
        """Return the options of `forebay worker` that attach the server."""
        events = ",".join(f"tcp://{HOST}:{self.first_port + at}" for at in (1, 2))
        return ["--upstream", self.url, "--upstream-kv-events", events, "--lease-ttl-s", str(LEASE_TTL_S)]


@dataclass(slots=True)
class Answer:
    """What a client observed of one answer.

    Attributes:
        request_id: id that the client chose.
        served: forebay's own part of the last chunk: who answered in the end, after how many attempts.
        problem: an error in place of the answer or of its rest; empty for none.
    """

    request_id: str = field(default_factory=lambda: f"answer-{next(NUMBERS)}")
    status: int = 0
    worker: str = ""
    pieces: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    served: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had in its cache."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Serving:
    """Clients of the cluster's first ingress, readers of its log and of its workers' metrics."""

    def __init__(self, cluster: Cluster, log: KafkaLog, client: httpx.AsyncClient, ports: dict[str, Ports]) -> None:
        self.cluster = cluster
        self.ports = ports
        self._log = log
        self._client = client
        (self.url,) = cluster.urls.values()

    async def chat(self, messages: list[dict[str, str]], tokens: int, **body: Any) -> Answer:
        return await self.stream(Answer(), tokens, path="/v1/chat/completions", messages=messages, **body)

    async def complete(self, prompt: list[int], tokens: int, worker: str = "", **body: Any) -> Answer:
        """Stream a greedy completion of token ids, optionally on a given worker."""
        return await self.observe(Answer(), prompt, tokens, worker, **body)

    async def observe(self, answer: Answer, prompt: list[int], tokens: int, worker: str = "", **body: Any) -> Answer:
        """Stream a completion into a response that can be read meanwhile."""
        hints: dict[str, Any] = {"nvext": {"decode_worker_id": worker}} if worker else {}
        return await self.stream(answer, tokens, prompt=prompt, **hints, **body)

    async def until_begun(self, answer: Answer) -> None:
        """Wait until a client has received the first tokens."""
        await self.cluster.until("the answer has begun", lambda: answer.pieces)

    async def overlaps(self, prompt: list[int]) -> dict[str, int]:
        """Blocks of a prompt that each worker has on its device, for the router; nothing is booked."""
        reported = (await self.request("POST", "/v1/route", model=MODEL, prompt=prompt)).raise_for_status().json()
        return {one["worker_id"]: one["device_overlap"] for one in reported["candidates"]}

    async def request(self, method: str, path: str, **body: Any) -> httpx.Response:
        return await self._client.request(method, f"{self.url}{path}", json=body or None)

    async def generated(self, answer: Answer, group: str = MODEL) -> ResponseState:
        reply, name = ResponseState(), answer.served["request_id"]
        for slot in range(PLAN.replies):
            position, end = 0, await self._log.end(TOKENS.name, slot)
            while position < end:
                for record in await self._log.read(TOKENS.name, slot, position, READ_MAX):
                    position = record.offset + 1
                    event = decode(TOKENS, record.value)
                    for one in getattr(event, "chunks", (event,)):
                        if getattr(one, "request_id", "") == name:
                            reply.key = one.reply_key
                    apply({name: reply}, event, group)
        return reply

    async def tokens(self, answer: Answer, group: str = MODEL) -> list[int]:
        """Return the output tokens of a response from the log."""
        return (await self.generated(answer, group)).tokens

    async def stages(self, answer: Answer, group: str = MODEL) -> list[tuple[str, str]]:
        """Return stage and worker of each routing of a request."""
        decided = await self.cluster.events(DECISIONS, RequestRouted, group)
        return [(one.stage, one.worker_id) for one in decided if client_id_of(one.request_id) == answer.request_id]

    async def metric(self, worker: str, name: str) -> float:
        """Return a metric of a worker, summed over its labels. Raises KeyError if it is missing."""
        page = await self._client.get(f"http://{HOST}:{self.ports[worker].metrics}/metrics")
        samples = [
            sample.value
            for family in text_string_to_metric_families(page.raise_for_status().text)
            for sample in family.samples
            if sample.name == name
        ]
        if not samples:
            raise KeyError(name)
        return sum(samples)

    async def index(self) -> dict[str, set[int]]:
        """The sequence hashes that each worker has on its device, for the group's owner: `forebay index`.

        Workers that have nothing are left out.
        """
        where = [*self.cluster.where, "--group", MODEL]
        code, out = await self.cluster.command("index", "index", *where, within_s=TIMEOUT_S)
        assert code == 0, (self.cluster.processes.folder / "index.log").read_text()
        events = [msgspec.json.decode(line, type=BlocksStored) for line in out.splitlines()]
        assert {event.tier for event in events} <= {"device"}
        held: dict[str, set[int]] = {}
        for event in events:
            held.setdefault(event.worker_id, set()).update(unpack_u64(event.sequence_hashes))
        return held

    async def stream(self, answer: Answer, tokens: int, path: str = "/v1/completions", **body: Any) -> Answer:
        """Stream a greedy response of this many tokens, which can be read meanwhile."""
        requested = {
            "model": MODEL,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        headers = {"x-request-id": answer.request_id}
        async with self._client.stream("POST", f"{self.url}{path}", json=requested, headers=headers) as response:
            answer.status = response.status_code
            answer.worker = response.headers.get("x-forebay-worker", "")
            if response.status_code != httpx.codes.OK:
                answer.problem = (await response.aread()).decode()
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _note(answer, line.removeprefix("data: "))
        return answer


def _note(observed: Answer, data: str) -> None:
    chunk = msgspec.json.decode(data)
    if "error" in chunk:
        observed.problem = data
        return
    for choice in chunk["choices"]:
        piece = choice["text"] if "text" in choice else choice["delta"].get("content")
        if piece:
            observed.pieces.append(piece)
    observed.usage = chunk.get("usage") or observed.usage
    observed.served = chunk.get("forebay") or observed.served


def prompt_of(number: int, blocks: int = 6) -> list[int]:
    """Return a prompt of some blocks and five tokens; `number` selects the first block."""
    return [10 + number, *(100 + (place * (number + 3)) % 200 for place in range(blocks * BLOCK + 4))]


@asynccontextmanager
async def served(cluster: Cluster, log: KafkaLog, ports: dict[str, Ports]) -> AsyncIterator[Serving]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=cluster.admin_headers) as client:
        yield Serving(cluster, log, client, ports)


@asynccontextmanager
async def vllm_cluster(
    kafka: str,
    redis_url: str,
    namespace: str,
    folder: Path,
    model: Path,
    workers: Mapping[str, Sequence[str]],
    *ingress_options: str,
) -> AsyncIterator[Serving]:
    """Run a router, an ingress with the admin API, and vLLM workers with their options, all serving."""
    ports = ports_of(workers)
    async with Cluster(kafka, redis_url, namespace, folder) as cluster:
        for name, options in workers.items():
            cluster.worker(name, *options, *vllm_options(model, ports[name], folder / f"{name}.ipc"))
        cluster.router("r1")
        shared = ("--model", str(model), "--model-name", MODEL, "--block-size", str(BLOCK))
        cluster.ingress("i1", *shared, *ingress_options)
        await cluster.until_members(count=len(workers), group=MODEL, within_s=STARTED_WITHIN_S)
        await cluster.until_serving(len(workers), MODEL)
        async with kafka_api.opened(cluster.settings) as log, served(cluster, log, ports) as serving:
            yield serving
