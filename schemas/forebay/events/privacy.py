"""How `forebay record --anonymize` treats each field of an event: by the rule at the field, `Annotated[type, RULE]`.

Numbers, booleans, literals and nested parts need no rule. Any other field without a rule is an error, so a new field
cannot leak because its author forgot the rule.
"""

import typing
from collections.abc import Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import msgspec

from forebay.events.base import Name

Rule = str


def _meta(rule: Rule) -> msgspec.Meta:
    return msgspec.Meta(extra={"privacy": rule})


KEPT = _meta("keep")  # names of the system's own components
SystemName = Annotated[Name, KEPT]

DROPPED = _meta("drop")  # texts and bytes that may quote a client
UNSET = _meta("unset")  # optional numbers of a client
ZEROED = _meta("zero")  # token ids
OUTCOME = _meta("outcome")  # text of an engine, or an outcome that the owner determined
CHECKSUM = _meta("checksum")  # checksums of a client's content, as 16 hex digits
SHA256 = _meta("sha256")  # SHA-256 of a client's content, as hex

REQUEST_ID = _meta("request_id")  # ids of requests and commands
REQUEST_HASHES = _meta("request_hashes")  # packed hashes of these ids
CONTENT = _meta("content")  # hash of a request's content
CONTENTS = _meta("contents")  # packed hashes of requests' contents
NONCE = _meta("nonce")  # of commands
IDEMPOTENCY_KEY = _meta("idempotency_key")  # hash of a key of a client; 0 for none
IDEMPOTENCY_KEYS = _meta("idempotency_keys")  # packed hashes of such keys
SESSION_KEYS = _meta("session_keys")  # packed hashes of sessions
HASH = _meta("hash")  # hash of a block
HASHES = _meta("hashes")  # packed hashes of blocks
CHUNKS = _meta("chunks")  # checksum of a snapshot's chunks, as 32 hex digits
STATE_DIGEST = _meta("state_digest")  # digest of a world, as 16 hex digits

LORA = _meta("lora")  # names of adapters
INGRESS = _meta("ingress")  # names of ingresses and their incarnations
OWNER = _meta("owner")  # names of owners
OperatorName = Annotated[str, msgspec.Meta(max_length=256), OWNER]  # who caused an event; empty if unknown
LEASE = _meta("lease")  # tokens of leases
SESSION = _meta("session")  # ids of sessions
NAMESPACE = _meta("namespace")  # namespaces of caches
TENANT = _meta("tenant")  # names of tenants
PATH = _meta("path")  # paths of adapters

# Names that a client wrote. They stay if the system has a component of that name.
WORKER = _meta("worker")
TAINT = _meta("taint")
MODEL = _meta("model")
POOL = _meta("pool")
QUEUE_CLASS = _meta("class")


@lru_cache(maxsize=256)
def privacy_rules(kind: type[msgspec.Struct]) -> Mapping[str, Rule]:
    """Return how to anonymise each field of an event, or of a struct in an event, by field name.

    Fields that stay unchanged have no entry.

    Raises:
        TypeError: a field has no rule but needs one, because its type is no number, boolean, literal or struct.
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
        return "nested" if privacy_rules(hint) else "keep"
    return "keep" if hint in (int, float, bool) or typing.get_origin(hint) is Literal else None
