"""List of all topics with their codecs, events and retention.

The codecs, the tools, the configuration on the broker and `docs/events.md` are derived from this list.
"""

from collections.abc import Mapping
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
    spans,
    tokens,
    usage,
    work,
)

CodecName = Literal["json", "msgpack", "raw"]
# Private content of records. `identities`: tenants, API keys or end users. Short prompts can be guessed from hashes.
Content = Literal["prompts", "prompt hashes", "answers", "identities"]

MINUTE_S = 60
DAY_S = 86_400
FOREVER = 0

# Seconds for which Kafka keeps a record at least.
RETENTION_DEFAULT_S = 7 * DAY_S
RETENTION_S: Mapping[str, int] = {
    # The first placement of a group is valid for ever, and compaction would keep only the last one.
    "groups": FOREVER,
    # Readers of the pool configuration read the topic from its beginning. It grows by a few records per start.
    "control": FOREVER,
    "tokens": DAY_S,
    # Snapshots are kept longer than the records they replace, so that a slice of the log can still be replayed.
    "snapshots": 8 * DAY_S,
    # Readers of heartbeats need a few seconds. The minutes help to investigate an incident.
    "heartbeats": 10 * MINUTE_S,
    # The state of a planner is rebuilt from the first record on. It grows by a few kilobytes per interval.
    "scaling": FOREVER,
    "models": FOREVER,
    "answers": answers.RETENTION_S,
    "keys": FOREVER,
    # A bill of any month can be derived, and the chain is verified from its first record.
    "usage": FOREVER,
    "spans": FOREVER,
    "work": DAY_S,
}
HOLDS: Mapping[str, tuple[Content, ...]] = {
    "openai-requests": ("prompts", "identities"),
    "openai-responses": ("answers",),
    "requests": ("prompts", "prompt hashes", "identities"),
    "kv-events": ("prompt hashes",),
    "tokens": ("answers",),
    "snapshots": ("prompt hashes", "identities"),
    "answers": ("prompts", "answers", "identities"),
    "keys": ("identities",),
    "usage": ("identities",),
    "dead-letters": ("prompts", "prompt hashes", "answers", "identities"),
    "work": ("prompts", "prompt hashes"),
}


@dataclass(frozen=True, slots=True)
class Topic:
    """Topic of the log.

    Attributes:
        name: name without the namespace.
        codec: encoding of its records.
        events: union of its event types; None if its records are raw bytes.
        partitioned_by: value that determines the partition of a record, in words for the docs.
        description: one sentence about its content, for the docs.
        is_compacted: whether Kafka keeps only the newest record of each key.
    """

    name: str
    codec: CodecName
    events: UnionType | type | None
    partitioned_by: str
    description: str
    is_compacted: bool = False

    @property
    def retention_s(self) -> int:
        """Seconds for which Kafka keeps a record at least; `FOREVER` for no limit."""
        return RETENTION_S.get(self.name.partition(".")[0], RETENTION_DEFAULT_S)

    @property
    def holds(self) -> tuple[Content, ...]:
        """Private content of its records."""
        return HOLDS.get(self.name.partition(".")[0], ())


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
    is_compacted=True,
)
ANSWERS = Topic(
    "answers",
    "msgpack",
    answers.AnswerEvent,
    "two: 0 for the index, 1 for content",
    "finished responses that outlive their connection, until their retention ends",
    is_compacted=True,
)
KEYS = Topic(
    "keys", "json", keys.KeyEvent, "one", "API keys of tenants, as hashes, with their limits", is_compacted=True
)
USAGE = Topic("usage", "json", usage.UsageRecord, "group", "the ledger: usage per tenant, key, model and hour")
SPANS = Topic("spans", "json", spans.SpansExported, "group", "positions of `forebay spans`", is_compacted=True)
DEAD_LETTERS = Topic("dead-letters", "raw", None, "group", "records that did not decode or were rejected, unchanged")


# Input topics of an owner, in the order in which it applies ready records.
INPUTS = (REQUESTS, FLEET, CONTROL, PROGRESS, METRICS, KV_EVENTS)


def work_topic(pool: str) -> Topic:
    """Return the topic on which the workers of `pool` get their work. Its partition is the slot of a worker."""
    return Topic(f"work.{pool}", "msgpack", work.AnyWorkEvent, "worker slot", f"work for the pool {pool}")


FIXED_TOPICS = (
    OPENAI_REQUESTS, OPENAI_RESPONSES, GROUPS, REQUESTS, KV_EVENTS, METRICS, PROGRESS, FLEET, CONTROL, DECISIONS,
    TOKENS, SNAPSHOTS, SHADOW, HEARTBEATS, SCALING, MODELS, ANSWERS, KEYS,
    USAGE, SPANS,
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
