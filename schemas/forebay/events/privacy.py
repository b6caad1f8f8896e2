"""How anonymising treats each field of an event. The rule is declared beside the field, as `Annotated[type, RULE]`.

Numbers, booleans, literals and nested parts need no rule. Any other field without a rule is an error, so a new field
cannot leak by being forgotten.
"""

import typing
from collections.abc import Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import msgspec

Rule = Literal["keep", "drop", "request_id", "lora", "ingress", "checksum", "nested"]


def _meta(rule: Rule) -> msgspec.Meta:
    return msgspec.Meta(extra={"privacy": rule})


KEPT = _meta("keep")  # names of the system's own components
DROPPED = _meta("drop")  # texts and bytes that may quote a client
REQUEST_ID = _meta("request_id")  # ids of requests and commands
LORA = _meta("lora")  # names of adapters
INGRESS = _meta("ingress")  # names of ingresses and their incarnations
CHECKSUM = _meta("checksum")  # checksums that identify a client's content


@lru_cache(maxsize=256)
def privacy_rules(kind: type[msgspec.Struct]) -> Mapping[str, Rule]:
    """Return the rule of each field of an event or part that needs one.

    Raises:
        TypeError: a field of another type than numbers, literals and parts has no rule.
    """
    rules: dict[str, Rule] = {}
    hints = typing.get_type_hints(kind, include_extras=True)
    for name in kind.__struct_fields__:
        rule = _rule_of(hints[name])
        if rule is None:
            raise TypeError(f"field {name} of {kind.__name__} has no privacy rule; see forebay.events.privacy")
        if rule != "keep":
            rules[name] = rule
    return rules


def _rule_of(hint: Any) -> Rule | None:
    """Return the rule of a type, or None if the type needs one and has none."""
    if typing.get_origin(hint) is Annotated:
        kind, *metas = typing.get_args(hint)
        declared = [meta.extra["privacy"] for meta in metas if isinstance(meta, msgspec.Meta) and meta.extra]
        return declared[-1] if declared else _rule_of(kind)
    if typing.get_origin(hint) in (UnionType, typing.Union, tuple):
        found = [_rule_of(part) for part in typing.get_args(hint) if part not in (NoneType, Ellipsis)]
        return next((rule for rule in found if rule != "keep"), "keep")
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "nested"
    return "keep" if hint in (int, float, bool) or typing.get_origin(hint) is Literal else None
