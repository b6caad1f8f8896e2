"""A cluster over SASL_SSL, rediss:// and HTTPS, with one Kafka user per role, on a broker with an authorizer."""

import asyncio
import contextlib
import re
import secrets
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio
import redis
import trustme
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, TopicAuthorizationFailedError
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization

from forebay.events.topics import FIXED_TOPICS, work_topic
from forebay.processes.service import leases_at, redis_at
from forebay.transport.base import Draft, LeaseError, LogError
from forebay.transport.kafka.acls import ROLES, acls_of, create_acls
from forebay.transport.kafka.group import require_joinable
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings, KafkaUnusable
from forebay.transport.kafka.topics import create_topics
from forebay.transport.limits import LimitsUnavailable
from forebay.transport.redis.leases import RedisLeases
from forebay.transport.redis.limits import RedisLimits
from infra.kafka.kafka import HOST, Broker, BrokerError, start, stop
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY, PLAN, POOL, Cluster
from tests.harness.local import Missing, free_ports, local_redis
from tests.integration.conftest import RUN, available_or_skipped
from tests.integration.stream_clients import TIMEOUT_S

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]
PATIENCE_S = 30.0
TOPICS = [*(topic.name for topic in FIXED_TOPICS), work_topic(POOL).name]
USERS = [*ROLES, "nobody"]
ONE_SLOT = msgspec.structs.replace(PLAN, slots=1)  # the router has to add a slot for the second worker
MECHANISM = "SCRAM-SHA-512"


