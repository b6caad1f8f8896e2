"""Filter of the request list, as a line of text that a user types."""

from typing import get_args

from forebay.events.names import unknown_name
from forebay.replay.catalog.facts import RequestState

UNSUCCESSFUL = "unsuccessful"  # rejected, aborted or failed
STATES: tuple[str, ...] = (*get_args(RequestState), UNSUCCESSFUL)
HINT = "text of the ID, state:NAME, worker:ID, model:NAME, slow:MS"


class FilterInvalid(ValueError):
    """A filter contains an invalid value. The message is for users."""


def parse_filter(text: str) -> dict[str, str]:
    """Return the query parameters of `GET /v1/console/requests` for a filter.

    Args:
        text: words separated by spaces. `state:`, `worker:`, `model:` and `slow:` (ms) start a condition. All other
            words together are a part of the request ID. A condition without a value is ignored.

    Raises:
        FilterInvalid: `slow:` has no valid number, or `state:` does not begin exactly one name of a state.
    """
    found: dict[str, str] = {}
    ids = []
    for word in text.split():
        name, colon, value = word.partition(":")
        if not colon or name not in ("state", "worker", "model", "slow"):
            ids.append(word)
        elif value and name == "slow":
            found["slow_ms"] = _milliseconds(value)
        elif value and name == "state":
            state = _state(value)
            found |= {"failed": "true"} if state == UNSUCCESSFUL else {"state": state}
        elif value:
            found[name] = value
    if ids:
        found["q"] = " ".join(ids)
    return found


def _milliseconds(value: str) -> str:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 86_400_000:  # a day, the limit of a console
        raise FilterInvalid(f"slow:{value}: expected milliseconds from 0 to 86400000, for example slow:500")
    return f"{number:g}"


def _state(value: str) -> str:
    """Return the state that begins with `value`, so that the list changes while its name is typed."""
    if value in STATES:
        return value
    names = [name for name in STATES if name.startswith(value)]
    if not names:
        raise FilterInvalid(unknown_name("state", value, STATES))
    if len(names) > 1:
        raise FilterInvalid(f"state:{value} may be {' or '.join(names)}")
    return names[0]
