"""KV descriptors of every engine: which a worker fetches, and those that it cannot."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.transfer import Prefilled
from forebay.workers.engines.attached import transfer as attached
from forebay.workers.engines.kv_descriptor import Unfetchable, decoded
from forebay.workers.engines.sglang import engine as sglang
from forebay.workers.engines.tensorrt_llm import engine as tensorrt_llm
from forebay.workers.engines.vllm import transfer as vllm
from tests.workers.standins.tensorrt_llm_standin import Logprob

Fetch = Callable[[Prefilled | None], Any]
RENDEZVOUS = msgspec.json.Decoder(sglang.Rendezvous).decode
TOKENS = 3
DOCUMENTS = st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=9)
ENGINES: dict[str, Fetch] = {
    attached.CONNECTOR: lambda prefilled: attached.fetch_params(prefilled, "m", TOKENS),
    sglang.CONNECTOR: lambda prefilled: decoded(prefilled, sglang.CONNECTOR, "m", TOKENS, RENDEZVOUS),
    tensorrt_llm.CONNECTOR: lambda prefilled: tensorrt_llm.transfer_fields(prefilled, "m", TOKENS, Logprob),
    vllm.CONNECTOR: lambda prefilled: vllm.transfer_params(prefilled, "m", TOKENS, 1),
}


def prefilled(own: str, /, **changes: Any) -> Prefilled:
    made = Prefilled(worker_id="p", worker_epoch=1, model="m", connector=own, descriptor=b"", tokens=TOKENS, lease_us=1)
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("connector", ENGINES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"connector": "nixl"}, "its KV is transferred by nixl, this worker uses "),
        ({"model": "other"}, "its KV is of model other, this worker runs m"),
        ({"tokens": 5}, "its KV covers 5 tokens, the prompt has 3"),
        ({"descriptor": b"\xc1"}, "cannot decode the KV descriptor"),
        ({"descriptor": b"[" * 100_000}, "cannot decode the KV descriptor"),
    ],
)
def test_kv_of_another_kind_is_unfetchable(connector: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unfetchable, match=message):
        ENGINES[connector](prefilled(connector, **changes))
    with pytest.raises(Unfetchable, match="the request has no KV descriptor"):
        ENGINES[connector](None)


@pytest.mark.parametrize("connector", ENGINES)
@given(
    st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=9).map(msgspec.json.encode)
)
def test_any_bytes_are_decoded_or_unfetchable(connector: str, packed: bytes) -> None:
    try:
        fields = ENGINES[connector](prefilled(connector, descriptor=packed))
    except Unfetchable:
        return
    assert connector == tensorrt_llm.CONNECTOR, "the other descriptors have required fields"
    assert fields["request_type"] == "generation_only"
