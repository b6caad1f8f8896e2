"""Create the topics on the broker with their configuration, and check the existing topics."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.errors import InvalidPartitionsError, KafkaError, TopicAlreadyExistsError

from forebay.events.topics import (
    ANSWERS,
    DAY_S,
    FIXED_TOPICS,
    FOREVER,
    GROUPS,
    KEYS,
    MODELS,
    OPENAI_REQUESTS,
    OPENAI_RESPONSES,
    REQUESTS,
    SCALING,
    TOKENS,
    Topic,
    work_topic,
)
from forebay.transport.certificates import certificate_remedy
from forebay.transport.kafka.errors import error_of, explain, is_denied, is_transient
from forebay.transport.kafka.settings import REQUEST_MS, KafkaSettings, KafkaUnreachable, KafkaUnusable
from forebay.transport.kafka.start import start_whole
from forebay.transport.kafka.writer import HEADROOM_BYTES, RECORD_BYTES_MAX

KNOWN_WITHIN_S = 60  # a busy broker takes tens of seconds for a topic of 256 partitions
KNOWN_POLL_S = 0.05
# Kafka removes and compacts only closed segments, and by default closes a segment after a week.
SEGMENT_S = DAY_S
# These topics have equal partition counts, because all events and decisions of a group use the same partition number.
CONTROL_TOPICS = tuple(topic for topic in FIXED_TOPICS if topic.partitioned_by == "group")
# Slots of every group that a request adds to a pool. The owner reads no leases meanwhile, so requests are to be few.
SLOTS_ADDED = 4
# With three replicas, acknowledged records survive the loss of a broker, and the loss of a broker blocks no append.
REPLICATED = 3
MIN_INSYNC = 2


class TopicPlan(msgspec.Struct, frozen=True):
    """Partition counts with which missing topics are created. Existing topics keep their counts.

    Attributes:
        groups: Partitions of every control topic, which is the maximum number of models.
        slots: Partitions of each work topic at first. Routers add partitions as workers join.
        kafka_api: Partitions of `openai-requests` and of `openai-responses`.
        replication: Replicas of every partition. From three on, an append needs `MIN_INSYNC` of them.
    """

    groups: int = 4
    slots: int = 16
    replies: int = 16
    kafka_api: int = 8
    replication: int = 1


class TopicCounts(msgspec.Struct, frozen=True):
    groups: int
    replies: int
    kafka_api: int
    pools: dict[str, int]


def planned(plan: TopicPlan, pools: Sequence[str]) -> list[tuple[Topic, int, dict[str, str]]]:
    """Return every topic with its planned partition count and its configuration on the broker."""
    counts = {GROUPS.name: 1, SCALING.name: 1, KEYS.name: 1, MODELS.name: 2, ANSWERS.name: 2, TOKENS.name: plan.replies}
    counts |= dict.fromkeys((OPENAI_REQUESTS.name, OPENAI_RESPONSES.name), plan.kafka_api)
    counts |= dict.fromkeys((topic.name for topic in CONTROL_TOPICS), plan.groups)
    found = [(topic, counts[topic.name], _config(topic, plan.replication)) for topic in FIXED_TOPICS]
    work = [work_topic(pool) for pool in pools]
    return found + [(topic, plan.slots, _config(topic, plan.replication)) for topic in work]


async def create_topics(settings: KafkaSettings, plan: TopicPlan, pools: Sequence[str]) -> list[str]:
    """Create the missing topics, wait until the broker lists them, and return their names. Raises KafkaUnusable."""
    admin = await connected_admin(settings)
    try:
        created = await _create(admin, settings, plan, pools)
        await _until_known(admin, created)
    except (KafkaError, OSError) as error:
        raise KafkaUnusable(f"the topics cannot be created on {settings.bootstrap}: {explain(error)}") from error
    finally:
        await admin.close()
    return created


async def plan_of(settings: KafkaSettings) -> TopicPlan:
    """Return the partition and replica counts of the namespace's topics; defaults for topics that are missing.

    Raises KafkaUnusable if the namespace has no topics.
    """
    partitions, replicas = await _described(settings)
    control = [partitions[topic.name] for topic in CONTROL_TOPICS if topic.name in partitions]
    if not control:
        raise _without_topics(settings)
    _require_equal(settings, partitions, [topic.name for topic in CONTROL_TOPICS if topic.name in partitions])
    default, work = TopicPlan(), work_topic("").name
    return TopicPlan(
        groups=control[0],
        slots=min((count for name, count in partitions.items() if name.startswith(work)), default=default.slots),
        replies=partitions.get(TOKENS.name, default.replies),
        kafka_api=partitions.get(OPENAI_REQUESTS.name, partitions.get(OPENAI_RESPONSES.name, default.kafka_api)),
        replication=min(replicas.values()),
    )


async def partitions_of(settings: KafkaSettings) -> dict[str, int]:
    """Return the partition count of every topic of the namespace, by name without prefix. Raises KafkaUnusable."""
    partitions, _ = await _described(settings)
    return partitions


async def _described(settings: KafkaSettings) -> tuple[dict[str, int], dict[str, int]]:
    admin = await connected_admin(settings)
    try:
        described = await admin.describe_topics()
    except (KafkaError, OSError) as error:
        raise KafkaUnusable(f"the topics of {settings.bootstrap} cannot be listed: {explain(error)}") from error
    finally:
        await admin.close()
    prefix = settings.topic("")
    own = {
        topic["topic"].removeprefix(prefix): topic["partitions"]
        for topic in described
        if topic["topic"].startswith(prefix) and not topic["error_code"]
    }
    partitions = {name: len(places) for name, places in own.items()}
    return partitions, {name: len(places[0]["replicas"]) for name, places in own.items()}


async def count_topics(settings: KafkaSettings) -> TopicCounts:
    """Return the partition counts on the broker. Raises KafkaUnusable for missing or inconsistent topics."""
    partitions = await partitions_of(settings)
    missing = [topic.name for topic in FIXED_TOPICS if topic.name not in partitions]
    if missing:
        if len(missing) == len(FIXED_TOPICS):
            raise _without_topics(settings)
        names = ", ".join(settings.topic(name) for name in missing)
        raise KafkaUnusable(f"{settings.bootstrap} has no topic {names}; run `forebay topics create --upgrade`")
    _require_equal(settings, partitions, [topic.name for topic in CONTROL_TOPICS])
    if partitions[GROUPS.name] != 1:
        raise KafkaUnusable(f"{settings.topic(GROUPS.name)} has {partitions[GROUPS.name]} partitions; it must have 1")
    work = work_topic("").name
    return TopicCounts(
        groups=partitions[REQUESTS.name],
        replies=partitions[TOKENS.name],
        kafka_api=partitions[OPENAI_REQUESTS.name],
        pools={name.removeprefix(work): count for name, count in partitions.items() if name.startswith(work)},
    )


def _without_topics(settings: KafkaSettings) -> KafkaUnusable:
    text = f"{settings.bootstrap} has no topics of the namespace {settings.namespace}"
    return KafkaUnusable(f"{text}; run `forebay topics create`, or check --namespace")


def _require_equal(settings: KafkaSettings, partitions: dict[str, int], names: list[str]) -> None:
    counts = {partitions[name] for name in names}
    if len(counts) > 1:
        found = ", ".join(f"{settings.topic(name)} {partitions[name]}" for name in names)
        raise KafkaUnusable(f"the control topics must have equal partition counts, but have: {found}")


async def _create(
    admin: AIOKafkaAdminClient, settings: KafkaSettings, plan: TopicPlan, pools: Sequence[str]
) -> list[str]:
    existing = set(await admin.list_topics())
    wanted = [
        NewTopic(
            settings.topic(topic.name),
            num_partitions=partitions,
            replication_factor=plan.replication,
            topic_configs=config,
        )
        for topic, partitions, config in planned(plan, pools)
        if settings.topic(topic.name) not in existing
    ]
    if not wanted:
        return []
    response = await admin.create_topics(wanted)
    created = []
    for name, code, *text in response.topic_errors:
        if code == 0:
            created.append(name)
        elif not isinstance(error := error_of(code), TopicAlreadyExistsError):  # another service was first
            raise KafkaUnusable(f"the topic {name} cannot be created: {text[0] if text and text[0] else error}")
    return created


class WorkTopics:
    """The work topics of a namespace, for a router that adds partitions to them as workers join."""

    def __init__(self, settings: KafkaSettings, counts: TopicCounts) -> None:
        self._settings = settings
        self._step = SLOTS_ADDED * counts.groups
        self._pools = dict(counts.pools)

    async def require_slot(self, pool: str, slot: int) -> None:
        """Add partitions to the work topic of a pool if it lacks this one. Raises KafkaUnusable."""
        if slot < self._pools.get(pool, 0):
            return
        topic = self._settings.topic(work_topic(pool).name)
        admin = await connected_admin(self._settings)
        try:
            async with asyncio.timeout(REQUEST_MS / 1000):
                if (count := await _count(admin, topic)) <= slot:
                    wanted = (slot // self._step + 1) * self._step
                    with contextlib.suppress(InvalidPartitionsError):  # another router was first
                        await admin.create_partitions({topic: NewPartitions(wanted)})
                    while (count := await _count(admin, topic)) <= slot:  # noqa: ASYNC110 - Kafka has no event for this
                        await asyncio.sleep(KNOWN_POLL_S)
        except (KafkaError, OSError, TimeoutError) as error:
            raise KafkaUnusable(f"partition {slot} cannot be added to {topic}: {explain(error)}") from error
        finally:
            await admin.close()
        self._pools[pool] = count


async def _count(admin: AIOKafkaAdminClient, topic: str) -> int:
    (described,) = await admin.describe_topics([topic])
    if described["error_code"]:
        raise error_of(described["error_code"])
    return len(described["partitions"])


async def _until_known(admin: AIOKafkaAdminClient, names: list[str]) -> None:
    """Wait until the broker lists the topics, which it may not do immediately after it created them."""
    async with asyncio.timeout(KNOWN_WITHIN_S):
        while not set(names) <= set(await admin.list_topics()):  # noqa: ASYNC110 - Kafka has no event for this
            await asyncio.sleep(KNOWN_POLL_S)


async def connected_admin(settings: KafkaSettings) -> AIOKafkaAdminClient:
    """Return an admin client, which the caller closes. Raises KafkaUnusable if the broker cannot be used."""
    admin = AIOKafkaAdminClient(**settings.client_options())
    try:
        await start_whole(admin.start, admin.close)
    except (KafkaError, OSError) as error:
        raise unreachable(settings, error) from error
    return admin


class BootstrapErrors(logging.Filter):
    """Keeps the reason of a failed bootstrap, which aiokafka logs but does not raise, for `unreachable`."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith('Unable connect to "'):
            return True
        self.last = record.getMessage().partition('": ')[2]
        return False


