"""Responses name the worker that generated them, and the prefill worker if it is another one."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from forebay.events.tokens import PrefilledBy
from tests.ingress.conftest import NAME, Scene

PREFILLED = PrefilledBy(worker_id="p1", rank=2, transferred_bytes=4_096, transfer_us=1_500)
PREFILL = {"worker": "p1", "rank": 2, "transferred_bytes": 4_096, "transfer_ms": 1.5}


def start_request(scene: Scene, **changes: Any) -> "asyncio.Task[httpx.Response]":
    body = {"model": NAME, "prompt": "Once", "max_tokens": 9, "nvext": {"extra_fields": ["worker_id"]}, **changes}
    return asyncio.create_task(scene.client.post("/v1/completions", json=body))


def last_of(response: httpx.Response, *, stream: bool) -> dict[str, Any]:
    if not stream:
        whole: dict[str, Any] = response.json()
        return whole
    chunks = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    objects = [json.loads(chunk) for chunk in chunks[:-1]]
    (last,) = [chunk for chunk in objects if "forebay" in chunk]
    found: dict[str, Any] = last
    return found


def names(prefill: str, prefill_rank: int, decode: str) -> dict[str, Any]:
    return {
        "prefill_worker_id": prefill, "prefill_dp_rank": prefill_rank, "decode_worker_id": decode, "decode_dp_rank": 0
    }  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
async def test_disagg_responses_name_both_workers_and_the_transfer(scene: Scene, *, stream: bool) -> None:
    pending = start_request(scene, stream=stream)
    name = (await scene.next_request()).request_id
    at = scene.emit(name, scene.model.encode("Once upon"), prefilled=PREFILLED)
    scene.end(name, output=scene.emit_text(name, " a time", first=at))
    last = last_of(await pending, stream=stream)
    assert last["forebay"] == {"request_id": name, "worker": "w1", "rank": 0, "attempts": 1, "prefill": PREFILL}
    assert last["nvext"] == {"worker_id": names("p1", 2, "w1")}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_aggregated_worker_is_named_for_both_stages(scene: Scene, *, stream: bool) -> None:
    pending = start_request(scene, stream=stream)
    name = (await scene.next_request()).request_id
    scene.end(name, output=scene.emit_text(name, "Once"))
    last = last_of(await pending, stream=stream)
    assert last["nvext"] == {"worker_id": names("w1", 0, "w1")}
    assert "prefill" not in last["forebay"]


async def test_disagg_responses_ended_by_a_stop_string_name_both_workers(scene: Scene) -> None:
    pending = start_request(scene, stop=["upon"])
    name = (await scene.next_request()).request_id
    scene.emit(name, scene.model.encode("Once upon a time"), prefilled=PREFILLED)
    body = (await pending).json()
    assert body["nvext"] == {"worker_id": names("p1", 2, "w1")}


async def test_disagg_a_later_attempt_keeps_the_first_prefill_worker(scene: Scene) -> None:
    pending = start_request(scene)
    name = (await scene.next_request()).request_id
    at = scene.emit(name, scene.model.encode("Once"), prefilled=PREFILLED)
    scene.start_attempt(name, 2)
    scene.emit(name, [9], first=at, prefilled=PrefilledBy(worker_id="void"))
    at = scene.emit_text(name, " upon", first=at, attempt=2, worker="w2")
    scene.end(name, output=at, attempt=2)
    body = (await pending).json()
    assert body["nvext"] == {"worker_id": names("p1", 2, "w2")}
    assert (body["forebay"]["attempts"], body["forebay"]["prefill"]) == (2, PREFILL)


async def test_disagg_an_attempt_without_output_does_not_name_its_prefill_worker(scene: Scene) -> None:
    pending = start_request(scene)
    name = (await scene.next_request()).request_id
    scene.start_attempt(name, 2)
    scene.emit(name, scene.model.encode("Never"), prefilled=PrefilledBy(worker_id="p0"))
    at = scene.emit(name, scene.model.encode("Once"), attempt=2, prefilled=PREFILLED)
    scene.end(name, output=at, attempt=2)
    assert (await pending).json()["forebay"]["prefill"] == PREFILL
