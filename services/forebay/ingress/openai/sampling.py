"""Convert sampling and structured output parameters of OpenAI and vLLM to the event field `Sampling`.

Source: OpenAI API reference (penalties, `logit_bias`, `response_format`); vLLM's OpenAI server (the rest, with
`structured_outputs` and the older `guided_*`, which are Dynamo's names too).
"""

from typing import Annotated, Any, ClassVar

import msgspec
from pydantic import Field, JsonValue

from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.model import Model
from forebay.ingress.openai.fields import FINITE, CheckedBody, Neutral, at_most

SEED_MAX = (1 << 63) - 1
TOKENS_MAX = (1 << 31) - 1
PROMPT_TOKENS_MAX = 1 << 22  # as many token ids as fit into a record of 16 MiB
BIASES_MAX = 1_024  # each is applied at every engine step
STOP_TOKENS_MAX = 64
STRUCTURE_BYTES_MAX = 256 << 10  # the engine compiles a grammar before the first token; a larger one would stall it
CHOICES_MAX = 1_024

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=PROMPT_TOKENS_MAX)]
Temperature = Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
JsonObject = Annotated[dict[str, JsonValue], FINITE]


class JsonSchema(CheckedBody):
    """`response_format.json_schema`: JSON schema of the output. `strict` has no effect: the output always matches."""

    path = "response_format.json_schema."

    name: str
    schema_: Annotated[JsonObject | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(CheckedBody):
    """`response_format`: required format of the output."""

    path = "response_format."

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(CheckedBody):
    """`structured_outputs` of vLLM: required structure of the output. Exactly one field may be set."""

    path = "structured_outputs."
    neutral: ClassVar[Neutral] = {
        "disable_additional_properties": (None, False),
        "disable_any_whitespace": (None, False),
        "disable_fallback": (None, False),
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
    }

    json_: Annotated[str | JsonObject | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=CHOICES_MAX)] | None = None
    grammar: str | None = None


class SamplingFields(CheckedBody):
    """Sampling parameters that chat and text completions share."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=TOKENS_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-SEED_MAX, le=SEED_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], at_most(BIASES_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=TOKENS_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_TOKENS_MAX)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=CHOICES_MAX)] | None = None
    guided_grammar: str | None = None

    @property
    def logprobs_wanted(self) -> int | None:
        """Number of alternative tokens to report per output token; None if no log probabilities are requested."""
        return None

    @property
    def forced(self) -> StructuredOutput | None:
        """Structure of the output that a forced tool call requires; None if no tool call is forced."""
        return None


def sampling_of(body: SamplingFields, max_tokens: int, model: Model) -> Sampling:
    """Return the sampling parameters of a request, with the defaults of the model for missing parameters.

    Raises ApiError (400) for an unknown token id, contradictory parameters, or an invalid or too large structure.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise invalid(f"min_tokens is {body.min_tokens}, which exceeds max_tokens {max_tokens}", "min_tokens")
    stop_token_ids = tuple(body.stop_token_ids or ())
    _require_known("stop_token_ids", stop_token_ids, model.vocabulary_size)
    default = model.generation
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or_default(body.temperature, default.temperature),
        top_p=_or_default(body.top_p, default.top_p),
        seed=body.seed,
        presence_penalty=_or_default(body.presence_penalty, 0.0),
        frequency_penalty=_or_default(body.frequency_penalty, 0.0),
        logit_bias=_biases(body, model.vocabulary_size),
        logprobs=body.logprobs_wanted,
        structured=_structured(body),
        ignore_eos=bool(body.ignore_eos),
        top_k=max(0, default.top_k if body.top_k is None else body.top_k),  # 0 disables it, as vLLM's -1 does
        min_p=_or_default(body.min_p, default.min_p),
        repetition_penalty=_or_default(body.repetition_penalty, default.repetition_penalty),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=stop_token_ids,
    )


def encoded_schema(schema: JsonValue, where: str) -> str:
    """Return a JSON schema as text. Raises ApiError (400) if the text is too large."""
    return _bounded(msgspec.json.encode(schema).decode(), where)