bootstrap_errors = BootstrapErrors()
logging.getLogger("aiokafka").addFilter(bootstrap_errors)


def unreachable(settings: KafkaSettings, error: Exception) -> KafkaUnusable:
    """Return the error for a failed connection. Its message says what to check."""
    reason = bootstrap_errors.last if "Unable to bootstrap" in str(error) else explain(error)
    kind = KafkaUnreachable if is_transient(error) else KafkaUnusable
    return kind(f"Kafka at {settings.bootstrap} cannot be used ({reason}); {_remedy(settings, reason, error)}")


def _remedy(settings: KafkaSettings, reason: str, error: Exception) -> str:
    if is_denied(error):
        return "ask its operator for the permission"
    if remedy := certificate_remedy(reason, "Kafka", "ssl.ca.location"):
        return remedy
    if "SaslAuthenticationFailed" in reason:
        return "check sasl.username and sasl.password"
    hint = "check that it runs and its address"
    return f"{hint}, and the user name and password" if "sasl_mechanism" in settings.client_options() else hint


def _config(topic: Topic, replication: int) -> dict[str, str]:
    config: dict[str, Any] = {"max.message.bytes": RECORD_BYTES_MAX + HEADROOM_BYTES}
    config["min.insync.replicas"] = MIN_INSYNC if replication >= REPLICATED else 1
    ends = topic.retention_s != FOREVER
    policies = ("compact",) * topic.is_compacted + ("delete",) * (ends or not topic.is_compacted)
    config["cleanup.policy"] = ",".join(policies)
    config["retention.ms"] = topic.retention_s * 1000 if ends else -1
    if ends or topic.is_compacted:
        config["segment.ms"] = min(topic.retention_s or SEGMENT_S, SEGMENT_S) * 1000
    if topic is OPENAI_REQUESTS:
        config["message.timestamp.type"] = "LogAppendTime"  # a producer could hide the age of a signature
    if topic.is_compacted:
        config["max.compaction.lag.ms"] = SEGMENT_S * 1000
    return {name: str(value) for name, value in config.items()}
