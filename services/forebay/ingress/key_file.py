"""A file of API keys: plain keys, and records of `forebay keys create`, which have the hash of a key and its tenant."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from forebay.events.codec import DecodeError, decode
from forebay.events.keys import KeySet
from forebay.events.topics import KEYS
from forebay.runtime.errors import ConfigError
from forebay.runtime.files import FILE_BYTES_MAX, read_text

CHARS_MAX = 4_096  # clients send a key or a token in an HTTP header
KEY = re.compile(r"[!-+\--~]+")  # visible ASCII characters except the comma
RECORD = "{"  # first character of a line with a record


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The keys in a file.

    Attributes:
        plain: keys without a tenant.
        tenants: records of the keys of tenants by id of the key. Of several for a key, the last one counts.
    """

    path: Path
    plain: tuple[str, ...] = field(repr=False)
    tenants: dict[str, KeySet]


def read_keys(path: Path) -> KeyFile:
    """Return the keys in a file. Raises ConfigError if the file cannot be read, has no key or an invalid line."""
    return parse_keys(path, read_text(_where(path), path, FILE_BYTES_MAX + 1))


def parse_keys(path: Path, text: str) -> KeyFile:
    """Return the keys in the text of a file. Raises ConfigError, which names the line and never a key."""
    where, plain, tenants = _where(path), list[str](), dict[str, KeySet]()
    if len(text) > FILE_BYTES_MAX:
        raise ConfigError(f"{where} is larger than {FILE_BYTES_MAX} bytes; expected one key per line")
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):
        if line.startswith(RECORD):
            try:
                event: KeySet = decode(KEYS, line.encode())
            except DecodeError as error:
                raise ConfigError(f"{where}: line {number} is no record of `forebay keys create`: {error}") from None
            tenants[event.key_id] = event
        elif line:
            plain += require_keys(where, [line], f"line {number}")
    if not plain and not tenants:
        raise ConfigError(f"{where} has no key; write one per line, for example from `openssl rand -hex 32`")
    return KeyFile(path, tuple(dict.fromkeys(plain)), tenants)


def require_keys(where: str, keys: Iterable[str], name: str = "") -> list[str]:
    """Return keys. Raises ConfigError if one is empty or invalid; the error calls it `name`, or by its number."""
    checked = list(keys)
    for number, key in enumerate(checked, 1):
        if len(key) > CHARS_MAX or not KEY.fullmatch(key):
            text = f"expected 1 to {CHARS_MAX} visible ASCII characters without spaces and commas"
            problem = "invalid" if key else "empty"
            raise ConfigError(f"{where}: {name or f'key {number}'} is {problem}; {text}")
    return checked


def _where(path: Path) -> str:
    return f"--api-key-file {path}"
