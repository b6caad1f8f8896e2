"""Encode worker that runs vLLM with a tiny Qwen2.5-VL, for prefill and decode workers on Kafka, against vLLM alone.

The tests share one cluster and run in order; the last one kills the encode worker.
"""

import importlib.util
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from forebay.events.progress import EncodeFinished
from forebay.events.request_ids import client_id_of
from forebay.events.topics import PROGRESS
from tests.engines.serving import MODEL, STARTED_WITHIN_S, Answer, Serving, ports_of, served
from tests.engines.vllm_alone import STAND_INS, TOKENS, content, picture, vllm_alone
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS
from tests.harness.clips import clip
from tests.harness.cluster import Cluster
from tests.integration import kafka_api
from tests.integration.conftest import RUN

ROLES = {"e1": "encode", "p1": "prefill", "d1": "decode"}
WIDE, TALL, TURNED = picture(150, 40, 10), picture(60, 130, 80), picture(150, 40, 33, "JPEG", turn=6)
CHATS = [[TALL], [WIDE, TALL], [TURNED]]
HAS_AV = importlib.util.find_spec("av") is not None  # the ingress needs it to count the frames of videos
if HAS_AV:
    CLIP = clip(21, (50, 90), rate=1, bar=120)  # at another rate than most, on which the positions of tokens depend
    CHATS += [[CLIP], [WIDE, CLIP]]
    CHATS[2] += [clip(9, rate=1)]

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="vLLM's NixlConnector needs the package nixl"),
]


@dataclass
class Images:
    """A cluster, and the tokens of vLLM alone for each of `CHATS`."""

    serving: Serving
    expected: list[list[int]]

    async def ask(self, chat: int, policy: str) -> Answer:
        changed = await self.serving.request("POST", "/disaggregation", model=MODEL, policy=policy)
        assert changed.is_success, changed.text
        answer = await self.serving.chat([{"role": "user", "content": content(CHATS[chat])}], TOKENS)  # type: ignore[dict-item]
        assert (answer.status, answer.problem) == (200, "")
        assert await self.serving.tokens(answer) == self.expected[chat]
        return answer

    async def encoded(self, answer: Answer) -> Any:
        """Return the event of the encode worker for a response."""
        events = await self.serving.cluster.events(PROGRESS, EncodeFinished, MODEL)
        (event,) = [one for one in events if client_id_of(one.request_id) == answer.request_id]
        return event

    async def explained(self, answer: Answer) -> str:
        where = [*self.serving.cluster.where, "--group", MODEL]
        printed = await self.serving.cluster.printed("explain", "explain", *where, answer.request_id, within_s=60)
        return " ".join(printed.split())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def images(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Images]:
    from tests.harness.models import make_tiny_qwen2_vl  # noqa: PLC0415 - imports torch

    folder = tmp_path_factory.mktemp("vllm-encoder")
    model = folder / "qwen2.5-vl"
    make_tiny_qwen2_vl.write_model(model, "qwen2_5_vl")
    ports = ports_of(ROLES)
    named = ("--model", str(model), "--model-name", MODEL, "--block-size", str(BLOCK))
    arguments = json.dumps(ARGUMENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_INS), prepend=os.pathsep)
        patch.setenv("VLLM_CACHE_ROOT", str(folder))  # what it has about the model depends on the stand-ins
        expected = [one["tokens"] for one in vllm_alone(model, CHATS)]
        async with Cluster(kafka, redis_url, f"{RUN}-vllm-encoder", folder) as cluster:
            for name, role in ROLES.items():
                sizes = () if role == "encode" else ("--kv-blocks", str(KV_BLOCKS), "--max-num-seqs", "8")
                own: tuple[Any, ...] = ("--role", role, "--metrics-port", str(ports[name].metrics), *sizes)
                cluster.worker(name, "--engine", "vllm", *named, *own, "--engine-args", arguments)
            cluster.router("r1")
            cluster.ingress("i1", *named)
            await cluster.until_members(count=len(ROLES), group=MODEL, within_s=STARTED_WITHIN_S)
            await cluster.until_serving(len(ROLES), MODEL)
            async with kafka_api.opened(cluster.settings) as log, served(cluster, log, ports) as serving:
                yield Images(serving, expected)


async def test_prefill_worker_uses_embeddings_of_the_encode_worker(images: Images) -> None:
    answer = await images.ask(0, "always")
    assert await images.serving.stages(answer) == [("encode", "e1"), ("prefill", "p1"), ("decode", "d1")]
    done = await images.encoded(answer)
    assert (done.worker_id, done.encoded.shape[1], done.encoded.dtype, done.cached) == ("e1", 64, "float32", 0)
    assert b"image_grid_thw" in done.encoded.metadata


async def test_repeated_image_is_encoded_once(images: Images) -> None:
    answer = await images.ask(1, "never")
    assert await images.serving.stages(answer) == [("encode", "e1"), ("aggregated", "d1")]
    assert (await images.encoded(answer)).cached == 1
    cache = "forebay_embedding_cache"

    async def counted() -> list[float]:  # the worker reads the metrics of its engine every two seconds
        return [await images.serving.metric("e1", f"{cache}_{name}_total") for name in ("hits", "misses")]

    await images.serving.cluster.until("the cache is counted", counted, lambda found: found == [1, 2])
    assert "the embeddings of 1 were in its cache" in await images.explained(answer)


@pytest.mark.skipif(not HAS_AV, reason="the ingress needs PyAV")
async def test_repeated_video_is_encoded_once(images: Images) -> None:
    answer = await images.ask(3, "always")
    assert await images.serving.stages(answer) == [("encode", "e1"), ("prefill", "p1"), ("decode", "d1")]
    done = await images.encoded(answer)
    assert done.cached == 0 and b'"second_per_grid_ts":2.' in done.encoded.metadata
    answer = await images.ask(4, "never")
    assert (await images.encoded(answer)).cached == 2
    assert "the embeddings of 2 were in its cache" in await images.explained(answer)


async def test_serving_worker_encodes_itself_after_the_encode_worker_is_killed(images: Images) -> None:
    images.serving.cluster.kill("e1")
    answer = await images.ask(2, "never")
    assert await images.serving.stages(answer) == [("encode", "e1"), ("aggregated", "d1")]
    explained = await images.explained(answer)
    assert "encode sent to e1" in explained and "its worker e1 is lost" in explained and "routed to d1" in explained
    await images.serving.cluster.require_verified(MODEL)
