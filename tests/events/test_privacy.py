"""Each event declares how its fields are anonymised, and a field without a rule is an error."""

from typing import Annotated, Any, get_args

import msgspec
import pytest

from forebay.events.base import Count, Name
from forebay.events.fleet import IngressFact, IngressJoined, IngressLost, WorkerFact, WorkerLost
from forebay.events.media import Encoded
from forebay.events.privacy import DROPPED, KEPT, LORA, REQUEST_ID, privacy_rules
from forebay.events.progress import AnyProgressEvent, PrefillFinished, RequestProgress


@pytest.mark.parametrize(
    "kind", [*get_args(AnyProgressEvent), IngressJoined, IngressLost, WorkerLost, WorkerFact, IngressFact]
)
def test_every_text_field_has_a_rule(kind: type[msgspec.Struct]) -> None:
    assert privacy_rules(kind)


@pytest.mark.parametrize("kind", get_args(RequestProgress))
def test_request_ids_are_masked_and_errors_are_dropped(kind: type[msgspec.Struct]) -> None:
    rules = privacy_rules(kind)
    assert rules["request_id"] == "request_id"
    assert rules.get("error", "drop") == "drop"
    assert "worker_id" not in rules


def test_rules_of_parts_are_found_through_the_event() -> None:
    assert privacy_rules(PrefillFinished)["prefilled"] == "nested"
    assert privacy_rules(Encoded) == {"descriptor": "drop", "checksum": "checksum"}


@pytest.mark.parametrize("kind", [str, bytes, str | None, tuple[str, ...], dict[str, int], list[str]])
def test_a_field_that_may_hold_text_needs_a_rule(kind: Any) -> None:
    Leaky = msgspec.defstruct("Leaky", [("count", Count), ("comment", kind)])  # noqa: N806 - a class

    with pytest.raises(TypeError, match="field comment of Leaky has no privacy rule"):
        privacy_rules(Leaky)


def test_rules_apply_to_optional_and_repeated_fields() -> None:
    class Full(msgspec.Struct):
        kept: Annotated[Name, KEPT]
        text: Annotated[Name, msgspec.Meta(max_length=9), DROPPED] | None
        adapters: Annotated[tuple[Name, ...], LORA]
        ids: tuple[Annotated[Name, REQUEST_ID], ...]
        parts: tuple[Encoded, ...]
        none: int | None

    expected = {"text": "drop", "adapters": "lora", "ids": "request_id", "parts": "nested"}
    assert privacy_rules(Full) == expected
