"""Formats of log lines."""

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Fields that the message of an access record contains already.
IN_MESSAGE = frozenset({"method", "path", "status", "topic", "partition", "offset"})


class TextFormatter(logging.Formatter):
    """Formatter of text lines: time, level, logger and message, then the fields of the record as `name=value`."""

    def __init__(self) -> None:
        super().__init__(TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - name of the base class
        line = super().formatMessage(record)
        return line + "".join(f" {name}={value}" for name, value in _fields(record).items() if name not in IN_MESSAGE)


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: `time`, `level`, `logger`, `message`, the fields of the record, and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _encodable(record.getMessage()),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = _encodable(self.formatException(record.exc_info))
        return msgspec.json.encode(line, enc_hook=str).decode()


def logs_json() -> bool:
    """Return whether this process logs JSON lines."""
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()
