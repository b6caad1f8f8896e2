"""Permissions of each role on the topics and consumer groups of a namespace, and the ACLs that grant them on a broker.

Each role is the Kafka user of one kind of process. `tests/integration/test_security.py` compares this table with the
processes on a broker with an authorizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import CreateAclsRequest

from forebay.events.topics import (
    ANSWERS,
    CONTROL,
    DEAD_LETTERS,
    DECISIONS,
    FLEET,
    GROUPS,
    HEARTBEATS,
    INPUTS,
    KEYS,
    KV_EVENTS,
    METRICS,
    MODELS,
    OPENAI_REQUESTS,
    OPENAI_RESPONSES,
    PROGRESS,
    REQUESTS,
    SCALING,
    SHADOW,
    SNAPSHOTS,
    SPANS,
    TOKENS,
    USAGE,
    Topic,
    work_topic,
)
from forebay.transport.kafka.errors import error_of
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable
from forebay.transport.kafka.topics import connected_admin

# A name that ends with a dot, and the empty name, are prefixes.
WORK = work_topic("").name
REPLIES = "replies."
ALL = ""


@dataclass(frozen=True, slots=True)
class Role:
    """Names of topics and consumer groups that a role may use, without the namespace. It may list all topics.

    Attributes:
        groups: consumer groups in which it may be a member. This includes their committed offsets.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    creates: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def may_write(self, topic: str) -> bool:
        return any(topic == name or (_is_prefix(name) and topic.startswith(name)) for name in self.writes)


def _names(*topics: Topic) -> tuple[str, ...]:
    return tuple(topic.name for topic in topics)


# A group's journal with everything that its replay reads.
_REPLAYED = _names(*INPUTS, DECISIONS, SNAPSHOTS, GROUPS)
ROLES: Mapping[str, Role] = {
    "ingress": Role(
        reads=(*_REPLAYED, *_names(OPENAI_REQUESTS, TOKENS, HEARTBEATS, MODELS, ANSWERS, KEYS)),
        writes=(*_names(REQUESTS, CONTROL, ANSWERS, OPENAI_RESPONSES), REPLIES),
        groups=("kafka-api",),
    ),
    "router": Role(
        reads=(*_REPLAYED, *_names(HEARTBEATS, TOKENS)),
        writes=(*_names(DECISIONS, SNAPSHOTS, GROUPS, HEARTBEATS, FLEET, CONTROL, TOKENS, DEAD_LETTERS), WORK),
    ),
    "worker": Role(
        reads=(*_names(GROUPS, DECISIONS, FLEET, CONTROL, PROGRESS, HEARTBEATS, MODELS, ANSWERS, TOKENS), WORK),
        writes=_names(PROGRESS, TOKENS, KV_EVENTS, METRICS, MODELS),
        creates=(WORK,),
    ),
    "picker": Role(reads=(*_REPLAYED, *_names(TOKENS, HEARTBEATS, MODELS)), writes=_names(REQUESTS, PROGRESS)),
    "indexer": Role(reads=(*_REPLAYED, *_names(MODELS, HEARTBEATS)), groups=("indexer",)),
    "planner": Role(reads=(*_REPLAYED, *_names(SCALING, HEARTBEATS)), writes=_names(SCALING)),
    "shadow": Role(reads=(*_REPLAYED, SHADOW.name), writes=_names(SHADOW)),
    "ledger": Role(reads=(*_REPLAYED, USAGE.name), writes=_names(USAGE)),
    "spans": Role(reads=(*_REPLAYED, SPANS.name), writes=_names(SPANS)),
    "console": Role(reads=(ALL,), groups=("kafka-api", "indexer")),
    "operator": Role(reads=(ALL,), writes=(ALL,), creates=(ALL,), groups=("kafka-api", "indexer")),
    "client": Role(reads=(OPENAI_RESPONSES.name, REPLIES), writes=_names(OPENAI_REQUESTS), groups=("client.",)),
}

TOPIC, GROUP, CLUSTER = 2, 3, 4
RESOURCES = {TOPIC: "topic", GROUP: "group", CLUSTER: "cluster"}
READ, WRITE, CREATE, DESCRIBE, IDEMPOTENT_WRITE = 3, 4, 5, 8, 12
OPERATIONS = {
    READ: "read",
    WRITE: "write",
    CREATE: "create",
    DESCRIBE: "describe",
    IDEMPOTENT_WRITE: "idempotent write",
}
LITERAL, PREFIXED = 3, 4
ALLOW = 3
ANY_HOST = "*"


class Acl(NamedTuple):
    """Permission of a Kafka user, with the numbers of the protocol."""

    resource: int
    name: str
    pattern: int
    user: str
    operation: int

    def described(self) -> tuple[str, str, str, str]:
        """Return user, resource, its name and the operation for display; a `*` stands for any rest of the name."""
        name = f"{self.name}*" if self.pattern == PREFIXED else self.name
        return self.user, RESOURCES[self.resource], name, OPERATIONS[self.operation]


def acls_of(settings: KafkaSettings, role: Role, user: str) -> list[Acl]:
    """Return the ACLs that grant a role to a Kafka user."""

    def granted(resource: int, names: Sequence[str], operation: int) -> list[Acl]:
        return [
            Acl(resource, settings.topic(name), PREFIXED if _is_prefix(name) else LITERAL, user, operation)
            for name in names
        ]

    found = [
        *granted(TOPIC, (ALL,), DESCRIBE),
        *granted(TOPIC, role.reads, READ),
        *granted(TOPIC, role.writes, WRITE),
        *granted(TOPIC, role.creates, CREATE),
        *granted(GROUP, role.groups, READ),
    ]
    if not role.writes:
        # Every client gets the id of a producer when it connects. A broker gives it also to a user that may write.
        found.append(Acl(CLUSTER, "kafka-cluster", LITERAL, user, IDEMPOTENT_WRITE))
    return found


async def create_acls(settings: KafkaSettings, acls: Sequence[Acl]) -> None:
    """Create ACLs on the broker, which keeps existing ones. Raises KafkaUnusable."""
    admin = await connected_admin(settings)
    try:
        for acl in acls:
            resource = (acl.resource, acl.name, acl.pattern)
            request = CreateAclsRequest(*resource, f"User:{acl.user}", ANY_HOST, acl.operation, ALLOW)
            response = await admin._send_request(request)
            for code, _ in response.creation_responses:
                if code:
                    raise error_of(code)
    except (KafkaError, OSError) as error:
        text = f"the ACLs cannot be created on {settings.bootstrap}: {error}"
        raise KafkaUnusable(
            f"{text}; check that it has an authorizer, and that this user may alter the cluster"
        ) from error
    finally:
        await admin.close()


def _is_prefix(name: str) -> bool:
    return not name or name.endswith(".")
