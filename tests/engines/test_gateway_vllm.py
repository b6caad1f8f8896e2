"""Two `vllm serve` behind a real Envoy: a picker selects the server of each request, and Envoy sends it there.

The tests share one system and run in order: the first ones need empty caches, and the last ones kill a server. An
ingress runs only in a measurement: FOREBAY_TRACE_ROWS=500 compares the reuse of a trace through both.
"""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.base import U64_BYTES, unpack_u64
from forebay.events.decisions import RequestAborted
from forebay.events.kv import BlocksStored
from forebay.events.progress import RequestFailed, RequestFinished
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.topics import DECISIONS, KV_EVENTS, PROGRESS, REQUESTS
from forebay.replay.explain.explain import explain_among
from forebay.replay.explain.explanation import Explanation
from tests.engines.serving import (
    BLOCK,
    MODEL,
    SERVER_PORTS,
    STARTED_WITHIN_S,
    TIMEOUT_S,
    VllmServer,
)
from tests.harness.cluster import Cluster
from tests.harness.demo_kafka import SEED as TRACE_SEED
from tests.harness.demo_kafka import write_trace
from tests.harness.envoy import PICKER, envoy_binary, start_gateway
from tests.harness.local import free_ports
from tests.integration.conftest import RUN, available_or_skipped

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOKENS = 12
LONG = 1_500  # tokens of a response that outlasts what is done to its client or its server
STREAMS = 8
SERVERS = 2
KV_BLOCKS = 32_768  # so that nothing is evicted
TRACE_ROWS = int(os.environ.get("FOREBAY_TRACE_ROWS", "0"))
TRACE_BLOCK, TRACE_BLOCKS = 512, 3  # tokens of a block of the trace, and blocks of a prompt at most
TRACE_CONTEXT, TRACE_TOKENS, CLIENTS = 2048, 8, 4
REUSE_DIFFERENCE = 0.02
SHARED = [f"{start} " + "the quick brown fox jumps over the lazy dog. " * 20 for start in ("hello", "def")]
QUESTIONS = "tell me a story", "what is a cache of blocks?", "return x"
STREAM: dict[str, Any] = {"stream": True}
WITH_USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
FORMS: dict[str, dict[str, Any]] = {"document": {}, "stream": STREAM, "stream-with-usage": WITH_USAGE}

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(TIMEOUT_S + STARTED_WITHIN_S),  # both vLLM start in the first test
]


@dataclass(slots=True)
class Reply:
    """An answer as its client got it.

    Attributes:
        events: parsed events of a stream, or the one document.
        is_complete: whether the answer has its end.
        error: body of an answer with another status than 200.
    """

    status: int = 0
    error: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        choices = [one for event in self.events for one in event.get("choices", ())]
        parts = (one.get("delta") or one.get("message") or {"content": one.get("text")} for one in choices)
        return "".join(one.get("content") or "" for one in parts)

    @property
    def finish_reasons(self) -> list[str]:
        choices = [one for event in self.events for one in event.get("choices", ())]
        return [one["finish_reason"] for one in choices if one.get("finish_reason")]

    @property
    def usages(self) -> list[dict[str, Any]]:
        return [event["usage"] for event in self.events if event.get("usage")]

    @property
    def usage_events(self) -> int:
        """Number of events that have token counts and nothing else."""
        return sum(not event.get("choices") for event in self.events)

    @property
    def cached_tokens(self) -> int:
        details = self.usages[-1]["prompt_tokens_details"] or {"cached_tokens": 0}
        return int(details["cached_tokens"])


