"""Parts of the adapter for attached servers: loads, errors, server-sent events, tokens of a text, KV descriptors."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from forebay.events.work import WorkItem
from forebay.workers.engines.attached.completions import (
    CONNECTOR,
    HALF_LEASE_S,
    HELD_CHARS_MAX,
    TextEncoder,
    fetch_params,
    offer,
)
from forebay.workers.engines.attached.errors import message_of
from forebay.workers.engines.attached.server import (
    MetricsUnreadable,
    ServerEvent,
    ServerLoad,
    SseDecoder,
    read_load,
    vllm_cache_sizes,
)
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.vllm.transfer import UNREAD_S, VLLM_LEASE_S
from tests.workers.attached import MODEL, decode
from tests.workers.conftest import work_item

# Loads

VLLM = (
    'vllm:num_requests_running{e="0"} 2.0\nvllm:num_requests_waiting{e="0"} 1\nvllm:kv_cache_usage_perc{e="0"} 0.25\n'
)
SGLANG = "sglang:num_running_reqs{} 3\nsglang:num_queue_reqs{} 0\nsglang:token_usage{} 0.5\n"
TENSORRT_LLM = (
    '[{"kvCacheStats": {}}, {"kvCacheStats": {"usedNumBlocks": 5, "maxNumBlocks": 10}, "more": 1, '
    '"inflightBatchingStats":'
    ' {"numContextRequests": 1, "numGenRequests": 2, "numQueuedContextRequests": 3, "numQueuedGenRequests": 4}}]'
)


@pytest.mark.parametrize(
    ("metrics", "load"),
    [
        ("# HELP x y\nother 1\n" + VLLM + "vllm:num_requests_running_total{} 99\n", ServerLoad(2, 1, 0.25)),
        (VLLM + VLLM.replace('"0"', '"1"'), ServerLoad(4, 2, 0.25)),
        (VLLM.replace("0.25", "7.0"), ServerLoad(2, 1, 1.0)),
        ("vllm:num_requests_running{} 2\n", ServerLoad(2, 0, 0.0)),
        (VLLM.replace("\n", "\r\n"), ServerLoad(2, 1, 0.25)),
        (SGLANG, ServerLoad(3, 0, 0.5)),
        (TENSORRT_LLM, ServerLoad(3, 7, 0.5)),
        ("[{}]", ServerLoad(0, 0, 0.0)),
        ("[]", None),
    ],
)
def test_metrics_of_each_server_give_its_load(metrics: str, load: ServerLoad | None) -> None:
    assert read_load(metrics) == load


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ("", "no known names"),
        ("other 1\n", "no known names: vllm:num_requests_running, sglang:num_running_reqs"),
        ("vllm:num_requests_running{ 1\n", "malformed"),
        ("vllm:num_requests_running one\n", "malformed"),
        ("vllm:num_requests_waiting 1\n", "no valid value of vllm:num_requests_running"),
        ("vllm:num_requests_running NaN\n", "no valid value"),
        ("vllm:num_requests_running -1\n", "no valid value"),
        ("vllm:num_requests_running 1e30\n", "no valid value"),
        ("vllm:num_requests_running +Inf\n", "no valid value"),
        ("[1]", "statistics of iterations are malformed"),
        ("[" * 100_000, "statistics of iterations are malformed"),
        ('[{"a":' * 50_000, "statistics of iterations are malformed"),
        ('[{"inflightBatchingStats": {"numGenRequests": -1}}]', "malformed"),
        ('[{"kvCacheStats": {"usedNumBlocks": ' + "9" * 400 + ', "maxNumBlocks": 1}}]', "malformed"),
    ],
)
def test_metrics_that_cannot_be_read_give_no_load(metrics: str, message: str) -> None:
    with pytest.raises(MetricsUnreadable) as error:
        read_load(metrics)
    assert message in str(error.value)


@given(st.data())
def test_damaged_metrics_are_a_load_or_unreadable(data: st.DataObject) -> None:
    text = list(data.draw(st.sampled_from([VLLM, SGLANG, TENSORRT_LLM])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.sampled_from([*'{}[]",=\\ \n#0.eN-', "", "\0", "é"]))
    try:
        load = read_load("".join(text))
    except MetricsUnreadable:
        return
    assert load is None or (min(load) >= 0 and load.usage <= 1)


@pytest.mark.parametrize(
    ("labels", "sizes"),
    [
        ('block_size="16",num_gpu_blocks="101"', (16, 100)),
        ('num_gpu_blocks="101",block_size="None"', (None, 100)),
        ('block_size="0",num_gpu_blocks="1"', (None, None)),
        ('block_size="-1",num_gpu_blocks="1.5"', (None, None)),
        ('block_size="²",num_gpu_blocks="' + "9" * 5000 + '"', (None, None)),
        ("", (None, None)),
    ],
)
def test_cache_sizes_of_vllm(labels: str, sizes: tuple[int | None, int | None]) -> None:
    assert vllm_cache_sizes(f"vllm:cache_config_info{{{labels}}} 1.0\n") == sizes
    assert vllm_cache_sizes("other 1\n") == (None, None)


# Errors


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too\\n long", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"error": null, "detail": "too long"}', "too long"),
        (b'{"detail": [{"msg": "missing"}]}', "missing"),
        (b'{"detail": [{"loc": ["body", "n"], "msg": "no"}, {"loc": ["x"]}]}', "body.n: no; x: invalid"),
        (b'{"text": "too long", "error_code": 50002}', "too long"),
        (b'{"error": {"error": {"message": "too long"}}}', "too long"),
        (b'{"error": {}}', '{"error": {}}'),
        (b"<html>no</html>", "<html>no</html>"),
        (b"\xff", "\ufffd"),
        (b"[" * 100_000, "[" * 500),
        (b"", "the response has no message"),
    ],
)
def test_message_of_an_error(body: bytes, message: str) -> None:
    assert message_of(body) == message


# Tokens of a text


def spaced_tokenizer() -> Tokenizer:
    """Return a tokenizer that marks spaces, like Llama 2's: its decoder drops the first space of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *bytes_of], show_progress=False)
    tokenizer.train_from_iterator(["the log is read by the owner of the log", "a word and another word"] * 9, trainer)
    return tokenizer


