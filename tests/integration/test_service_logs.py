"""Logs of services on Kafka: a healthy start logs no error, and a worker logs its own life cycle."""

from pathlib import Path

import httpx

from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster


async def test_a_healthy_start_and_stop_log_no_error_and_each_event_once(
    kafka: str, redis_url: str, tmp_path: Path, namespace: str
) -> None:
    async with Cluster(kafka, redis_url, namespace, tmp_path, spawn=fork_server.spawn) as cluster:
        cluster.router("r1")
        cluster.worker("w1")
        url = cluster.ingress("i1")
        await cluster.until_serving(1)
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": GROUP, "prompt": "a secret prompt", "max_tokens": 3}
            (await client.post(f"{url}/v1/completions", json=body)).raise_for_status()
        outputs = {name: cluster.processes[name] for name in ("i1", "w1", "r1")}
        for name in outputs:
            await cluster.stop(name)
        logs = {name: process.output() for name, process in outputs.items()}
    lines = [line for text in logs.values() for line in text.splitlines()]
    assert [line for line in lines if " ERROR " in line or " WARNING " in line] == []
    assert "a secret prompt" not in "".join(logs.values())
    assert logs["i1"].count("forebay.access: POST /v1/completions 200 request_id=") == 1
    shared = ("worker w1 joined the pool default", "worker w1 is draining")
    assert [logs["w1"].count(event) for event in (*shared, "worker w1 left")] == [1] * 3
    assert [logs["r1"].count(event) for event in shared] == [1] * 2
    assert "Starting..." not in logs["r1"]
