"""How to reach Kafka: addresses, namespace, and the security properties that every Kafka client knows.

Properties have librdkafka's names (`security.protocol`, `sasl.username`, …), so that one `client.properties`
serves kcat, rpk and forebay alike.
"""

from collections.abc import Mapping
from pathlib import Path
from ssl import SSLContext, SSLError
from typing import Any

import msgspec
from aiokafka.helpers import create_ssl_context

from forebay.transport.base import LogError

PLAIN = {
    "security.protocol": "security_protocol",
    "sasl.mechanism": "sasl_mechanism",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
    "client.id": "client_id",
}
CERTIFICATES = {
    "ssl.ca.location": "cafile",
    "ssl.certificate.location": "certfile",
    "ssl.key.location": "keyfile",
    "ssl.key.password": "password",
}
REQUEST_MS = 10_000  # a broker that does not answer for this long is gone
# With aiokafka's 100 ms two routers, two workers and an ingress tried to reconnect 350 times a second during an outage.
# Joining a consumer group waits as long after a refusal, so more would delay a take-over.
RETRY_BACKOFF_MS = 250


class KafkaUnusable(LogError):
    """Kafka cannot be worked with as it is; the text says what to change."""


class KafkaSettings(msgspec.Struct, frozen=True):
    """Where Kafka is and how to log in. `bootstrap` is `host:port`, several separated by commas."""

    bootstrap: str
    namespace: str = "forebay"
    properties: Mapping[str, str] = {}

    def topic(self, name: str) -> str:
        """The topic's name on the broker."""
        return f"{self.namespace}.{name}"

    def client_options(self) -> dict[str, Any]:
        """Keyword arguments for every aiokafka client. Raises KafkaUnusable for a property that makes no sense."""
        options: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "request_timeout_ms": REQUEST_MS,
            "retry_backoff_ms": RETRY_BACKOFF_MS,
        }
        certificates: dict[str, str] = {}
        for name, value in self.properties.items():
            if name in PLAIN:
                options[PLAIN[name]] = value
            elif name in CERTIFICATES:
                certificates[CERTIFICATES[name]] = value
            else:
                known = ", ".join(sorted({*PLAIN, *CERTIFICATES}))
                raise KafkaUnusable(f"the Kafka property {name} is not known; these are: {known}")
        if "SSL" in options.get("security_protocol", "").split("_"):
            options["ssl_context"] = _ssl_context(certificates)
        elif certificates:
            raise KafkaUnusable("certificates are given, but security.protocol is neither SSL nor SASL_SSL")
        return options


def read_properties(path: Path) -> dict[str, str]:
    """The `name=value` lines of a properties file. Raises KafkaUnusable with the line that is none."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KafkaUnusable(f"{path} cannot be read: {error}") from error
    properties = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith(("#", "!")):
            continue
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise KafkaUnusable(f"{path}:{number}: {text!r} is not name=value")
        properties[name.strip()] = value.strip()
    return properties


def _ssl_context(certificates: Mapping[str, str]) -> SSLContext:
    try:
        context: SSLContext = create_ssl_context(**certificates)
    except (OSError, SSLError) as error:
        raise KafkaUnusable(f"the certificates of the Kafka properties cannot be used: {error}") from error
    return context
