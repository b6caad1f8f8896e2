"""Address of an ingress, with the certificate and the rules that depend on the address."""

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from forebay.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate of a server and its private key, as PEM files. Raises ConfigError if they cannot be used as a pair.

    Attributes:
        certfile: the certificate, followed by the certificates of intermediate authorities.
        keyfile: the private key; None if `certfile` contains it.
    """

    certfile: Path
    keyfile: Path | None = None

    def __post_init__(self) -> None:
        self.load()

    @property
    def files(self) -> list[Path]:
        return [file for file in (self.certfile, self.keyfile) if file is not None]

    def load(self) -> ssl.SSLContext:
        """Return a TLS context of a server with these files. Raises ConfigError if they cannot be used."""
        pair = f"--ssl-certfile {self.certfile}" + ("" if self.keyfile is None else f" --ssl-keyfile {self.keyfile}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        for file in self.files:
            try:
                file.open("rb").close()
            except OSError as error:
                raise ConfigError(f"cannot read {file}: {error.strerror}; check {pair}") from error
        try:
            context.load_cert_chain(self.certfile, self.keyfile, _reject_encrypted)
        except _Encrypted:
            raise ConfigError(f"{pair}: the private key is encrypted; decrypt it with `openssl pkey`") from None
        except ssl.SSLError as error:
            reason = {
                "KEY_VALUES_MISMATCH": "the private key does not belong to the certificate",
                "KEY_TYPE_MISMATCH": "the private key does not belong to the certificate",
            }.get(error.reason or "", "expected a certificate and its private key in PEM format")
            raise ConfigError(f"{pair}: {reason}") from None
        return context


class _Encrypted(Exception):
    pass


def _reject_encrypted() -> NoReturn:
    raise _Encrypted


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which an ingress serves HTTP, and the KServe API at `grpc_port` unless that is None.

    Attributes:
        allow_hosts: names accepted in the header `Host`, in addition to the names of a loopback address.
        allow_anonymous: whether clients beyond loopback may be served without an API key.
    """

    host: str
    port: int
    allow_hosts: tuple[str, ...] = ()
    allow_anonymous: bool = False
    tls: TlsFiles | None = None
    grpc_port: int | None = None

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    @property
    def own_url(self) -> str:
        """URL at which a process of this machine reaches the ingress."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - not bound here
        return f"{self.scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def is_open(self, address: str, *, has_key: bool) -> bool:
        """Return whether other machines may send requests without an API key to the listening socket at `address`.

        Raises ConfigError if they could, and `allow_anonymous` is false.
        """
        if has_key or is_loopback(address):
            return False
        if not self.allow_anonymous:
            raise ConfigError(
                f"--host {self.host} is not a loopback address, so other machines could send requests; set an API key "
                "with --api-key or FOREBAY_API_KEY, or serve everybody with --allow-anonymous"
            )
        return True


def is_loopback(address: str) -> bool:
    """Return whether only this machine can connect to an IP address."""
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
