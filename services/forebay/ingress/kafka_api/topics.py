"""The topics to which a client of the Kafka API may direct responses, with the header `reply-topic`."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from forebay.events.topics import OPENAI_RESPONSES, topic_named
from forebay.ingress.errors import Unusable

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # valid names in Kafka
PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,249}")


class ReplyTopics:
    """The topics to which a client may direct responses, as a container of full topic names.

    Names of forebay's own topics are never contained.

    Args:
        patterns: patterns of topic names; empty for `<namespace>.replies.*`.

    Attributes:
        default: full name of the topic for responses to requests without the header `reply-topic`.
    """

    def __init__(self, namespace: str, patterns: Sequence[str] = ()) -> None:
        self.default = f"{namespace}.{OPENAI_RESPONSES.name}"
        self._patterns = tuple(patterns) or (f"{namespace}.replies.*",)

    def __contains__(self, topic: str) -> bool:
        if not TOPIC.fullmatch(topic) or topic.startswith("__") or _is_forebay_topic(topic):
            return False
        return any(fnmatchcase(topic, pattern) for pattern in self._patterns)

    def __str__(self) -> str:
        return ", ".join((self.default, *self._patterns))


def require_patterns(patterns: Sequence[str]) -> None:
    """Raise Unusable for a pattern of `--reply-topic` with a length or characters that topic names cannot have."""
    for pattern in patterns:
        if not PATTERN.fullmatch(pattern):
            raise Unusable(
                f"invalid --reply-topic {pattern!r}; a pattern has 1 to 249 letters, digits, dots, "
                "dashes, underscores, * for any characters and ? for one"
            )


def _is_forebay_topic(topic: str) -> bool:
    parts = topic.split(".")
    for first in range(1, len(parts)):
        try:
            topic_named(".".join(parts[first:]))
        except KeyError:
            continue
        return True
    return False
