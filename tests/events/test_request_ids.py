"""Ids of requests on the log, and the ids by which clients find them."""

import pytest

from forebay.events.request_ids import aliases_of, choice_ids, client_id_of, http_request_id, kafka_api_request_id

HTTP, KAFKA = http_request_id("order-7", 0xABC), kafka_api_request_id("order-7")


def test_the_id_of_the_client_is_part_of_the_unique_id() -> None:
    assert (HTTP, KAFKA) == ("order-7~000000000abc", "order-7~kafka")


@pytest.mark.parametrize("whole", [HTTP, KAFKA])
def test_a_part_is_found_by_its_id_and_that_of_the_whole_request(whole: str) -> None:
    assert choice_ids(whole, 1) == [whole]
    assert aliases_of(whole) == {whole, "order-7"}
    assert client_id_of(whole) == "order-7"
    assert choice_ids(whole, 2) == [f"{whole}-0", f"{whole}-1"]
    assert aliases_of(f"{whole}-12") == {f"{whole}-12", whole, "order-7"}
    assert client_id_of(f"{whole}-12") == "order-7"


def test_an_id_without_a_client_is_found_by_itself() -> None:
    assert aliases_of("order-7") == {"order-7"}
    assert client_id_of("chatcmpl-1-0") == "chatcmpl-1-0"