@dataclass(frozen=True, slots=True)
class System:
    """The servers by the name of their worker, and a client of Envoy."""

    cluster: Cluster
    url: str
    servers: dict[str, VllmServer]
    client: httpx.AsyncClient

    async def send(self, name: str, path: str, body: dict[str, Any], url: str = "", into: Reply | None = None) -> Reply:
        """Send a greedy request with this id to Envoy, or to `url`, and return its answer, even if that is cut.

        Args:
            into: answer that can be read meanwhile.
        """
        reply = Reply() if into is None else into
        given = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **body}
        headers = {"x-request-id": name}
        try:
            async with self.client.stream("POST", f"{url or self.url}{path}", json=given, headers=headers) as response:
                reply.status = response.status_code
                if response.status_code != httpx.codes.OK:
                    reply.error = (await response.aread()).decode()
                    return reply
                if not body.get("stream"):
                    reply.events.append(json.loads(await response.aread()))
                    reply.is_complete = True
                    return reply
                rest = b""
                async for part in response.aiter_bytes():  # `aiter_lines` also ends lines at characters of the text
                    *lines, rest = (rest + part).split(b"\n")
                    for data in (one[6:] for one in lines if one.startswith(b"data: ")):
                        if data == b"[DONE]":
                            reply.is_complete = True
                        else:
                            reply.events.append(json.loads(data))
        except httpx.TransportError:
            reply.is_complete = False
        return reply

    async def submitted(self, name: str) -> RequestSubmitted:
        found: RequestSubmitted
        (found,) = _of(name, await self.cluster.events(REQUESTS, RequestSubmitted, MODEL))
        return found

    async def finished(self, name: str) -> RequestFinished:
        """Wait until the request with this id has ended in the books, and return its end."""

        async def ends() -> list[Any]:
            return _of(name, await self.cluster.events(PROGRESS, RequestFinished, MODEL))

        found: RequestFinished
        (found,) = await self.cluster.until(f"{name} has ended in the books", ends)
        return found

    async def until_cached(self, name: str) -> str:
        """Wait until a request has ended and its worker has announced the prompt; return the worker."""
        worker = (await self.finished(name)).worker_id
        prompt = set(unpack_u64((await self.submitted(name)).sequence_hashes))

        async def announced() -> bool:
            stored = [
                one for one in await self.cluster.events(KV_EVENTS, BlocksStored, MODEL) if one.worker_id == worker
            ]
            return prompt <= {found for one in stored for found in unpack_u64(one.sequence_hashes)}

        await self.cluster.until(f"{worker} has announced the prompt of {name}", announced)
        return worker

    async def explain(self, name: str) -> Explanation:
        """Explain a request that was routed, in this process."""
        found = await explain_among(self.cluster.log, [self.cluster.partition(MODEL)], name)
        assert found.divergence is None
        assert found.routings
        return found

    async def worker(self, name: str) -> str:
        """Return the last worker to which a request was routed."""
        last = (await self.explain(name)).routings[-1]
        return last.candidates[last.winner].seen.worker_id

    async def running(self, worker: str) -> float:
        """Return the number of requests that a server runs."""
        page = (await self.client.get(f"{self.servers[worker].url}/metrics")).raise_for_status().text
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def _of(name: str, events: list[Any]) -> list[Any]:
    return [one for one in events if client_id_of(one.request_id) == name]


def _counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def chat(shared: str, question: str, **body: Any) -> tuple[str, dict[str, Any]]:
    """Return path and body of a chat that begins with a shared text."""
    messages = [{"role": "system", "content": shared}, {"role": "user", "content": question}]
    return CHAT, {"messages": messages, **body}


@contextmanager
def envoy() -> Any:
    yield envoy_binary()


@pytest.fixture(scope="module")
def _envoy() -> Any:
    with available_or_skipped(envoy()):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(
    _envoy: None, kafka: str, redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    folder = tmp_path_factory.mktemp("vllm-gateway")
    first = free_ports(SERVERS * SERVER_PORTS)
    servers = [VllmServer((MODEL,), first + at * SERVER_PORTS) for at in range(SERVERS)]
    named = {server.url.removeprefix("http://").replace(":", "-"): server for server in servers}
    async with Cluster(kafka, redis_url, f"{RUN}-vllm-gateway", folder) as cluster:
        options = ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(KV_BLOCKS)]
        options += ["--max-model-len", str(TRACE_CONTEXT)]
        for name, server in named.items():
            cluster.processes.start(name, server.command(model, *options))
        cluster.router("r1")
        upstreams = [option for server in servers for option in server.upstream()]
        cluster.processes.start("workers", [*cluster.command_of("worker"), *upstreams])
        await cluster.until_members(*named, group=MODEL, within_s=STARTED_WITHIN_S)
        url, _ = await start_gateway(cluster, [server.first_port for server in servers])
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            yield System(cluster, url, named, client)


