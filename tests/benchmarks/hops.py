"""Measure the duration of each hop of a request from the records of a run on Kafka and the receivers' counts.

Producers' `at_us` and the owner's `now_us` are microseconds of one machine's clock. Kafka's own timestamps are
whole milliseconds, rounded down, taken when the producer received the record; hops that use one are marked.
"""

import math
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from forebay.events.codec import decode
from forebay.events.decisions import JournalRecord
from forebay.events.progress import FirstTokenEmitted
from forebay.events.requests import RequestSubmitted
from forebay.events.tokens import TokensEmitted
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS, TOKENS, Topic, work_topic
from forebay.events.work import WorkItem
from forebay.journal.start import recorded_view
from forebay.transport.base import Record
from forebay.transport.kafka.log import KafkaLog

READ_MAX = 500
WORK = work_topic("default")

SUBMITTED = "submitted -> taken up by the owner"
DECIDED = "taken up -> journal acknowledged, work sent (+-1 ms)"
WORKED = "work sent -> tokens sent: worker's hop and engine (+-1 ms)"
TO_TOKENS = "submitted -> tokens sent, exact"
PROGRESSED = "first token reported -> applied by the owner"
TOKENS_HOP = "receiver's count, tokens -> ingress (up to 1 ms too long)"
HOPS = (SUBMITTED, DECIDED, WORKED, TO_TOKENS, PROGRESSED, TOKENS_HOP)


@dataclass(frozen=True, slots=True)
class LogEnds:
    """The ends of the log before a run, by topic and partition, and the owner's applied offsets by topic."""

    ends: Mapping[tuple[str, int], int]
    view: Mapping[str, int]


async def place(log: KafkaLog, slots: int) -> LogEnds:
    """Return the ends of the log; no request may be in flight."""
    wanted = [(topic.name, 0) for topic in (REQUESTS, PROGRESS, TOKENS)]
    wanted += [(WORK.name, slot) for slot in range(slots)]
    ends = {(topic, partition): await log.end(topic, partition) for topic, partition in wanted}
    while True:
        ends[DECISIONS.name, 0] = await log.end(DECISIONS.name, 0)
        view = await recorded_view(log, 0)
        if await log.end(DECISIONS.name, 0) == ends[DECISIONS.name, 0]:  # otherwise the view belongs to a later record
            return LogEnds(ends, view)


async def hops(log: KafkaLog, before: LogEnds, skip: int) -> dict[str, list[float]]:
    """Return the hops of every request since `before`, except the first `skip`, in ms."""
    requests = await _since(log, REQUESTS, 0, before)
    submitted = {
        event.request_id: (record.offset, event.at_us)
        for record in requests
        if isinstance(event := decode(REQUESTS, record.value), RequestSubmitted)
    }
    applied = await _applied(log, before)
    sent: dict[str, int] = {}
    for topic, slot in before.ends:
        if topic == WORK.name:
            for record in await _since(log, WORK, slot, before):
                item = decode(WORK, record.value)
                if isinstance(item, WorkItem):
                    sent[item.request_id] = record.at_us
    emitted = await _emitted(log, before)
    found: dict[str, list[float]] = {hop: [] for hop in HOPS}
    measured = dict(list(submitted.items())[skip:])
    for request_id, (offset, at_us) in measured.items():
        taken_us = applied[REQUESTS.name][offset]
        tokens_us = emitted[request_id]
        found[SUBMITTED].append((taken_us - at_us) / 1000)
        found[DECIDED].append((sent[request_id] - taken_us) / 1000)
        found[WORKED].append((tokens_us - sent[request_id]) / 1000)
        found[TO_TOKENS].append((tokens_us - at_us) / 1000)
    for record in await _since(log, PROGRESS, 0, before):
        event = decode(PROGRESS, record.value)
        applied_us = applied[PROGRESS.name].get(record.offset)  # no journal record covers the last events yet
        if isinstance(event, FirstTokenEmitted) and event.request_id in measured and applied_us is not None:
            found[PROGRESSED].append((applied_us - event.at_us) / 1000)
    return found


async def _applied(log: KafkaLog, before: LogEnds) -> dict[str, dict[int, int]]:
    """Return the clock at each record's application, by topic and offset."""
    view = Counter(before.view)
    applied: dict[str, dict[int, int]] = {REQUESTS.name: {}, PROGRESS.name: {}}
    for record in await _since(log, DECISIONS, 0, before):
        decision: JournalRecord = decode(DECISIONS, record.value)
        for run in decision.consumed:
            if run.topic in applied:
                offsets = range(view[run.topic], view[run.topic] + run.count)
                applied[run.topic].update(dict.fromkeys(offsets, run.now_us))
            view[run.topic] += run.count
    return applied


async def _emitted(log: KafkaLog, before: LogEnds) -> dict[str, int]:
    """Return the time at which the first tokens of each request were sent."""
    emitted: dict[str, int] = {}
    for record in await _since(log, TOKENS, 0, before):
        event = decode(TOKENS, record.value)
        if isinstance(event, TokensEmitted):
            for chunk in event.chunks:
                emitted.setdefault(chunk.request_id, event.at_us)
    return emitted


async def _since(log: KafkaLog, topic: Topic, partition: int, before: LogEnds) -> list[Record]:
    found: list[Record] = []
    offset, end = before.ends[topic.name, partition], await log.end(topic.name, partition)
    while offset < end:
        found += await log.read(topic.name, partition, offset, READ_MAX)
        offset = found[-1].offset + 1
    return found


# --- what receivers count ---------------------------------------------------------------------------------------------


def hop_counts(port: int, topic: str) -> Counter[float]:
    """Return a histogram of seconds from producer to receiver, from the metrics of the receiver."""
    counts: Counter[float] = Counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "forebay_hop_seconds_bucket" and sample.labels["topic"] == topic:
                counts[float(sample.labels["le"])] += round(sample.value)
    return counts


def quantile_ms(before: Counter[float], after: Counter[float], part: float) -> float:
    """Return an interpolated quantile of the counts between two readings, or NaN without counts."""
    lower_s, below = 0.0, 0
    total = after[math.inf] - before[math.inf]
    for upper_s in sorted(after):
        count = after[upper_s] - before[upper_s]
        if total and count >= part * total:
            if math.isinf(upper_s):
                return lower_s * 1000
            return (lower_s + (upper_s - lower_s) * (part * total - below) / (count - below)) * 1000
        lower_s, below = upper_s, count
    return math.nan
