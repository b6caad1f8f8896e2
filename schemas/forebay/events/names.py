"""Rules for names of models, adapters, pools, workers, services and namespaces, and the error for an unknown name.

Names are used in many places. The namespace and the pool are parts of Kafka topics, a model is a Redis key and a URL
path segment, and all names are metric labels and appear in logs. Names that enter forebay from outside are checked
here: options, leases, and adapters loaded at run time. Records of a log are not checked, so a name that was accepted
once stays readable.
"""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Literal

Kind = Literal["model", "adapter", "pool", "worker", "router", "ingress", "planner", "namespace"]

NAME_CHARS_MAX = 256  # limit of the `Name` type of events
NAMESPACE_CHARS_MAX, POOL_CHARS_MAX = 120, 120  # Kafka allows 249 characters: `<namespace>.work.<pool>`
SHOWN_CHARS_MAX = 64  # characters of an invalid name that a message shows
TOPIC_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
NEAR_MAX = 3  # suggestions for one unknown name
CLOSE = 0.7  # similarity of a suggestion, from 0 to 1
LISTED_MAX = 60  # known names in an error without a suggestion, more than a configuration has fields
WORK = "work"  # `<namespace>.work.<pool>` would also be a topic of the namespace `<namespace>.work`


class NameInvalid(ValueError):
    """A name breaks a rule. The text shows the name, with unprintable characters escaped, and the rule."""


def require_name(kind: Kind, name: str) -> str:
    """Return `name` if it is a valid name for a model, adapter, pool or other `kind`.

    Raises NameInvalid if it is not.
    """
    problem = _topic_problem(kind, name) if kind in ("pool", "namespace") else _text_problem(kind, name)
    if problem is not None:
        raise NameInvalid(f"the {kind} name {_shown(name)} cannot be used: {problem}")
    return name


def require_adapter(name: str, model: str) -> str:
    """Return `name` if it is a valid name for an adapter of `model`.

    Raises:
        NameInvalid: the name breaks a rule for adapters, or is the name of the model.
    """
    if name == model:
        problem = "it is the name of the base model; requests could not tell them apart"
        raise NameInvalid(f"the adapter name {_shown(name)} cannot be used: {problem}")
    return require_name("adapter", name)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error for an unknown name: with similar known names, otherwise with all known names.

    A known name is similar if it begins with `name`, is a dotted path that ends with `name`, or has nearly the same
    letters after the parts that both begin with. So worker-9 is not similar to worker-1. Case makes no difference.

    Args:
        kind: What is named, in the singular, for example `worker`.
        name: The unknown name.
        known: Known names. Of several names that begin with `name`, the first ones are suggested.
    """
    names = list(known)
    close: list[str] = []
    if 1 <= len(name) <= NAME_CHARS_MAX:  # a client may send a name of megabytes, whose comparison takes seconds
        lower = name.lower()
        close = [one for one in names if one.lower().startswith(lower) or one.lower().endswith(f".{lower}")]
        if not close:
            similarity = {one: _similarity(lower, one.lower()) for one in names}
            close = sorted((one for one in names if similarity[one] >= CLOSE), key=similarity.__getitem__, reverse=True)
    shown = repr(name) if len(name) <= NAME_CHARS_MAX else f"{name[:SHOWN_CHARS_MAX]!r}..."
    kinds = f"{kind[:-1]}ies" if kind.endswith("cy") else f"{kind}s"
    if close:
        hint = f"did you mean {' or '.join(close[:NEAR_MAX])}?"
    elif not names:
        hint = f"there are no {kinds}"
    elif len(names) > LISTED_MAX:
        hint = f"none of the {len(names)} {kinds} is similar"
    else:
        hint = f"{kinds} are: {', '.join(names)}"
    return f"unknown {kind} {shown}; {hint}"


def printable(name: str) -> str:
    """Return `name` for use in a message. If it has unprintable characters, they are escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _similarity(name: str, other: str) -> float:
    """Return the similarity of two names from 0 to 1, or 0 if it is below `CLOSE`. Equal first parts are ignored."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))
    while same and name[same - 1].isalnum():
        same -= 1
    matcher = SequenceMatcher(None, name[same:], other[same:])
    likely = matcher.real_quick_ratio() >= CLOSE and matcher.quick_ratio() >= CLOSE  # both are cheap upper bounds
    return matcher.ratio() if likely else 0.0


def _topic_problem(kind: Kind, name: str) -> str | None:
    chars_max = POOL_CHARS_MAX if kind == "pool" else NAMESPACE_CHARS_MAX
    if not 1 <= len(name) <= chars_max:
        return f"it has {len(name)} characters, and 1 to {chars_max} are allowed"
    if TOPIC_PART.fullmatch(name) is None:
        return "it is part of Kafka topics, so it takes A-Z, a-z, 0-9, '.', '_' and '-', the first a letter or a digit"
    if kind == "namespace" and WORK in name.split("."):
        return f"a part between dots must not be {WORK!r}: its topics would be work topics of another namespace"
    return None


def _text_problem(kind: Kind, name: str) -> str | None:
    if not 1 <= len(name) <= NAME_CHARS_MAX:
        return f"it has {len(name)} characters, and 1 to {NAME_CHARS_MAX} are allowed"
    if not name.isprintable():
        return "it has characters that cannot be printed, such as a newline or NUL"
    if name != name.strip():
        return "it begins or ends with a space"
    if kind not in ("model", "adapter"):
        return "it has a space" if " " in name else None
    if "\\" in name:
        return "it has a backslash"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "a part between slashes must not be empty, '.' or '..'"
    return None


def _shown(name: str) -> str:
    return ascii(name) if len(name) <= SHOWN_CHARS_MAX else f"{name[:SHOWN_CHARS_MAX]!a}..."
