"""Slices of a live Kafka log, recorded under load, across lost workers and takeovers, and after retention."""

import asyncio
import itertools
import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from forebay.events.fleet import WorkerLost
from forebay.events.topics import FLEET, METRICS
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.integration.conftest import RUN, cluster_fixture
from tests.integration.stream_clients import StreamClients, problems

ROUTERS = ("r1", "r2")
NAMESPACE = f"{RUN}-record"
SHORT = 6  # output tokens
ASK_EVERY_S = 0.05
PATIENCE_S = 60.0
COMMAND_S = 120.0
ROUTED = 80  # requests before and after each incident

pytestmark = pytest.mark.asyncio(loop_scope="module")
cluster = cluster_fixture(
    "record",
    ROUTERS,
    ("w1", "w2", "w3"),
    router=("--snapshot-every", "60"),
    worker=("--speedup", "50", "--lease-ttl-s", "3"),
)


async def run(*arguments: str | Path, hash_seed: int = 0) -> "subprocess.CompletedProcess[str]":
    return await asyncio.to_thread(
        subprocess.run,
        [FOREBAY, *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_S,
    )


async def recorded(kafka: str, out: Path, *options: str) -> dict[str, Any]:
    """Record, check that the recording verifies, and return the JSON output."""
    done = await run("record", "--kafka", kafka, "--namespace", NAMESPACE, "--json", *options, out)
    assert done.returncode == 0, done.stderr + done.stdout
    output: dict[str, Any] = json.loads(done.stdout)
    report = output["verified"][GROUP]
    assert (report["divergence"], report["unverified"]) == (None, {})
    assert report["verified"] == report["decisions"] >= output["groups"][0]["decisions"] > 0
    return output


async def until_more_routed(cluster: Cluster) -> None:
    least = await cluster.routed() + ROUTED
    await cluster.until(f"{ROUTED} more requests are routed", cluster.routed, lambda routed: routed >= least)


async def test_slices_recorded_under_load_across_a_lost_worker_and_a_takeover(
    cluster: Cluster, clients: StreamClients, kafka: str, tmp_path: Path
) -> None:
    owner = await cluster.owner()
    numbers = itertools.count()
    async with clients.load(ASK_EVERY_S, SHORT, first=0):
        await until_more_routed(cluster)
        began = datetime.now(UTC)
        first = asyncio.create_task(recorded(kafka, tmp_path / f"{next(numbers)}.rec"))
        await until_more_routed(cluster)
        cluster.kill("w3")
        await cluster.until("w3 is lost", lambda: cluster.events(FLEET, WorkerLost))
        cluster.kill(owner)
        await cluster.taken_over(owner, within_s=PATIENCE_S)
        second = asyncio.create_task(recorded(kafka, tmp_path / f"{next(numbers)}.rec", "--from", began.isoformat()))
        await until_more_routed(cluster)
        outputs = [await first, await second]
    assert problems(clients.results, SHORT) == []
    outputs.append(await recorded(kafka, tmp_path / f"{next(numbers)}.rec", "--from", began.isoformat()))
    outputs.append(await recorded(kafka, tmp_path / f"{next(numbers)}.rec"))
    groups = [one["groups"][0] for one in outputs]
    assert [group["start"] > 0 for group in groups] == [False, True, True, False]
    assert groups[1]["first"] == groups[2]["first"] > groups[2]["start"]
    # The owner may journal its last inputs between the last two commands.
    assert groups[0]["end"] < groups[1]["end"] < groups[2]["end"] <= groups[3]["end"]
    assert {one["source"] for one in outputs} == {"kafka"}
    assert outputs[2]["verified"][GROUP]["claims"] == 1
    assert outputs[3]["verified"][GROUP]["claims"] == len(await cluster.ownerships()) > 1
    assert outputs[3]["groups"][0]["decisions"] == await cluster.decided()


async def test_kafka_and_the_recording_give_the_same_results_in_other_processes(
    cluster: Cluster, kafka: str, tmp_path: Path
) -> None:
    for name in ROUTERS:
        if name in cluster.processes:
            await cluster.stop(name)  # no later records in the journal
    out = tmp_path / "whole.rec"
    whole = await recorded(kafka, out)
    anonymous = await recorded(kafka, tmp_path / "anonymous.rec", "--anonymize")
    assert anonymous["verified"][GROUP]["decisions"] == whole["verified"][GROUP]["decisions"]
    reports = []
    for source in ((str(out),), ("--kafka", kafka, "--namespace", NAMESPACE)):
        for hash_seed in (0, 12345):
            done = await run("verify", "--json", *source, hash_seed=hash_seed)
            assert done.returncode == 0, done.stderr
            reports.append({**json.loads(done.stdout), "unapplied": 0})
    assert reports[0] == reports[1] == reports[2] == reports[3]
    assert reports[0]["verified"] == reports[0]["decisions"] > 2 * ROUTED
    listed = await run("topics", "list", out)
    # Two routers may place the first group at once; the second placement has no effect.
    assert {"groups/0\t1", "groups/0\t2"} & {*listed.stdout.splitlines()}
    for command in (("verify",), ("record", tmp_path / "no.rec")):
        nowhere = await run(*command, "--kafka", kafka, "--namespace", f"{NAMESPACE}-nobodys")
        assert (nowhere.returncode, nowhere.stdout) == (2, "")
        assert nowhere.stderr == (f"forebay: {kafka} has no topic {NAMESPACE}-nobodys.groups; check --namespace\n")
    unknown = await run("verify", "--group", "nobodys-model", out)
    error = f"forebay: {out}: unknown group 'nobodys-model'; groups are: {GROUP}\n"
    assert (unknown.returncode, unknown.stderr) == (2, error)


@pytest.mark.usefixtures("cluster")
async def test_error_names_records_removed_by_retention_and_the_rest_can_be_recorded(
    kafka: str, tmp_path: Path
) -> None:
    """Runs last, because it stops the owners and deletes the head of a topic."""
    whole = await recorded(kafka, tmp_path / "before.rec")
    middle = next(extent for extent in whole["extents"] if extent["topic"] == METRICS.name)["end"] // 2
    place = TopicPartition(f"{NAMESPACE}.{METRICS.name}", whole["groups"][0]["partition"], middle)
    admin = AdminClient({"bootstrap.servers": kafka})  # keep a reference, because it receives the responses
    for removed in admin.delete_records([place]).values():
        assert removed.result(COMMAND_S).low_watermark == middle
    source = ("--kafka", kafka, "--namespace", NAMESPACE)
    refused = await run("record", *source, "--from", whole["from"], tmp_path / "no.rec")
    assert refused.returncode == 2
    assert f"has no {METRICS.name} before offset {middle}" in refused.stderr
    assert not (tmp_path / "no.rec.part").exists()
    rest = await recorded(kafka, tmp_path / "rest.rec")
    assert rest["groups"][0]["start"] == rest["groups"][0]["first"] > 0
    assert f"can be recorded from {rest['from']} on" in refused.stderr
    again = await recorded(kafka, tmp_path / "again.rec", "--from", rest["from"])
    assert (again["digest"], again["groups"]) == (rest["digest"], rest["groups"])
    report = json.loads((await run("verify", "--json", *source)).stdout)
    assert report["digest"] == rest["verified"][GROUP]["digest"]
