"""Which topics a client of the Kafka API may name in `reply-topic`."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from forebay.events.topics import OPENAI_RESPONSES, topic_named
from forebay.ingress.errors import Unusable

TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")  # what Kafka takes
PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,249}")


class ReplyTopics:
    """The topics that responses may go to: the default one, and those that match a pattern and are none of forebay's.

    Attributes:
        default: full name of the topic for requests that name none.
    """

    def __init__(self, namespace: str, patterns: Sequence[str] = ()) -> None:
        self.default = f"{namespace}.{OPENAI_RESPONSES.name}"
        self._patterns = tuple(patterns) or (f"{namespace}.replies.*",)

    def __contains__(self, topic: str) -> bool:
        if not TOPIC.fullmatch(topic) or topic.startswith("__") or _is_named_as_ours(topic):
            return False
        return any(fnmatchcase(topic, pattern) for pattern in self._patterns)

    def __str__(self) -> str:
        return ", ".join((self.default, *self._patterns))


def require_patterns(patterns: Sequence[str]) -> None:
    """Raises Unusable for a pattern that no name of a topic can match."""
    for pattern in patterns:
        if not PATTERN.fullmatch(pattern):
            raise Unusable(
                f"--reply-topic {pattern!r} is no pattern of topic names; it takes 1 to 249 letters, digits, dots, "
                "dashes, underscores, and * and ? for any characters and for one"
            )


def _is_named_as_ours(topic: str) -> bool:
    """Whether this is the name of a topic of forebay in some namespace."""
    parts = topic.split(".")
    for first in range(1, len(parts)):
        try:
            topic_named(".".join(parts[first:]))
        except KeyError:
            continue
        return True
    return False
