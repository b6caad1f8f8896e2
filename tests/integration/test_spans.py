"""Spans on Kafka: each request has exactly one complete trace, although owner, worker and exporter are killed."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from tests.harness.cluster import FOREBAY, Cluster
from tests.harness.demo_kafka import INGRESSES, ROUTERS, Result, play, trace_of
from tests.harness.otlp_receiver import OtlpReceiver, Reply, attributes_of, root_of
from tests.integration.conftest import MakeCluster
from tests.replay.request_times import SHOWN, derived_times

WORKERS = ("w1", "w2", "w3", "w4")
SPEED = 2.0
EXPORTER = "spans"
WITHIN_S = 300.0


def start_exporter(cluster: Cluster, receiver: OtlpReceiver) -> None:
    cluster.processes.start(EXPORTER, [FOREBAY, "spans", *cluster.where, "--otlp", receiver.url])


@pytest.mark.timeout(900)
async def test_every_request_has_one_complete_trace_with_the_times_of_the_log(
    make_cluster: MakeCluster, tmp_path: Path, report: Callable[[str], None]
) -> None:
    trace, requests = trace_of(tmp_path)
    result = Result(requests=requests)
    async with OtlpReceiver() as receiver, make_cluster("spans") as cluster:
        await cluster.serve(ROUTERS, WORKERS, INGRESSES, worker=("--speedup", str(SPEED)))
        start_exporter(cluster, receiver)
        options = argparse.Namespace(speed=SPEED, duration_s=None)
        playing = asyncio.create_task(play(cluster, trace, options, result))
        await cluster.until("spans arrive", lambda: len(receiver.traces), lambda count: count > requests // 6)
        cluster.kill(EXPORTER)
        receiver.replies += [Reply(503), Reply(429, {"Retry-After": "1"})]
        start_exporter(cluster, receiver)
        await playing
        for name in (await cluster.owner(), EXPORTER):
            await cluster.stop(name, within_s=WITHIN_S)
        submitted = await cluster.events(REQUESTS, RequestSubmitted)
        expected = await derived_times(cluster.log, partition=cluster.partition())
    assert result.problems == []
    roots = {attributes_of(root)["gen_ai.response.id"]: root for root in map(root_of, receiver.traces.values())}
    assert len(roots) == len(receiver.traces) == requests
    assert set(roots) == {event.request_id for event in submitted}
    found = {}
    for spans in receiver.traces.values():
        root = root_of(spans)
        times = [
            (span.name, span.start_time_unix_nano // 1_000, span.end_time_unix_nano // 1_000)
            for span in spans.values()
            if span.name in SHOWN
        ]
        end_us = root.end_time_unix_nano // 1_000
        found[attributes_of(root)["gen_ai.response.id"]] = [sorted([*times, ("end", end_us, end_us)])]
    assert found == expected
    begins_us = {event.request_id: event.at_us for event in submitted}
    assert {name: root.start_time_unix_nano // 1_000 for name, root in roots.items()} == begins_us
    assert receiver.differing == []
    delayed = sum(any(event.name == "owner_claimed" for event in root.events) for root in roots.values())
    retried = sum(bool(span.links) for spans in receiver.traces.values() for span in spans.values())
    assert delayed and retried, "a takeover delayed requests, and a lost worker was replaced"
    again = receiver.copies.total() - len(receiver.copies)
    report(f"{requests} traces, {len(receiver.copies)} spans, {again} again; {delayed} delayed, {retried} tried again")
