"""Connection settings for Kafka: bootstrap servers, namespace, and security properties.

Properties have librdkafka's names (`security.protocol`, `sasl.username`, …), so kcat, rpk and forebay can share one
`client.properties` file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError, LogUnavailable
from forebay.transport.certificates import ReloadedTls

if TYPE_CHECKING:
    from ssl import SSLContext

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
REQUEST_MS = 10_000  # a broker that does not respond for this long counts as unreachable
# With aiokafka's default of 100 ms, two routers, two workers and an ingress tried to reconnect 350 times per second
# during an outage. Joining a consumer group waits equally long after a rejection, so more would delay the Kafka API.
RETRY_BACKOFF_MS = 250


class KafkaUnusable(LogError):
    """Kafka is unreachable or misconfigured. The text says what to change."""


class KafkaUnreachable(KafkaUnusable, LogUnavailable):
    """Kafka cannot be reached now. A later attempt may succeed."""


class KafkaSettings(msgspec.Struct, frozen=True):
    """Connection settings for Kafka. The namespace prefixes all topic and group names, without the dot."""

    bootstrap: str
    namespace: str = "forebay"
    properties: Mapping[str, str] = {}

    def topic(self, name: str) -> str:
        return f"{self.namespace}.{name}"

    def client_options(self) -> dict[str, Any]:
        """Return the options of every aiokafka client. Raises KafkaUnusable for an invalid property."""
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
                raise KafkaUnusable(unknown_name("Kafka property", name, sorted({*PLAIN, *CERTIFICATES})))
        protocol = options.get("security_protocol", "PLAINTEXT")
        if protocol.startswith("SASL") and not ("sasl_plain_username" in options and "sasl_plain_password" in options):
            raise KafkaUnusable(f"security.protocol is {protocol}; set sasl.username and sasl.password, too")
        if "SSL" in options.get("security_protocol", "").split("_"):
            options["ssl_context"] = _ssl_context(certificates)
        elif certificates:
            raise KafkaUnusable(
                f"certificates are configured, but security.protocol is {protocol}; set it to SSL or SASL_SSL"
            )
        return options


def read_properties(path: Path) -> dict[str, str]:
    """Return the `name=value` pairs of a properties file. Raises KafkaUnusable that names the first invalid line."""
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
            raise KafkaUnusable(f"{path}:{number}: expected name=value")
        properties[name.strip()] = value.strip()
    return properties


def _ssl_context(certificates: Mapping[str, str]) -> "SSLContext":
    # Imported here, because options of commands use these settings, and --help should not wait for a Kafka client.
    from aiokafka.helpers import create_ssl_context  # noqa: PLC0415

    files = [Path(certificates[name]) for name in ("cafile", "certfile", "keyfile") if name in certificates]

    def load() -> "SSLContext":
        try:
            for file in files:
                file.open("rb").close()  # the error of OpenSSL would not name the file
            context: SSLContext = create_ssl_context(**{"password": "", **certificates})  # without, OpenSSL asks
        except OSError as error:  # includes ssl.SSLError
            raise ConfigError(f"the certificates of the Kafka properties cannot be used: {error}") from error
        return context

    try:
        return ReloadedTls(load, files)
    except ConfigError as error:
        raise KafkaUnusable(str(error)) from error
