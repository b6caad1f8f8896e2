"""The tenant of an API key on the log, its cache namespace and its queue class."""

import logging

import pytest

from forebay.events.keys import KeySet
from forebay.events.requests import RoutingHints
from forebay.ingress.access_log import LOGGER, open_entry
from forebay.ingress.caller import ANONYMOUS, Caller, set_caller
from forebay.ingress.errors import ApiError

KEY = KeySet(key_hash="ab" * 32, tenant="acme", weight=3, queue_classes=("silver", "batch"))


def test_a_key_names_its_tenant_and_hides_itself() -> None:
    key = Caller(KEY).key
    assert (key.tenant, key.key_id, key.weight) == ("acme", "abababababab", 3)


@pytest.mark.parametrize(
    ("given", "expected"), [("", "tenant/acme"), ("chat", "tenant/acme/chat"), ("tenant/x", "tenant/acme/tenant/x")]
)
def test_tenants_do_not_share_cached_blocks(given: str, expected: str) -> None:
    assert Caller(KEY).namespace(given) == expected
    assert ANONYMOUS.namespace(given) == (f"client/{given}" if given == "tenant/x" else given)
    assert ANONYMOUS.namespace(expected) != expected


def test_a_client_may_only_lower_its_priority() -> None:
    caller = Caller(KEY)
    assert caller.routing(RoutingHints(priority=9, strict_priority=5)) == RoutingHints(policy_class="silver")
    lowered = RoutingHints(policy_class="batch", priority=-4)
    assert caller.routing(lowered) == lowered
    with pytest.raises(ApiError, match="may not use the queue class 'gold'; it may use: silver, batch"):
        caller.routing(RoutingHints(policy_class="gold"))


def test_without_a_tenant_hints_stay() -> None:
    hints = RoutingHints(priority=9, strict_priority=5, policy_class="gold")
    assert ANONYMOUS.routing(hints) is hints


def test_a_key_without_classes_uses_the_default_class() -> None:
    caller = Caller(KeySet(key_hash="cd" * 32, tenant="acme"))
    assert caller.routing(RoutingHints(policy_class="gold")).policy_class == ""


def test_the_access_log_names_the_tenant_of_a_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    for caller in (Caller(KEY), ANONYMOUS):
        scope = {"method": "GET", "path": "/v1/models"}
        entry = open_entry(scope)
        assert entry is not None
        set_caller(scope, caller)
        entry.write()
    named, anonymous = (record.__dict__["fields"] for record in caplog.records)
    assert (named["tenant"], named["key_id"]) == ("acme", "abababababab")
    assert not {"tenant", "key_id"} & set(anonymous)
