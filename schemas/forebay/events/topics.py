"""The topics, what each carries and how: the one list that codecs, tools and documents are made from."""

from dataclasses import dataclass
from types import UnionType
from typing import Literal

from forebay.events import (
    control,
    decisions,
    fleet,
    groups,
    heartbeats,
    kv,
    metrics,
    progress,
    requests,
    shadow,
    snapshots,
    tokens,
    work,
)

CodecName = Literal["json", "msgpack", "raw"]


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic: its name without namespace, its codec and the union of its events."""

    name: str
    codec: CodecName
    events: UnionType | type | None
    partitioned_by: str
    says: str


OPENAI_REQUESTS = Topic(
    "openai-requests", "raw", None, "any", "requests through the Kafka API: bodies of the OpenAI API, as JSON"
)
OPENAI_RESPONSES = Topic(
    "openai-responses", "raw", None, "request id", "answers to `openai-requests`, as the OpenAI API gives them"
)
GROUPS = Topic("groups", "json", groups.GroupEvent, "one", "which control partition each group lives in")
REQUESTS = Topic("requests", "msgpack", requests.RequestEvent, "group", "what clients ask for")
KV_EVENTS = Topic("kv-events", "msgpack", kv.AnyKvEvent, "group", "blocks that entered and left caches")
METRICS = Topic("metrics", "json", metrics.MetricEvent, "group", "load reports of engines")
PROGRESS = Topic("progress", "json", progress.AnyProgressEvent, "group", "first tokens and ends of requests")
FLEET = Topic("fleet", "json", fleet.AnyFleetEvent, "group", "workers joining, failing and leaving")
CONTROL = Topic("control", "json", control.ControlEvent, "group", "configuration and admin commands")
DECISIONS = Topic("decisions", "json", decisions.JournalRecord, "group", "the owner's journal")
TOKENS = Topic("tokens", "msgpack", tokens.TokenEvent, "reply slot", "answers, token by token")
SNAPSHOTS = Topic("snapshots", "msgpack", snapshots.SnapshotEvent, "group", "the owner's state, in chunks")
SHADOW = Topic("shadow", "json", shadow.ShadowEvent, "group", "what other policies would have decided")
HEARTBEATS = Topic(
    "heartbeats", "json", heartbeats.HeartbeatEvent, "group", "which routers own a group or stand by for it"
)
DEAD_LETTERS = Topic("dead-letters", "raw", None, "group", "records that did not decode or were refused, as they came")


# What an owner applies, in the order in which it takes what is ready.
INPUTS = (REQUESTS, FLEET, CONTROL, PROGRESS, METRICS, KV_EVENTS)


def work_topic(pool: str) -> Topic:
    """The work topic of one pool; its partition is the worker's slot."""
    return Topic(f"work.{pool}", "msgpack", work.AnyWorkEvent, "worker slot", f"work for the pool {pool}")


FIXED_TOPICS = (
    OPENAI_REQUESTS, OPENAI_RESPONSES, GROUPS, REQUESTS, KV_EVENTS, METRICS, PROGRESS, FLEET, CONTROL, DECISIONS,
    TOKENS, SNAPSHOTS, SHADOW, HEARTBEATS, DEAD_LETTERS,
)  # fmt: skip


def topic_named(name: str) -> Topic:
    """The topic of this name. Raises KeyError for a name that forebay does not use."""
    for topic in FIXED_TOPICS:
        if topic.name == name:
            return topic
    pool = name.removeprefix("work.")
    if pool and pool != name:
        return work_topic(pool)
    raise KeyError(name)