async def test_a_shared_prefix_goes_to_the_server_that_has_it(system: System) -> None:
    homes = []
    for number, shared in enumerate(SHARED):
        cold = await system.send(f"cold-{number}", *chat(shared, "hello"))
        assert (cold.status, cold.cached_tokens) == (httpx.codes.OK, 0)
        homes.append(await system.until_cached(f"cold-{number}"))
        blocks = len((await system.submitted(f"cold-{number}")).sequence_hashes) // U64_BYTES
        for (form, body), question in zip(FORMS.items(), QUESTIONS, strict=True):
            name = f"warm-{number}-{form}"
            warm = await system.send(name, *chat(shared, question, **body))
            ended = await system.finished(name)
            assert (warm.status, ended.worker_id) == (httpx.codes.OK, homes[-1])
            assert ended.cached_tokens == blocks * BLOCK
            if warm.usages:
                assert warm.cached_tokens == ended.cached_tokens
            explained = await system.explain(name)
            (routing,) = explained.routings
            overlaps = {one.seen.worker_id: one.seen.device_overlap for one in routing.candidates}
            assert overlaps == {worker: blocks if worker == homes[-1] else 0 for worker in system.servers}
    assert set(homes) == set(system.servers), "each server has one of the prefixes"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_answer_is_that_of_the_server(system: System, path: str, form: str) -> None:
    name = f"equal-{'chat' if path == CHAT else 'text'}-{form}"
    prompts: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": SHARED[0]}]},
        TEXT: {"prompt": SHARED[1]},
    }
    body = {**prompts[path], **FORMS[form]}
    answer = await system.send(name, path, body)
    ended, submitted = await system.finished(name), await system.submitted(name)
    assert (await system.explain(name)).state == "finished"
    server = system.servers[ended.worker_id]
    direct = await system.send(name, path, body, server.url)
    counted = (
        direct if direct.usages else await system.send(name, path, {**body, **FORMS["stream-with-usage"]}, server.url)
    )
    assert (answer.status, answer.is_complete, answer.finish_reasons) == (httpx.codes.OK, True, ["length"])
    assert (answer.text, answer.usage_events) == (direct.text, direct.usage_events)
    assert answer.text
    assert [_counts(one) for one in answer.usages] == [_counts(one) for one in direct.usages]
    for usage in answer.usages:
        assert usage["prompt_tokens_details"]["cached_tokens"] == ended.cached_tokens
    (counts,) = map(_counts, counted.usages)
    assert counts == (submitted.prompt_tokens, ended.output_tokens, submitted.prompt_tokens + ended.output_tokens)


