"""POST /v1/embeddings: each input is a request of its own on the log; the vectors are gathered in order.

Source: OpenAI API reference, embeddings. `dimensions` cuts and normalises again where the model says that it may.
"""

import base64
from array import array
from math import sqrt
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from forebay.core.state.reply_slot import ResponseState
from forebay.events.base import U32_BYTES
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.model import Model
from forebay.ingress.openai.fields import Body, Neutral, refuse_extra
from forebay.ingress.openai.nvext import NAME_CHARS_MAX, Nvext
from forebay.ingress.openai.sampling import TokenIds

INPUTS_MAX = 2_048  # OpenAI's
DIMENSIONS_MAX = 1 << 20

NEUTRAL: Neutral = {
    "add_special_tokens": (None, True),
    "normalize": (None, True),
    "priority": (None, 0),
    "truncate_prompt_tokens": (None,),
}
IGNORED = frozenset({"user"})

Tokens = Annotated[TokenIds, Field(min_length=1)]


class EmbeddingBody(Body):
    """What is to be embedded: a text, token ids, or a list of either."""

    neutral = NEUTRAL
    ignored = IGNORED

    model: str
    input: (
        str
        | Tokens
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=DIMENSIONS_MAX)] | None = None
    cache_salt: Annotated[str, Field(max_length=NAME_CHARS_MAX)] | None = None
    nvext: Nvext | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Add that `nvext` has no annotations and no extra fields here."""
        neither: dict[str, Any] = {"enum": [None, []]}
        schema["properties"]["nvext"]["properties"] = {"annotations": neither, "extra_fields": neither}

    @model_validator(mode="after")
    def _check(self) -> "EmbeddingBody":
        refuse_extra(self, "")
        if self.nvext is not None and (self.nvext.annotations or self.nvext.extra_fields):
            raise invalid("nvext: embeddings have no annotations and no extra fields", "nvext", "unsupported_parameter")
        return self

    @property
    def inputs(self) -> list[str | list[int]]:
        """One for each vector."""
        given = self.input
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        return [one for one in given if not isinstance(one, int)]

    @property
    def queries_route(self) -> bool:
        """An embedding is never asked where it would go."""
        return False

    @property
    def cache_namespace(self) -> str:
        """As of chats and completions."""
        return (self.nvext and self.nvext.cache_salt) or self.cache_salt or ""

    def require_dimensions(self, model: Model) -> None:
        """Raise ApiError when vectors of this model cannot be cut to what is asked."""
        if self.dimensions is None:
            return
        if model.dimensions is None:
            raise invalid("this model does not say that its embeddings may be cut", "dimensions")
        if model.dimensions and self.dimensions not in model.dimensions:
            known = ", ".join(map(str, model.dimensions))
            raise invalid(f"embeddings of this model have the dimensions {known}, not {self.dimensions}", "dimensions")


def part_id(request_id: str, index: int) -> str:
    """The id on the log of one input's request."""
    return f"{request_id}-{index}"


def vector_of(reply: ResponseState) -> bytes:
    """The vector of a reply that ended. Raises ApiError when it has none."""
    assert reply.ended is not None
    error = reply.ended.error
    if error is not None:
        raise ApiError(error.status, error.code, error.message)
    if not reply.vector:
        raise ApiError(502, "embedding_missing", f"worker {reply.worker_id or 'unknown'} gave no embedding")
    return reply.vector


def embeddings(body: EmbeddingBody, vectors: list[bytes], prompt_tokens: int) -> bytes:
    """The answer as JSON. Raises ApiError when a vector is shorter than asked for."""
    data = [
        {"object": "embedding", "index": index, "embedding": _embedding(packed, body)}
        for index, packed in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": body.model, "usage": usage})


def _embedding(packed: bytes, body: EmbeddingBody) -> Any:
    if body.dimensions is not None:
        packed = _cut(packed, body.dimensions)
    if body.encoding_format == "base64":
        return base64.b64encode(packed).decode()
    return array("f", packed).tolist()


def _cut(packed: bytes, dimensions: int) -> bytes:
    """The first dimensions, of length 1 again."""
    vector = array("f", packed)
    if dimensions > len(vector):
        raise invalid(f"embeddings of this model have {len(vector)} dimensions, not {dimensions}", "dimensions")
    if dimensions * U32_BYTES == len(packed):
        return packed
    cut = vector[:dimensions]
    length = sqrt(sum(value * value for value in cut))
    return array("f", [value / length for value in cut]).tobytes() if length else cut.tobytes()
