"""Permissions of each role on the topics and consumer groups of a namespace, and the ACLs that grant them on a broker.

Each role is the Kafka user of one kind of process. `tests/integration/test_security.py` compares this table with the
processes on a broker with an authorizer.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiokafka.errors import KafkaError
from aiokafka.protocol.admin import CreateAclsRequest

from forebay.events.topics import DECISIONS, GROUPS, INPUTS, SNAPSHOTS
from forebay.transport.kafka.errors import error_of
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable
from forebay.transport.kafka.topics import connected_admin


class Role(NamedTuple):
    """Names of topics that a role may use, without the namespace and separated by spaces. It may list all topics.

    Attributes:
        extends: topics to which it may add partitions.
        groups: consumer groups in which it may be a member. This includes their committed offsets.
    """

    reads: str
    writes: str = ""
    creates: str = ""
    extends: str = ""
    groups: str = ""


# A group's journal with everything that its replay reads.
_REPLAYED = " ".join(topic.name for topic in (*INPUTS, DECISIONS, SNAPSHOTS, GROUPS))
# A `*` at the end of a name stands for any rest of it.
ROLES: Mapping[str, Role] = {
    "ingress": Role(
        reads=f"{_REPLAYED} openai-requests tokens heartbeats models answers keys",
        writes="requests control answers openai-responses replies.*",
        groups="kafka-api",
    ),
    "router": Role(
        reads=f"{_REPLAYED} heartbeats tokens",
        writes="decisions snapshots groups heartbeats fleet control tokens dead-letters work.*",
        extends="work.*",
    ),
    "worker": Role(
        reads="groups decisions fleet control progress heartbeats models answers tokens work.*",
        writes="progress tokens kv-events metrics models",
        creates="work.*",
    ),
    "picker": Role(reads=f"{_REPLAYED} tokens heartbeats models", writes="requests progress"),
    "indexer": Role(reads=f"{_REPLAYED} models heartbeats", groups="indexer"),
    "planner": Role(reads=f"{_REPLAYED} scaling heartbeats", writes="scaling"),
    "shadow": Role(reads=f"{_REPLAYED} shadow", writes="shadow"),
    "ledger": Role(reads=f"{_REPLAYED} usage", writes="usage"),
    "spans": Role(reads=f"{_REPLAYED} spans", writes="spans"),
    "console": Role(reads="*", groups="kafka-api indexer"),
    "operator": Role(reads="*", writes="*", creates="*", groups="kafka-api indexer"),
    "client": Role(reads="openai-responses replies.*", writes="openai-requests", groups="client.*"),
}


# Numbers of the protocol.
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
OPERATIONS = {"read": 3, "write": 4, "create": 5, "alter": 7, "describe": 8, "idempotent write": 12}
LITERAL, PREFIXED = 3, 4
ALLOW = 3
ANY_HOST = "*"


class Acl(NamedTuple):
    """Permission of a Kafka user. A `*` at the end of the name stands for any rest of it."""

    user: str
    resource: str
    name: str
    operation: str


def acls_of(settings: KafkaSettings, role: Role, user: str) -> list[Acl]:
    """Return the ACLs that grant a role to a Kafka user."""
    grants = (
        ("topic", "*", "describe"),
        ("topic", role.reads, "read"),
        ("topic", role.writes, "write"),
        ("topic", role.creates, "create"),
        ("topic", role.extends, "alter"),
        ("group", role.groups, "read"),
    )
    found = [
        Acl(user, resource, settings.topic(name), operation)
        for resource, names, operation in grants
        for name in names.split()
    ]
    if not role.writes:
        # Every client gets the id of a producer when it connects. A broker gives it also to a user that may write.
        found.append(Acl(user, "cluster", "kafka-cluster", "idempotent write"))
    return found


async def create_acls(settings: KafkaSettings, acls: Sequence[Acl]) -> None:
    """Create ACLs on the broker, which keeps existing ones. Raises KafkaUnusable."""
    admin = await connected_admin(settings)
    try:
        for acl in acls:
            name, pattern = acl.name.removesuffix("*"), PREFIXED if acl.name.endswith("*") else LITERAL
            resource, operation = RESOURCES[acl.resource], OPERATIONS[acl.operation]
            request = CreateAclsRequest(resource, name, pattern, f"User:{acl.user}", ANY_HOST, operation, ALLOW)
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
