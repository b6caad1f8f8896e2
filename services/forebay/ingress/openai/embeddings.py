"""Bodies and responses of POST /v1/embeddings. Each input becomes one request on the log.

Source: OpenAI API reference, embeddings. `dimensions` truncates and renormalises vectors if the model allows it.
"""

import base64
from array import array
from math import sqrt
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from forebay.events.base import U32_BYTES
from forebay.events.rendering import Rendering
from forebay.ingress.errors import invalid
from forebay.ingress.model import Model
from forebay.ingress.openai.fields import Neutral, describe_non_empty, encoded_options
from forebay.ingress.openai.nvext import RoutedBody
from forebay.ingress.openai.sampling import TokenIds, listed

INPUTS_MAX = 2_048  # OpenAI's limit
DIMENSIONS_MAX = 1 << 20

# Parameters of vLLM 0.32 that forebay does not support, with the values that have no effect.
NEUTRAL: Neutral = {
    "add_generation_prompt": (None, False),
    "add_special_tokens": (None, True),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "media_io_kwargs": (None, {}),
    "messages": (None,),
    "mm_processor_kwargs": (None, {}),
    "normalize": (None, True),
    "padding": (None, "do_not_pad"),
    "priority": (None, 0),
    "request_id": (None,),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None, "left", "right"),  # of `truncate_prompt_tokens`
    "use_activation": (None, True),
}
IGNORED = frozenset({"user"})

Tokens = Annotated[TokenIds, Field(min_length=1)]


class EmbeddingOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of an embedding body that determine its response, as `Rendering.options` has them."""

    dimensions: int | None = None
    encoding_format: str | None = None


class EmbeddingBody(RoutedBody):
    """Body of POST /v1/embeddings. `input` is a text, a list of token ids, or a list of several texts or lists."""

    endpoint = "embeddings"
    id_prefix = "embd-"
    neutral = NEUTRAL
    ignored = IGNORED

    input: (
        str
        | Tokens
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=INPUTS_MAX)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=DIMENSIONS_MAX)] | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        describe_non_empty(schema["properties"]["input"])
        neither: dict[str, Any] = {"enum": [None, []]}
        schema["properties"]["nvext"]["properties"] = {"annotations": neither, "extra_fields": neither}

    @model_validator(mode="after")
    def _check(self) -> "EmbeddingBody":
        if self.nvext is not None and (self.nvext.annotations or self.nvext.extra_fields):
            raise invalid("nvext: embeddings have no annotations and no extra fields", "nvext", "unsupported_parameter")
        return self

    @property
    def completion(self) -> Self:
        """The body from which the request is prepared."""
        return self

    @property
    def options(self) -> str:
        return encoded_options(EmbeddingOptions(self.dimensions, self.encoding_format))

    @property
    def inputs(self) -> list[str | list[int]]:
        return listed(self.input)

    def require_dimensions(self, model: Model) -> None:
        if self.dimensions is None:
            return
        if model.dimensions is None:
            raise invalid("this model does not support dimensions; leave the parameter out", "dimensions")
        if model.dimensions and self.dimensions not in model.dimensions:
            known = ", ".join(map(str, model.dimensions))
            raise invalid(f"dimensions is {self.dimensions}; this model supports: {known}", "dimensions")


def embeddings(rendering: Rendering, vectors: list[bytes]) -> bytes:
    """Return the response as JSON, from vectors of packed little-endian float32 in the order of the inputs.

    Raises ApiError if a vector has fewer dimensions than the client requested.
    """
    options = msgspec.json.decode(rendering.options or "{}", type=EmbeddingOptions)
    data = [
        {"object": "embedding", "index": index, "embedding": _embedding(packed, options)}
        for index, packed in enumerate(vectors)
    ]
    usage = {"prompt_tokens": rendering.prompt_tokens, "total_tokens": rendering.prompt_tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": rendering.model, "usage": usage})


def _embedding(packed: bytes, options: EmbeddingOptions) -> Any:
    if options.dimensions is not None:
        packed = _cut(packed, options.dimensions)
    if options.encoding_format == "base64":
        return base64.b64encode(packed).decode()
    return array("f", packed).tolist()


def _cut(packed: bytes, dimensions: int) -> bytes:
    vector = array("f", packed)
    if dimensions > len(vector):
        raise invalid(f"dimensions is {dimensions}; embeddings of this model have only {len(vector)}", "dimensions")
    if dimensions * U32_BYTES == len(packed):
        return packed
    cut = vector[:dimensions]
    length = sqrt(sum(value * value for value in cut))
    return array("f", [value / length for value in cut]).tobytes() if length else cut.tobytes()
