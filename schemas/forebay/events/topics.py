"""List of all topics with their codecs and events.

The codecs, the tools and `docs/events.md` are derived from this list.
"""

from dataclasses import dataclass
from types import UnionType
from typing import Literal

from forebay.events import (
    answers,
    control,
    decisions,
    fleet,
    groups,
    heartbeats,
    keys,
    kv,
    metrics,
    models,
    progress,
    requests,
    scaling,
    shadow,
    snapshots,
    tokens,
    usage,
    work,
)

CodecName = Literal["json", "msgpack", "raw"]


@dataclass(frozen=True, slots=True)
class Topic:
    """Topic of the log.

    Attributes:
        name: name without the namespace.
        codec: encoding of its records.
        events: union of its event types; None if its records are raw bytes.
        partitioned_by: value that determines the partition of a record, in words for the docs.
        description: one sentence about its content, for the docs.
    """

    name: str
    codec: CodecName
    events: UnionType | type | None
    partitioned_by: str
    description: str


OPENAI_REQUESTS = Topic(
    "openai-requests", "raw", None, "any", "Kafka API of the ingress: request bodies of the OpenAI API, as JSON"
)
OPENAI_RESPONSES = Topic(
    "openai-responses", "raw", None, "request id", "responses to `openai-requests`, as in the OpenAI API"
)
GROUPS = Topic("groups", "json", groups.GroupEvent, "one", "control partition of each group")
REQUESTS = Topic("requests", "msgpack", requests.RequestEvent, "group", "client requests")
KV_EVENTS = Topic("kv-events", "msgpack", kv.AnyKvEvent, "group", "blocks that entered and left caches and stores")
METRICS = Topic("metrics", "json", metrics.MetricEvent, "group", "load and measured costs of engines")
PROGRESS = Topic("progress", "json", progress.AnyProgressEvent, "group", "worker events about requests and commands")
FLEET = Topic("fleet", "json", fleet.AnyFleetEvent, "group", "workers joining, failing and leaving")
CONTROL = Topic("control", "json", control.ControlEvent, "group", "configuration and admin commands")
DECISIONS = Topic("decisions", "json", decisions.JournalRecord, "group", "the owner's journal")
TOKENS = Topic("tokens", "msgpack", tokens.TokenEvent, "reply slot", "responses, token by token")
SNAPSHOTS = Topic("snapshots", "msgpack", snapshots.SnapshotEvent, "group", "the owner's state, in chunks")
SHADOW = Topic("shadow", "json", shadow.ShadowEvent, "group", "decisions of other policies, for comparison")
HEARTBEATS = Topic(
    "heartbeats", "json", heartbeats.HeartbeatEvent, "group", "routers that own a group or stand by for it"
)
SCALING = Topic("scaling", "json", scaling.ScalingEvent, "one", "the planner's journal: sizes of pools, and why")
MODELS = Topic(
    "models",
    "msgpack",
    models.ModelEvent,
    "two: 0 for cards and aliases, 1 for content",
    "model cards, with tokenizers and chat templates, and aliases of models",
)
ANSWERS = Topic(
    "answers",
    "msgpack",
    answers.AnswerEvent,
    "two: 0 for the index, 1 for content",
    "finished responses that outlive their connection, until their retention ends",
)
KEYS = Topic("keys", "json", keys.KeyEvent, "one", "API keys of tenants, as hashes, with their limits")
USAGE = Topic("usage", "json", usage.UsageRecord, "group", "the ledger: usage per tenant, key, model and hour")
DEAD_LETTERS = Topic("dead-letters", "raw", None, "group", "records that did not decode or were rejected, unchanged")


# Input topics of an owner, in the order in which it applies ready records.
INPUTS = (REQUESTS, FLEET, CONTROL, PROGRESS, METRICS, KV_EVENTS)


def work_topic(pool: str) -> Topic:
    """Return the topic on which the workers of `pool` get their work. Its partition is the slot of a worker."""
    return Topic(f"work.{pool}", "msgpack", work.AnyWorkEvent, "worker slot", f"work for the pool {pool}")


FIXED_TOPICS = (
    OPENAI_REQUESTS, OPENAI_RESPONSES, GROUPS, REQUESTS, KV_EVENTS, METRICS, PROGRESS, FLEET, CONTROL, DECISIONS,
    TOKENS, SNAPSHOTS, SHADOW, HEARTBEATS, SCALING, MODELS, ANSWERS, KEYS,
    USAGE,
    DEAD_LETTERS,
)  # fmt: skip


def topic_named(name: str) -> Topic:
    """Return the topic with this name, given without the namespace. Raises KeyError if forebay has no such topic."""
    for topic in FIXED_TOPICS:
        if topic.name == name:
            return topic
    pool = name.removeprefix("work.")
    if pool and pool != name:
        return work_topic(pool)
    raise KeyError(name)
