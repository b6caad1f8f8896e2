"""Unique ids of HTTP requests whose clients chose an id, and ids of their parts."""

from forebay.events.request_ids import aliases_of, choice_ids, client_id_of, unique_id


def test_the_id_of_the_client_is_part_of_the_unique_id() -> None:
    made = unique_id("order-7", 0xABC)
    assert made == "order-7~000000000abc"
    assert client_id_of(made) == client_id_of(f"{made}-0") == "order-7"
    assert client_id_of("chatcmpl-1") == "chatcmpl-1"


def test_a_part_is_found_by_its_id_and_that_of_the_whole_request() -> None:
    made = unique_id("order-7", 0xABC)
    assert choice_ids(made, 1) == [made]
    assert choice_ids("chatcmpl-1f", 2) == ["chatcmpl-1f-0", "chatcmpl-1f-1"]
    assert aliases_of(f"{made}-12") == {f"{made}-12", made, "order-7"}
    assert aliases_of("chatcmpl-1f-0") == {"chatcmpl-1f-0", "chatcmpl-1f"}
    assert aliases_of("order-7") == {"order-7"}