SPACED = spaced_tokenizer()


def spaced_encode(text: str) -> list[int]:
    return list(SPACED.encode(text, add_special_tokens=False).ids)


TOKENIZERS: dict[str, tuple[Callable[[str], list[int]], Any]] = {
    "default": (MODEL.encode, decode),
    "spaced": (spaced_encode, partial(SPACED.decode, skip_special_tokens=False)),
}
TEXTS = st.lists(
    st.sampled_from(["the", " log", " ", "  ", "a", "\n", "é", "漢", "🙂", "word", ".", "x1", " the owner"])
)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(words=TEXTS, cuts=st.lists(st.integers(0, 60)))
def test_tokens_of_any_pieces_decode_to_the_whole_text(name: str, words: list[str], cuts: list[int]) -> None:
    encode, decoded = TOKENIZERS[name]
    text = "".join(words)
    encoder = TextEncoder(encode, decoded)
    line = encode("\n")  # in front, because some decoders drop the first space of a text
    tokens: list[int] = []
    for piece in pieces_of(text, cuts):
        tokens += encoder.push(piece)
        assert f"\n{text}".startswith(decoded(line + tokens))
    tokens += encoder.push("", is_last=True)
    assert (decoded(line + tokens), encoder.inexact) == (f"\n{text}", 0)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_first_piece_is_not_held_back_for_its_space(name: str) -> None:
    encode, decoded = TOKENIZERS[name]
    encoder = TextEncoder(encode, decoded)
    first, rest = encoder.push(" the owner"), encoder.push(" of the log")
    assert first
    assert decoded(first + rest).strip() == "the owner of the log"


def test_text_that_no_tokens_decode_to_is_held_back_for_a_while_only() -> None:
    encoder = TextEncoder(lambda text: [len(text)], lambda ids: "?" * len(ids))
    assert encoder.push("ab") == []
    assert encoder.push("x" * HELD_CHARS_MAX) == [2 + HELD_CHARS_MAX]
    assert encoder.push("abc", is_last=True) == [3]
    assert encoder.inexact == 2
    assert encoder.push("", is_last=True) == []


# KV descriptors

PARAMS = {
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 1,
    "remote_block_ids": [[1, 2]],
    "remote_num_tokens": 6,
    "tp_size": 1,
    "new_field": {"x": 1},
}


def item() -> WorkItem:
    return work_item("r", [1, 2, 3, 4, 5, 6], 4)


def test_a_descriptor_keeps_all_fields_of_the_server() -> None:
    kept = offer(item(), "w", "m", PARAMS)
    assert (kept.worker_id, kept.connector, kept.tokens) == ("w", CONNECTOR, 6)
    params = fetch_params(kept, "m", 6)
    assert params == PARAMS | {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_prefill_cached_tokens": None,
    }


def test_the_owner_and_the_decode_server_share_the_lease() -> None:
    assert offer(item(), "w", "m", PARAMS).lease_us == HALF_LEASE_S * 1e6
    assert 2 * HALF_LEASE_S <= VLLM_LEASE_S - UNREAD_S


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_engine_id": ""},
        {"remote_engine_id": None},
        {"remote_host": 3},
        {"remote_port": 0},
        {"remote_port": 70_000},
        {"remote_block_ids": []},
        {"remote_block_ids": "all"},
        {"remote_block_ids": [list(range(100_000))]},
    ],
)
def test_unknown_parameters_of_a_server_are_not_offered(changes: dict[str, Any]) -> None:
    with pytest.raises(Unfetchable):
        offer(item(), "w", "m", PARAMS | changes)


LINES = (
    '|:|: comment|data|data:|data: |data:  two spaces|data: {|data: "é€😀"}|event: error|event:|id: 7|id: \0|retry: 100'
    "|retry: x| data: not a field|Data: nor this|data : nor this|\ufeffdata: a second BOM is no BOM|data: [DONE]"
)
lines = st.one_of(
    st.sampled_from(LINES.split("|")),
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


def test_the_bytes_of_an_unfinished_event_are_known() -> None:
    decoder = SseDecoder()
    decoder.feed(b"data: a\n\ndata: 12345\ndata: 678")
    assert decoder.pending_bytes == len("12345\n") + len("data: 678")
    assert decoder.unfinished == b"12345\n 678"
