"""Server-sent events of attached servers, as WHATWG's standard describes them, against a plain reading of it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.workers.engines.attached.server import ServerEvent, SseDecoder

lines = st.one_of(
    st.sampled_from(
        [
            "",
            ":",
            ": comment",
            "data",
            "data:",
            "data: ",
            "data:  two spaces",
            "data: {",
            'data: "é€😀"}',
            "event: error",
            "event:",
            "id: 7",
            "id: \0",
            "retry: 100",
            "retry: x",
            " data: not a field",
            "Data: nor this",
            "data : nor this",
            "\ufeffdata: a second BOM is no BOM",
            "data: [DONE]",
        ]
    ),
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=8).map("data:".__add__),
)
streams = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r", b"\r\n"])), max_size=25),
    st.sampled_from([b"", b"data: cut", b"\xff\n\n", b"data: \xff\xe2\x82\n\n"]),
)


def events_of(stream: bytes) -> list[ServerEvent]:
    """Return the events of a whole stream, by the steps of the standard."""
    text = stream.decode("utf-8", errors="replace").removeprefix("\ufeff")
    *whole, _ = re.split("\r\n|\n|\r", text)
    data, kind, found = "", "", []
    for line in whole:
        if not line:
            if data:
                found.append(ServerEvent(kind, data.removesuffix("\n").encode()))
            data = kind = ""
            continue
        if line.startswith(":"):
            continue
        name, colon, value = line.partition(":")
        value = value.removeprefix(" ") if colon else ""
        if name == "data":
            data += value + "\n"
        elif name == "event":
            kind = value
    return found


@given(streams, st.data())
def test_events_do_not_depend_on_how_the_bytes_arrive(
    stream: tuple[bytes, list[tuple[str, bytes]], bytes], data: st.DataObject
) -> None:
    begin, parts, end = stream
    whole = begin + b"".join(line.encode() + ending for line, ending in parts) + end
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    expected = events_of(whole)
    for places in (cuts, [], range(len(whole))):
        decoder, found, at = SseDecoder(), [], 0
        for place in (*places, len(whole)):
            found += decoder.feed(whole[at:place])
            at = place
        assert found == expected


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("data: YHOO\ndata: +2\ndata: 10\n\n", ["YHOO\n+2\n10"]),
        (": test\n\ndata: first\nid: 1\n\ndata:second\nid\n\ndata:  third\n", ["first", "second"]),
        ("data\n\ndata\ndata\n\ndata:", ["", "\n"]),
        ("data:test\n\ndata: test\n\n", ["test", "test"]),
    ],
)
def test_the_examples_of_the_standard(stream: str, expected: list[str]) -> None:
    assert [one.data.decode() for one in SseDecoder().feed(stream.encode())] == expected


def test_an_event_has_the_type_that_the_stream_names() -> None:
    found = SseDecoder().feed(b"event: add\ndata: 73857293\n\ndata: x\n\n")
    assert found == [ServerEvent("add", b"73857293"), ServerEvent("", b"x")]


def test_the_bytes_of_an_unfinished_event_are_known() -> None:
    decoder = SseDecoder()
    decoder.feed(b"data: a\n\ndata: 12345\ndata: 678")
    assert decoder.pending_bytes == len("12345\n") + len("data: 678")
    assert decoder.unfinished == b"12345\n 678"