def listed(prompts: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if not prompts or isinstance(prompts[0], int):
        return [[token for token in prompts if isinstance(token, int)]]
    return [one for one in prompts if not isinstance(one, int)]


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _biases(body: SamplingFields, vocabulary_size: int) -> tuple[TokenBias, ...]:
    bias_of = body.logit_bias or {}
    if not all(name.isascii() and name.isdecimal() and len(name) <= len(str(1 << 32)) for name in bias_of):
        raise invalid("the keys of logit_bias must be token ids", "logit_bias")
    biases = {int(name): bias for name, bias in bias_of.items()}
    _require_known("logit_bias", tuple(biases), vocabulary_size)
    return tuple(TokenBias(token_id=token, bias=biases[token]) for token in sorted(biases))


def _require_known(name: str, token_ids: tuple[int, ...], vocabulary_size: int) -> None:
    if token_ids and max(token_ids) >= vocabulary_size:
        raise invalid(
            f"{name}: token id {max(token_ids)} is not in the vocabulary; ids must be below {vocabulary_size}", name
        )


def _structured(body: SamplingFields) -> StructuredOutput | None:
    """Return the structure of the output, None for free text. Raises ApiError for several structures."""
    found: dict[str, StructuredOutput] = {}
    if (forced := body.forced) is not None:
        found["tool_choice"] = forced
    if body.response_format is not None and (structure := _response_format(body.response_format)) is not None:
        found["response_format"] = structure
    if body.structured_outputs is not None:
        of = body.structured_outputs
        if of.json_object:
            found["structured_outputs.json_object"] = StructuredOutput(kind="json_object")
        found |= _plain("structured_outputs.", of.json_, of.regex, of.choice, of.grammar)
    found |= _plain("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if len(found) > 1:
        names = " and ".join(found)
        raise invalid(f"{names} are mutually exclusive; set one of them", [*found][-1])
    if not found and body.structured_outputs is not None:
        raise invalid(
            "structured_outputs is empty; set one of json, json_object, regex, choice, grammar", "structured_outputs"
        )
    return next(iter(found.values()), None)


def _response_format(requested: ResponseFormat) -> StructuredOutput | None:
    if requested.type == "json_schema":
        schema = requested.json_schema
        if schema is None or schema.schema_ is None:
            raise invalid("response_format.json_schema.schema is missing", "response_format.json_schema")
        return StructuredOutput(
            kind="json_schema", text=encoded_schema(schema.schema_, "response_format.json_schema.schema")
        )
    if requested.json_schema is not None:
        raise invalid(f"response_format.json_schema is not allowed with the type {requested.type!r}", "response_format")
    if requested.type == "text":
        return None
    if requested.type == "json_object":
        return StructuredOutput(kind="json_object")
    text = f"response_format.type is {requested.type[:32]!r}; it must be text, json_object or json_schema"
    raise invalid(text, "response_format.type", "unsupported_parameter")


def _plain(
    prefix: str, schema: str | JsonObject | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, StructuredOutput]:
    found = {}
    if schema is not None:
        where = f"{prefix}json"
        text = _schema_text(schema, where) if isinstance(schema, str) else encoded_schema(schema, where)
        found[where] = StructuredOutput(kind="json_schema", text=text)
    if regex is not None:
        found[f"{prefix}regex"] = StructuredOutput(kind="regex", text=_bounded(regex, f"{prefix}regex"))
    if choice is not None:
        found[f"{prefix}choice"] = StructuredOutput(kind="choice", text=encoded_schema([*choice], f"{prefix}choice"))
    if grammar is not None:
        found[f"{prefix}grammar"] = StructuredOutput(kind="grammar", text=_bounded(grammar, f"{prefix}grammar"))
    return found


def _schema_text(text: str, where: str) -> str:
    try:
        schema: Any = msgspec.json.decode(_bounded(text, where))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise invalid(f"{where} is not valid JSON: {error}", where) from error
    if not isinstance(schema, dict):
        raise invalid(f"{where} must be a JSON object", where)
    return text


def _bounded(text: str, where: str) -> str:
    if not text:
        raise invalid(f"{where} is empty", where)
    if len(text.encode()) > STRUCTURE_BYTES_MAX:
        raise ApiError(400, "structure_too_large", f"{where} exceeds the limit of {STRUCTURE_BYTES_MAX:,} bytes", where)
    return text
