"""Benchmark of the Kafka API: check that each of many requests is answered once; `--kill` kills an ingress.

Two ingresses, two routers and mock workers run as processes. `forebay produce` sends the requests, and all responses
are read back from the topic afterwards. A repeated answer must be identical.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from aiokafka import AIOKafkaConsumer

from forebay.events.topics import OPENAI_RESPONSES
from forebay.transport.kafka.settings import KafkaSettings
from tests.harness.cluster import GROUP, Cluster

WITHIN_S = 3_600.0
KILL_AT = 0.4  # share of requests routed before the kill


async def answers(settings: KafkaSettings) -> dict[str, list[tuple[int, str, bool, bytes]]]:
    """Return the response records by request id: index, status, whether it is the last, and value."""
    found: dict[str, list[tuple[int, str, bool, bytes]]] = {}
    consumer = AIOKafkaConsumer(settings.topic(OPENAI_RESPONSES.name), bootstrap_servers=settings.bootstrap)
    await consumer.start()
    try:
        places = sorted(consumer.assignment())  # without a consumer group: all partitions
        await consumer.seek_to_beginning(*places)
        ends = await consumer.end_offsets(places)
        while any([await consumer.position(place) < ends[place] for place in places]):
            for messages in (await consumer.getmany(timeout_ms=1_000)).values():
                for message in messages:
                    headers = dict(message.headers)
                    record = (int(headers["index"]), headers["status"].decode(), headers["last"] == b"1", message.value)
                    found.setdefault(headers["request-id"].decode(), []).append(record)
    finally:
        await consumer.stop()
    return found


def judged(found: dict[str, list[tuple[int, str, bool, bytes]]], wanted: list[str]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for request_id in wanted:
        records = found.get(request_id, [])
        distinct = set(records)
        whole = [record for record in distinct if record[2]]
        if len(whole) != 1 or len({record[0] for record in distinct}) != len(distinct):
            counts["unanswered" if not whole else "contradictory"] += 1
            continue
        counts["answered"] += 1
        counts["ok"] += whole[0][1] == "200"
        counts["repeated"] += len(records) > len(distinct)
    return dict(counts) | {"foreign": len(set(found) - set(wanted))}


async def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    namespace = f"kafka-api-{uuid.uuid4().hex[:8]}"
    settings = KafkaSettings(options.kafka, namespace)
    file = folder / "requests.jsonl"
    wanted = [f"q{number}" for number in range(options.requests)]
    with file.open("w") as lines:
        for number, request_id in enumerate(wanted):
            body = {"model": GROUP, "prompt": f"question {number % 997} of {number}", "max_tokens": 4}
            lines.write(json.dumps({**body, "request_id": request_id}) + "\n")
    async with Cluster(options.kafka, options.redis, namespace, folder) as cluster:
        for name in ("r1", "r2"):
            cluster.router(name)
        for number in range(options.workers):
            cluster.worker(f"w{number}", "--speedup", "1000")
        for name in ("i1", "i2"):
            cluster.ingress(name)
        await cluster.until_serving(options.workers)
        began_s = time.monotonic()
        connection = ["--kafka", options.kafka, "--namespace", namespace, "--timeout-s", str(WITHIN_S)]
        cluster.begin("produce", "produce", str(file), "--wait", *connection)
        if options.kill:
            while await cluster.routed() < KILL_AT * options.requests:  # noqa: ASYNC110 - the log sets no event here
                await asyncio.sleep(0.5)
            cluster.kill("i1")
            sys.stderr.write(f"an ingress is killed after {time.monotonic() - began_s:.0f} s\n")
        code, _ = await cluster.finish("produce", within_s=WITHIN_S)
        wall_s = time.monotonic() - began_s
        result = judged(await answers(settings), wanted)
        report = await cluster.verify()
    return {
        "requests": options.requests,
        "produce_exit": code,
        "wall_s": round(wall_s, 1),
        "requests_per_s": round(options.requests / wall_s),
        **result,
        "decisions": report["decisions"],
        "verified": report["verified"],
        "divergence": report["divergence"],
    }


def main() -> None:
    """Run and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", default="127.0.0.1:19092")
    parser.add_argument("--redis", default="redis://127.0.0.1:16379")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill", action="store_true", help="kill one of the two ingresses during the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(run(options, Path(folder)))))


if __name__ == "__main__":
    main()