async def test_requests_of_many_clients_at_once_all_end(system: System) -> None:
    requests = {
        f"many-{number}": chat(SHARED[number % 2], QUESTIONS[number % 3] * (1 + number // 6), **body)
        for number, body in enumerate([*FORMS.values()] * 6)
    }
    answers = await asyncio.gather(*(system.send(name, *one) for name, one in requests.items()))
    for (name, one), answer in zip(requests.items(), answers, strict=True):
        assert (answer.status, answer.is_complete) == (httpx.codes.OK, True), name
        ended = await system.finished(name)
        assert ended.output_tokens == TOKENS
        direct = await system.send(name, *one, system.servers[ended.worker_id].url)
        assert answer.text == direct.text, name


def conversations(folder: Path, salt: int) -> list[list[list[int]]]:
    """Return the shortened prompts of the synthetic trace by conversation. Another `salt` gives other token ids."""
    write_trace(folder / "trace.jsonl", TRACE_SEED)
    found: dict[int, list[list[int]]] = {}
    for line in (folder / "trace.jsonl").read_text().splitlines()[:TRACE_ROWS]:
        row = json.loads(line)
        tokens: list[int] = []
        for block in row["hash_ids"][:TRACE_BLOCKS]:
            tokens += random.Random(f"{salt} {block}").choices(range(10, 360), k=TRACE_BLOCK)
        found.setdefault(row["hash_ids"][0], []).append(tokens[: row["input_length"]])
    return list(found.values())


async def reuse(system: System, run: str, waiting: list[list[list[int]]], url: str) -> float:
    """Hold the conversations, a few at once; return the share of the prompt tokens that vLLM had in its caches."""
    cached = total = 0

    async def client() -> None:
        nonlocal cached, total
        while waiting:
            for prompt in waiting.pop(0):
                name = f"{run}-{total}"
                total += len(prompt)
                body = {"prompt": prompt, "max_tokens": TRACE_TOKENS, **WITH_USAGE}
                answer = await system.send(name, TEXT, body, url)
                assert (answer.status, answer.is_complete) == (httpx.codes.OK, True), answer.error
                assert answer.usages[-1]["prompt_tokens"] == len(prompt)
                cached += answer.cached_tokens

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return cached / total


@pytest.mark.timeout(1_200)
@pytest.mark.skipif(not TRACE_ROWS, reason="a measurement of minutes; FOREBAY_TRACE_ROWS=500 runs it")
async def test_a_trace_reuses_as_much_through_envoy_as_through_the_ingress(system: System, tmp_path: Path) -> None:
    ingress = system.cluster.ingress("i1")
    await system.cluster.until_serving(SERVERS, MODEL)
    own = await reuse(system, "own", conversations(tmp_path, 1), ingress)
    gateway = await reuse(system, "trace", conversations(tmp_path, 2), system.url)
    print(f"{TRACE_ROWS} requests: reuse {gateway:.3f} through Envoy, {own:.3f} through the ingress")
    assert abs(own - gateway) <= REUSE_DIFFERENCE
    assert own > 0
    names = [one.request_id for one in await system.cluster.events(REQUESTS, RequestSubmitted, MODEL)]
    traced = [one for one in map(client_id_of, names) if one.startswith("trace-")]
    assert len(traced) == TRACE_ROWS
    for name in traced[::20]:
        assert (await system.explain(name)).state == "finished"


async def test_a_client_that_disconnects_ends_in_the_books(system: System) -> None:
    answer = Reply()
    path, body = chat(SHARED[0], "disconnect", max_tokens=LONG, **STREAM)
    receiving = asyncio.create_task(system.send("gone", path, body, into=answer))
    await system.cluster.until("the answer has begun", lambda: answer.text)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)

    async def ends() -> list[Any]:
        return _of("gone", await system.cluster.events(REQUESTS, RequestCancelled, MODEL))

    await system.cluster.until("the request is cancelled in the books", ends)
    for worker in system.servers:
        await system.cluster.until(f"{worker} runs no request", partial(system.running, worker), partial(eq, 0))
    assert not _of("gone", await system.cluster.events(PROGRESS, RequestFinished, MODEL))


async def test_after_the_loss_of_a_server_the_other_one_answers(system: System) -> None:
    victim = (await system.finished("cold-0")).worker_id
    (other,) = set(system.servers) - {victim}
    requests = {
        f"lost-{number}": chat(SHARED[number % 2], f"stream {number}", max_tokens=LONG, **STREAM)
        for number in range(STREAMS)
    }
    answers = {name: Reply() for name in requests}
    sent = [asyncio.create_task(system.send(name, *one, into=answers[name])) for name, one in requests.items()]
    await system.cluster.until("all streams have begun", lambda: all(one.text for one in answers.values()))
    assert not any(task.done() for task in sent), "a stream has ended too early"
    system.cluster.processes.kill(victim)
    later = [
        await system.send(f"later-{at}", *chat(SHARED[0], "and now", **body)) for at, body in enumerate(FORMS.values())
    ]
    await asyncio.gather(*sent)
    await system.cluster.until_members(other, group=MODEL)
    later += [
        await system.send(f"last-{at}", *chat(SHARED[0], "then", **body)) for at, body in enumerate(FORMS.values())
    ]
    assert [(one.status, one.is_complete, one.error) for one in later] == [(httpx.codes.OK, True, "")] * len(later)
    for at in range(len(FORMS)):
        assert (await system.finished(f"last-{at}")).worker_id == other
        # If the owner notices the loss before the other server responds, it ends the books of the request.
        ends = _of(f"later-{at}", await system.cluster.events(PROGRESS, RequestFinished, MODEL))
        assert {one.worker_id for one in ends} <= {other}
    cut = {name for name in requests if await system.worker(name) == victim}
    assert cut
    for name, answer in answers.items():
        assert answer.is_complete == (name not in cut), name
        if name not in cut:
            assert (await system.finished(name)).output_tokens == LONG


async def test_every_request_has_ended_and_every_decision_verifies(system: System) -> None:
    names = [one.request_id for one in await system.cluster.events(REQUESTS, RequestSubmitted, MODEL)]

    async def open_ones() -> list[str]:
        ended = {
            one.request_id for one in await system.cluster.events(PROGRESS, RequestFinished | RequestFailed, MODEL)
        }
        ended |= {one.request_id for one in await system.cluster.events(REQUESTS, RequestCancelled, MODEL)}
        ended |= {one.request_id for one in await system.cluster.events(DECISIONS, RequestAborted, MODEL)}
        return [name for name in names if name not in ended]

    await system.cluster.until("every request has ended in the books", open_ones, lambda found: not found)
    report = await system.cluster.explain("gone", MODEL)
    assert report["state"] == "aborted"
    await system.cluster.require_verified(MODEL)
    assert not {PICKER, "r1", "workers"} & {*system.cluster.processes.tracebacks()}