@dataclass
class Security:
    """Certificates, passwords and addresses of a broker and of Redis.

    Attributes:
        open: address of the broker for its super user, without encryption.
        kafka: address with SASL_SSL.
    """

    folder: Path
    authority: trustme.CA = field(default_factory=lambda: trustme.CA(key_type=trustme.KeyType.ECDSA))
    passwords: dict[str, str] = field(default_factory=lambda: {user: secrets.token_hex(8) for user in USERS})
    open: str = ""
    kafka: str = ""
    redis_url: str = ""

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def certificate(self, name: str, *, not_after: datetime | None = None) -> Path:
        """Write a certificate for this machine, with its key before it, and return the file."""
        issued = self.authority.issue_cert(HOST, key_type=trustme.KeyType.ECDSA, not_after=not_after)
        key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
        pkcs8 = key.private_bytes(  # the only format that Kafka reads
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self.folder / f"{name}.pem"
        path.write_bytes(pkcs8 + b"".join(one.bytes() for one in issued.cert_chain_pems))
        return path

    def properties(self, user: str, **changes: str) -> dict[str, str]:
        found = {"security.protocol": "SASL_SSL", "ssl.ca.location": str(self.ca), "sasl.mechanism": MECHANISM}
        found |= {"sasl.username": user, "sasl.password": self.passwords[user]}
        return found | {name.replace("_", "."): value for name, value in changes.items()}

    def settings(self, namespace: str, user: str) -> KafkaSettings:
        return KafkaSettings(self.kafka, namespace, self.properties(user))

    def config(self, user: str, name: str = "", **changes: str) -> tuple[str, str]:
        """Return the options with the properties of a user."""
        path = self.folder / f"{name or user}.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in self.properties(user, **changes).items()))
        return "--kafka-config", str(path)


def broker_settings(port: int, certificate: Path) -> tuple[str, ...]:
    listeners = f"PLAINTEXT://{HOST}:{port},SASL_SSL://{HOST}:{port + 2}"
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    return (
        f"listeners={listeners},CONTROLLER://{HOST}:{port + 1}",
        f"advertised.listeners={listeners}",
        "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL",
        f"sasl.enabled.mechanisms={MECHANISM}",
        f"listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={module} required;",
        "ssl.keystore.type=PEM",
        f"ssl.keystore.location={certificate}",
        "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users=User:ANONYMOUS",
    )


@contextlib.contextmanager
def secure_kafka(security: Security) -> Iterator[None]:
    """Run Apache Kafka with SASL_SSL, SCRAM and an authorizer, and a user per role. Raises Missing."""
    port = free_ports(3)
    data = security.folder / "kafka"
    settings = broker_settings(port, security.certificate("broker"))
    try:
        process = start(Broker(port, data, ends_with_starter=True, settings=settings))
    except BrokerError as error:
        raise Missing(str(error)) from error
    try:
        security.open, security.kafka = f"{HOST}:{port}", f"{HOST}:{port + 2}"
        info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        users = [
            UserScramCredentialUpsertion(user, info, password.encode()) for user, password in security.passwords.items()
        ]
        admin = AdminClient({"bootstrap.servers": security.open})
        for done in admin.alter_user_scram_credentials(users).values():
            done.result(PATIENCE_S)
        yield
    finally:
        stop(data)
        process.wait()


@contextlib.contextmanager
def tls_before(port: int, certificate: Path) -> Iterator[int]:
    """Serve TLS on the yielded port, for a server without TLS on `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    loop, own, ready = asyncio.new_event_loop(), free_ports(1), threading.Event()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(HOST, port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def main() -> None:
        async with await asyncio.start_server(serve, HOST, own, ssl=context):
            ready.set()
            await asyncio.Event().wait()

    running = loop.create_task(main())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(running)
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield own
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join()


@contextlib.contextmanager
def secure_redis(security: Security) -> Iterator[None]:
    """Run Redis behind TLS, with a password. Raises Missing."""
    folder = security.folder / "redis"
    folder.mkdir()
    password = security.passwords["operator"]
    with local_redis(folder) as url:
        with redis.Redis.from_url(url) as client:
            client.config_set("requirepass", password)
        port = int(re.findall(r":(\d+)/", url)[0])
        with tls_before(port, security.certificate("redis")) as own:
            security.redis_url = f"rediss://:{password}@{HOST}:{own}/0?ssl_ca_certs={security.ca}"
            yield


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Security]:
    made = Security(tmp_path_factory.mktemp("security"))
    made.authority.cert_pem.write_to_path(str(made.ca))
    trustme.CA(key_type=trustme.KeyType.ECDSA).cert_pem.write_to_path(str(made.folder / "other.pem"))
    with available_or_skipped(secure_kafka(made)), available_or_skipped(secure_redis(made)):
        yield made


class SecureCluster(Cluster):
    """Cluster whose processes use the encrypted listeners. This process is the super user."""

    def __init__(self, security: Security) -> None:
        super().__init__(
            security.open, security.redis_url, f"{RUN}-secure", security.folder, ONE_SLOT, spawn=fork_server.spawn
        )
        self.secure = security.kafka

    @property
    def where(self) -> tuple[str, ...]:
        return "--kafka", self.secure, "--namespace", self.namespace


async def test_a_cluster_runs_with_encryption_and_the_permissions_of_each_role(security: Security) -> None:
    async with SecureCluster(security) as cluster:
        unencrypted = ("--kafka", security.open, "--namespace", cluster.namespace)
        code, out = await cluster.command("acls", "topics", "acls", "--apply", *unencrypted, within_s=TIMEOUT_S)
        assert (code, out.split()[0]) == (0, "created")
        cluster.router("r1", *security.config("router"))
        for worker in ("w1", "w2"):
            cluster.worker(worker, *security.config("worker"))
        port = free_ports(2)
        options = ("--ssl-certfile", str(security.certificate("ingress")), "--admin-port", str(port + 1))
        cluster.ingress("i1", *security.config("ingress"), *options)
        indexer = [FOREBAY, "indexer", *cluster.where, "--port", str(port), *security.config("indexer")]
        cluster.processes.start("x1", indexer)
        await cluster.until_owned()
        await cluster.until_members("w1", "w2")
        trusted = ssl.create_default_context(cafile=security.ca)
        url = cluster.urls["i1"].replace("http:", "https:")
        async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=TIMEOUT_S) as client:

            async def is_ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/ready")).status_code == httpx.codes.OK
                return False

            await cluster.until("the ingress is ready", is_ready)
            body = {"model": "forebay-default", "prompt": "Once upon a time", "max_tokens": 4}
            response = await client.post("/v1/completions", json=body)
            assert response.json()["usage"]["completion_tokens"] == 4
            explained = await client.get(f"/v1/requests/{response.json()['id']}/explain")
            assert explained.status_code == httpx.codes.OK

            assert (await client.post("/pause", headers=cluster.admin_headers)).status_code == httpx.codes.NOT_FOUND
            control = ("control", "adapters", "--url", f"http://{HOST}:{port + 1}", *cluster.admin_options)
            assert (await cluster.command("control", *control, within_s=TIMEOUT_S))[0] == 0
            created = ("keys", "create", "--tenant", "acme", "--rpm", "1", *cluster.where, *security.config("operator"))
            code, key = await cluster.command("keys", *created, within_s=TIMEOUT_S)
            headers = {"authorization": f"Bearer {key.strip()}"}

            async def is_limited() -> bool:
                """Return whether the limit of the key is reached. The ingress learns of the key later."""
                found = await client.post("/v1/completions", json=body, headers=headers)
                return found.status_code == httpx.codes.TOO_MANY_REQUESTS

            await cluster.until("the limit of the key is reached", is_limited)

            async def is_counted() -> bool:
                """Return whether Redis counts. A first connection may take longer than the ingress waits for it."""
                return "forebay_ingress_limits_degraded 0.0" in (await client.get("/metrics")).text

            await cluster.until("Redis counts the requests", is_counted)
            with redis.Redis.from_url(security.redis_url) as store:
                assert len(store.keys(f"{cluster.namespace}:limits:*")) == 1

        async def is_followed() -> bool:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                with contextlib.suppress(httpx.TransportError):
                    groups = (await client.get(f"http://{HOST}:{port}/groups")).json()["groups"]
                    return any(one.get("state") == "following" for one in groups)
            return False

        await cluster.until("the indexer follows the group", is_followed)
        line = security.folder / "line.jsonl"
        line.write_text('{"model": "forebay-default", "prompt": "Once", "max_tokens": 2}\n')
        produce = ("produce", str(line), "--wait", *cluster.where, *security.config("client"))
        code, out = await cluster.command("produce", *produce, within_s=TIMEOUT_S)
        assert (code, out.count('"completion_tokens":2'), denials(security)) == (0, 1, [])
        await cluster.require_verified("forebay-default", *security.config("console"))
        listed = ("topics", "list", "--lag", *cluster.where, *security.config("console"))
        assert (await cluster.command("lag", *listed, within_s=TIMEOUT_S))[0] == 0
        assert denials(security) == []


def denials(security: Security) -> list[str]:
    """Return the operations that the broker has denied so far."""
    return re.findall(
        "Principal = .*Denied.* on resource = [^ ]*", (security.folder / "kafka" / "kafka.log").read_text()
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def producers(security: Security) -> AsyncIterator[dict[str, AIOKafkaProducer]]:
    """Yield a producer per role, in a namespace with all topics and the ACLs of all roles."""
    namespace = f"{RUN}-roles"
    settings = KafkaSettings(security.open, namespace)
    await create_topics(settings, PLAN, [POOL])
    await create_acls(settings, [acl for role in ROLES for acl in acls_of(settings, ROLES[role], role)])
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for user in USERS:
            found[user] = AIOKafkaProducer(**security.settings(namespace, user).client_options())
            await found[user].start()
            stack.push_async_callback(found[user].stop)
        yield found


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ssl.ca.location": "other.pem"}, "set ssl.ca.location to the certificate of the authority"),
        ({"ssl.ca.location": "none.pem"}, "No such file or directory: '.*none.pem'"),
        ({"sasl.password": "guess"}, "check sasl.username and sasl.password"),
        ({"sasl.username": "nobody"}, "an ACL is missing; `forebay topics acls` lists"),
    ],
)
async def test_a_connection_that_kafka_or_tls_rejects_says_what_to_do(
    security: Security, changes: dict[str, str], text: str
) -> None:
    properties = security.properties(changes.get("sasl.username", "router"))
    for name, value in changes.items():
        properties[name] = str(security.folder / value) if value.endswith(".pem") else value
    with pytest.raises(KafkaUnusable, match=text) as raised:
        await KafkaLog.open(KafkaSettings(security.kafka, "n", properties))
    assert "\n" not in str(raised.value)


async def test_an_expired_certificate_is_reported(security: Security) -> None:
    expired = security.certificate("expired", not_after=datetime.now(UTC) - timedelta(days=1))
    with tls_before(int(security.open.rpartition(":")[2]), expired) as port:
        settings = KafkaSettings(f"{HOST}:{port}", "n", security.properties("router"))
        with pytest.raises(KafkaUnusable, match=r"certificate has expired.*renew the certificate of Kafka"):
            await KafkaLog.open(settings)
        url = f"rediss://{HOST}:{port}/0?ssl_ca_certs={security.ca}"
        with pytest.raises(LeaseError, match="renew the certificate of Redis"):
            leases_at(url, "n").groups()
        with pytest.raises(LimitsUnavailable, match="renew the certificate of Redis"):
            await RedisLimits(redis_at(url), "n").beat("i1")


async def test_a_missing_permission_names_topic_and_operation(
    security: Security, producers: dict[str, AIOKafkaProducer]
) -> None:
    await producers["router"].send_and_wait(f"{RUN}-roles.decisions", b"x", partition=0)
    log = await KafkaLog.open(security.settings(f"{RUN}-roles", "client"))
    missing = f"{RUN}-roles.decisions.*: an ACL is missing; `forebay topics acls` lists"
    try:
        with pytest.raises(LogError, match=f"Kafka rejected records for decisions/0: .*{missing}"):
            await log.append([Draft("decisions", 0, b"x")])
        with pytest.raises(LogError, match=f"decisions/0 cannot be read from Kafka: .*{missing}"):
            await log.read("decisions", 0, 0, 1)
    finally:
        await log.close()
    settings = security.settings(f"{RUN}-roles", "router")
    with pytest.raises(LogError, match=r"cannot join.*indexer: .*an ACL is missing"):
        await require_joinable(settings, "indexer")


async def test_a_redis_that_rejects_a_client_is_reported(security: Security) -> None:
    wrong = security.redis_url.replace(security.passwords["operator"], "guess")
    with pytest.raises(LeaseError, match="check the user and the password in its URL"):
        leases_at(wrong, "n").groups()
    trusting = security.redis_url.partition("?")[0]
    for url in (trusting, f"{trusting}?ssl_ca_certs={security.folder / 'other.pem'}"):
        text = "set ssl_ca_certs in its URL to the certificate of the authority"
        with pytest.raises(LeaseError, match=text) as raised:
            leases_at(url, "n").groups()
        assert "\n" not in str(raised.value)
        with pytest.raises(LimitsUnavailable, match=text) as unavailable:
            await RedisLimits(redis_at(url), "n").beat("i1")
        assert "\n" not in str(unavailable.value)


async def test_renewed_certificates_are_used_by_the_next_connection(security: Security) -> None:
    """Clients that rejected the certificate of a server accept it after the file of the authority was replaced."""
    ca = security.folder / "renewed.pem"
    ca.write_bytes((security.folder / "other.pem").read_bytes())
    url = f"{security.redis_url.partition('?')[0]}?ssl_ca_certs={ca}"
    options = KafkaSettings(security.kafka, "n", security.properties("router", ssl_ca_location=str(ca)))
    kafka = options.client_options()
    rejected, accepted = AIOKafkaProducer(**kafka), AIOKafkaProducer(**kafka)
    with redis.Redis.from_url(url) as client:
        leases = RedisLeases(client, "n")
        limits = RedisLimits(redis_at(url), "n")
        with pytest.raises(LeaseError):
            leases.groups()
        with pytest.raises(LimitsUnavailable):
            await limits.beat("i1")
        with pytest.raises(KafkaConnectionError):
            await rejected.start()
        await rejected.stop()
        ca.write_bytes(security.ca.read_bytes())
        assert leases.groups() == []
        assert (await limits.beat("i1"))[1] == 1
        await accepted.start()
        await accepted.stop()


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("role", USERS)
async def test_a_role_may_write_only_its_topics(producers: dict[str, AIOKafkaProducer], role: str, topic: str) -> None:
    sending = producers[role].send_and_wait(f"{RUN}-roles.{topic}", b"x", key=b"k")
    if role in ROLES and any(fnmatchcase(topic, name) for name in ROLES[role].writes.split()):
        assert (await sending).topic == f"{RUN}-roles.{topic}"
    else:
        with pytest.raises(TopicAuthorizationFailedError):
            await sending
