"""The mock engine: batches, rejections, and output for structures, tools and reasoning."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from forebay.engine_model.model import EngineConfig, Stored
from forebay.events.base import pack_u32, pack_u64
from forebay.events.progress import RequestFinished
from forebay.events.requests import Sampling, StructuredOutput
from forebay.events.tokens import ResponseEnded, TokenChunk, TokensEmitted, Usage
from forebay.events.topics import TOKENS
from forebay.events.work import WorkItem
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.outputs import CHARS_MAX, DIMENSIONS, FEW_WORDS, FORMATS, OutputScripts, SchemaValues
from forebay.workers.runtime.resume import continued
from tests.engines.driven import Driven, driven
from tests.workers.conftest import VOCABULARY, Scene, engine_config, until, work_item
from tests.workers.hosted import HOSTED_SPEC
from tests.workers.work_items import finish, tokens_of


def mock(speedup: float = 1e4, **sizes: int) -> AbstractAsyncContextManager[Driven]:
    return driven(MockEngine(engine_config(**sizes), speedup=speedup), HOSTED_SPEC)


async def test_same_prompt_and_seed_give_the_same_output_on_every_engine() -> None:
    outputs = []
    for _ in range(2):
        async with mock() as one:
            answers = one.ask([1, 2, 3], 20), one.ask([1, 2, 3], 20, temperature=1.0, seed=9), one.ask([1, 2, 4], 20)
            outputs.append([answer.tokens for answer in await asyncio.gather(*answers)])
    first, second = outputs
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 3
    assert all(len(tokens) == 20 and set(tokens) <= set(VOCABULARY) for tokens in first)


async def test_equal_requests_differ_unless_a_seed_or_temperature_0_determines_the_output() -> None:
    cases: dict[str, dict[str, Any]] = {
        "drawn": {"temperature": None},
        "hot": {"temperature": 2.0},
        "seeded": {"temperature": None, "seed": 9},
        "negative": {"temperature": None, "seed": -9},
        "greedy": {"temperature": 0.0},
        "greedy and seeded": {"temperature": 0.0, "seed": 9},
    }
    async with mock() as one:
        outputs = {
            case: [(await one.ask([1, 2, 3], 20, **sampling)).tokens for _ in range(2)]
            for case, sampling in cases.items()
        }
    assert {case for case, (first, second) in outputs.items() if first != second} == {"drawn", "hot"}
    assert outputs["greedy"] == outputs["greedy and seeded"]


async def test_at_any_speedup_batches_stay_small_enough_to_share_the_loop() -> None:
    async with mock(1e9, kv_blocks_total=4096) as one:
        answer = await one.ask([1], 10_000)
    assert len(one.batches) > 1
    assert len(answer.tokens) == 10_000


async def test_rejections_are_reported_as_failures() -> None:
    async with mock() as one:
        items = {"context_length_exceeded": [one.item([1], 1000)], "invalid_request": []}
        # One block behind different ones, as no prompts have them.
        for hashes in (b"", pack_u64([1, 2, 3]), pack_u64([2, 9]), pack_u64([1])):
            prompt = one.item([7] * max(9, len(hashes) // 2), 1)
            items["invalid_request"].append(msgspec.structs.replace(prompt, sequence_hashes=hashes))
        for code, refused in items.items():
            answers = [one.submit(item) for item in refused]
            await one.until(lambda: all(answer.over for answer in answers))  # noqa: B023 - awaited here
            errors = {(answer.error.status, answer.error.code) for answer in answers if answer.error is not None}
            assert errors == {(400, code)}
        assert (await one.ask([1, 2, 3, 4], 2)).error is None


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("inf"), float("nan")])
def test_a_speedup_is_a_positive_number(speedup: float) -> None:
    with pytest.raises(ValueError, match="speedup"):
        MockEngine(engine_config(), speedup=speedup)


async def test_an_embedding_is_a_vector_of_length_1_and_no_token() -> None:
    async with mock() as one:
        prompts = (range(10), range(10), range(11))
        answers = [await one.ask(prompt, task="embed") for prompt in prompts]
    first, second, other = (answer.vector for answer in answers)
    assert len(first) == DIMENSIONS
    assert sum(value * value for value in first) == pytest.approx(1.0, abs=1e-5)
    assert first == second != other
    for answer in answers:
        assert answer.finished is not None
        assert (answer.finished.reason, answer.finished.output_tokens) == ("stop", 0)
        assert (answer.tokens, answer.cached) == ([], None)
    for batch in one.batches:  # the vector and its end come together
        assert [vector.request_id for vector in batch.vectors] == [end.request_id for end in batch.finished]
    stored = [change for batch in one.batches for change in batch.cache_changes if isinstance(change, Stored)]
    assert len({block for change in stored for block in change.hashes}) == 2, "prompts are cached like any other"


async def test_log_probabilities_if_requested() -> None:
    async with mock() as one:
        asking, other = await asyncio.gather(one.ask(range(10), 5, logprobs=3), one.ask(range(10, 20), 5))
    assert other.logprobs == []
    assert [found.top[0].token_id for found in asking.logprobs] == asking.tokens
    for found in asking.logprobs:
        assert len({top.token_id for top in found.top}) == 3
        assert found.logprob == found.top[0].logprob > found.top[1].logprob > found.top[2].logprob


MODEL = Model(DEFAULT_MODEL)
WORDS = ("water", "stone", "river")
SCRIPTS = OutputScripts(
    MODEL.encode, lambda token_ids: MODEL.tokenizer.decode(token_ids, skip_special_tokens=False), WORDS
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
BOOKING = {
    "type": "function",
    "function": {"name": "Query", "parameters": {"properties": {"table": {"enum": ["order", "customer"]}}}},
}
NODE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["name", "next", "children"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "null"},
    {"type": "boolean"},
    {"const": {"a": 1}},
    {"enum": ["a", None, 3]},
    {"type": "integer", "minimum": 5, "maximum": 7},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": -1},
    {"type": "integer", "multipleOf": 7, "minimum": 50},
    {"type": "integer", "maximum": -10},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "multipleOf": 0.5, "minimum": 3},
    {"type": ["string", "null"], "minLength": 30},
    {"type": "string", "maxLength": 2},
    *({"type": "string", "format": name} for name in FORMATS),
    {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "minItems": 3},
    {"type": "array", "maxItems": 0},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b", "c"]},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"oneOf": [{"type": "string"}, {"type": "array", "items": {"$ref": "#/x~1y/0"}}], "x/y": [{"type": "integer"}]},
    NODE,
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KEYWORDS = (
    "$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type", "properties", "required", "additionalProperties",
    "items", "prefixItems",
    "minItems", "maxItems", "uniqueItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "format", "$defs",
)  # fmt: skip
TYPES = st.sampled_from(("object", "array", "integer", "number", "string"))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_value_matches_its_schema(schema: Any) -> None:
    for seed in range(20):
        value = SchemaValues(seed, WORDS).value(schema)
        Draft202012Validator(schema).validate(value)
        assert value == SchemaValues(seed, WORDS).value(schema)


def test_values_depend_on_the_seed() -> None:
    schema = {"type": "array", "items": {}, "minItems": 8}
    assert len({str(SchemaValues(seed, WORDS).value(schema)) for seed in range(20)}) > 10


@given(
    schema=st.dictionaries(st.sampled_from(KEYWORDS), JSON | TYPES | st.lists(TYPES, max_size=2), max_size=5),
    seed=st.integers(0, 9),
)
def test_any_json_is_accepted_as_a_schema(schema: Any, seed: int) -> None:
    json.dumps(SchemaValues(seed, WORDS).value({"properties": {"a": schema}, **schema}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
        {"properties": {name: {"$ref": "#"} for name in "abcdefgh"}, "required": [*"abcdefgh"]},
    ],
)
def test_endless_schemas_end(schema: Any) -> None:
    assert len(json.dumps(SchemaValues(1, WORDS).value(schema))) < 100_000


LONG = {"type": "array", "minItems": 999, "items": {"type": "string", "minLength": 10_000}}


@pytest.mark.parametrize(
    ("kind", "structure"),
    [
        ("json_schema", LONG),
        ("json_schema", {"type": "array", "minItems": 999, "items": {"const": "a" * 5_000}}),
        ("json_schema", {"type": "array", "minItems": 999, "items": {"enum": [["b"] * 1_000]}}),
        ("json_schema", {"type": "array", "minItems": 99, "items": {"required": ["c" * 5_000]}}),
        ("json_schema", {"const": "d" * 100_000}),
        ("choice", ["e" * 100_000]),
    ],
)
def test_the_size_of_a_structure_is_limited(kind: Any, structure: Any) -> None:
    script = script_of("prompt", structured=StructuredOutput(kind=kind, text=json.dumps(structure)))
    assert script is not None
    if kind == "json_schema":
        msgspec.json.decode(script[0])
    assert len(script[0]) <= CHARS_MAX


def test_the_calls_of_all_tools_share_one_limit() -> None:
    parameters = {"properties": {"values": LONG}}
    tools = [
        {"type": "function", "function": {"name": f"weather_{number}", "parameters": parameters}} for number in range(9)
    ]
    script = script_of(prompt("weather", *tools))
    assert script is not None
    assert script[0].count("<tool_call>") == 1
    assert len(script[0]) <= CHARS_MAX + 100


def prompt(text: str, *tools: Any, **arguments: Any) -> str:
    return MODEL.render([{"role": "user", "content": text}], tools, arguments)


def script_of(text: str, **sampling: Any) -> tuple[str, bool] | None:
    """Return the text of the script for a prompt, and whether the output ends after it."""
    made = work_item("a", MODEL.encode(text), 50, sampling=Sampling(max_tokens=50, **sampling))
    script = SCRIPTS.script(made)
    return None if script is None else (MODEL.decode(script.token_ids), script.is_whole)


@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("What is the weather?", ["get_weather"]),
        ("WEATHER, and query the table", ["get_weather", "Query"]),
        ("List all orders", ["Query"]),
        ("Hello, get this one", []),
        ("weather</tools>\n<tools>", ["get_weather"]),
    ],
)
def test_tools_are_called_if_the_last_message_mentions_them(text: str, called: list[str]) -> None:
    script = script_of(prompt(text, WEATHER, BOOKING))
    if not called:
        assert script is None
        return
    assert script is not None
    parts = [part.partition("</tool_call>")[0] for part in script[0].split("<tool_call>") if part.strip()]
    calls = [msgspec.json.decode(part) for part in parts]
    assert ([call["name"] for call in calls], script[1]) == (called, True)
    assert all(call["arguments"] for call in calls)


def test_a_few_words_follow_the_result_of_a_tool() -> None:
    turns = [{"role": "user", "content": "weather"}, {"role": "tool", "content": "the weather is fine"}]
    script = script_of(MODEL.render(turns, [WEATHER]))
    assert script is not None
    assert (len(script[0].split()), script[1]) == (FEW_WORDS["minItems"], True)


def test_nothing_is_called_with_ignore_eos_or_without_a_chat() -> None:
    assert script_of(prompt("weather", WEATHER), ignore_eos=True) is None
    assert script_of("weather") is None
    assert script_of(prompt("weather")) is None


def test_reasoning_precedes_words_or_calls() -> None:
    script = script_of(prompt("Hello", enable_thinking=True))
    assert script is not None
    reasoning, tag, rest = script[0].partition("\n</think>\n\n")
    assert (len(reasoning.split()), bool(tag), rest, script[1]) == (FEW_WORDS["minItems"], True, "", False)
    script = script_of(prompt("weather", WEATHER, reasoning_effort="low"))
    assert script is not None
    assert script[0].partition("</think>\n\n")[2].startswith("<tool_call>")


def test_a_chat_with_an_unfinished_message_of_the_assistant_has_no_script() -> None:
    begin = prompt("weather", WEATHER, enable_thinking=True)
    assert script_of(begin) is not None
    assert script_of(begin + "The weather") is None


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("json_schema", '{"const": 5}', "5"),
        ("json_schema", "not JSON", '"'),
        ("json_object", "", "{"),
        ("choice", '["yes"]', "yes"),
        ("choice", "[]", None),
        ("regex", "a+", None),
        ("grammar", "root ::= 1", None),
    ],
)
def test_scripted_output_has_the_requested_structure(kind: Any, text: str, found: str | None) -> None:
    script = script_of("prompt", structured=StructuredOutput(kind=kind, text=text))
    assert script is None if found is None else script is not None and script[0].startswith(found)


async def generated(made: WorkItem, vocabulary: Sequence[int] = range(300, 400)) -> tuple[list[int], str, int]:
    """Return the tokens of an item, its finish reason and the number of tokens that the engine reports."""
    config = EngineConfig(vocabulary=tuple(vocabulary), block_size=4, kv_blocks_total=400)
    batches = await finish(MockEngine(config, speedup=1e5, scripts=SCRIPTS), made)
    (end,) = [end for batch in batches for end in batch.finished]
    return tokens_of(batches), end.reason, end.output_tokens


@pytest.mark.parametrize(("max_tokens", "reason"), [(500, "stop"), (3, "length")])
async def test_the_engine_emits_a_script_and_ends_with_stop(max_tokens: int, reason: str) -> None:
    text = '{"const": "a text of more than three tokens"}'
    structured = StructuredOutput(kind="json_schema", text=text)
    sampling = Sampling(max_tokens=max_tokens, structured=structured)
    expected = MODEL.encode('"a text of more than three tokens"')[:max_tokens]
    made = work_item("a", list(range(9)), 50, sampling=sampling)
    assert await generated(made, vocabulary=(7,)) == (expected, reason, len(expected))


async def test_words_follow_a_script_that_is_not_whole() -> None:
    token_ids = MODEL.encode(prompt("Hello", enable_thinking=True))
    made = work_item("a", token_ids, 60, sampling=Sampling(max_tokens=60))
    script = SCRIPTS.script(made)
    assert script is not None
    words = [7] * (60 - len(script.token_ids))
    assert await generated(made, vocabulary=(7,)) == (script.token_ids + words, "length", 60)


PROMPTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "words": (MODEL.encode("Hello"), {}),
    "reasoning": (MODEL.encode(prompt("Hello", enable_thinking=True)), {}),
    "calls": (MODEL.encode(prompt("weather", WEATHER)), {}),
    "reasoning and calls": (MODEL.encode(prompt("weather", WEATHER, enable_thinking=True)), {}),
    "ignore_eos": (MODEL.encode(prompt("weather", WEATHER)), {"ignore_eos": True}),
    "structure": (MODEL.encode("Hello"), {"structured": StructuredOutput(kind="json_object")}),
    "empty": (MODEL.encode("Hello"), {"structured": StructuredOutput(kind="choice", text='[""]')}),
}


@given(
    case=st.sampled_from(sorted(PROMPTS)),
    max_tokens=st.integers(1, 150),
    sampling=st.sampled_from([{}, {"temperature": 0.0}, {"seed": 9}, {"logprobs": 2}]),
    shares=st.lists(st.floats(0, 1), max_size=3),
)
def test_a_continued_response_equals_the_undisturbed_one(
    case: str, max_tokens: int, sampling: dict[str, Any], shares: list[float]
) -> None:
    token_ids, constraints = PROMPTS[case]
    sampled = Sampling(max_tokens=max_tokens, **sampling, **constraints)
    whole_item = work_item("a", token_ids, max_tokens, sampling=sampled)
    whole, reason, count = asyncio.run(generated(whole_item))
    assert count == len(whole)
    made, done = whole_item, 0
    # A worker continues a response only if it has fewer than `max_tokens` tokens.
    last = min(len(whole), max_tokens - 1)
    for begin in sorted({*(round(share * last) for share in shares), last}):
        made = continued(made, whole[done:begin], 4)
        assert made == continued(whole_item, whole[:begin], 4)
        assert asyncio.run(generated(made)) == (whole[begin:], reason, len(whole) - begin)
        done = begin


async def test_a_worker_ends_a_response_whose_script_earlier_attempts_completed(scene: Scene) -> None:
    token_ids = MODEL.encode(prompt("weather", WEATHER))
    made = work_item("a", token_ids, 200)
    script = SCRIPTS.script(made)
    assert script is not None
    engine = MockEngine(engine_config(kv_blocks_total=400), speedup=1e4, scripts=SCRIPTS)
    async with scene.serving(scene.worker(engine=engine)) as epoch:
        chunk = TokenChunk(request_id="a", attempt=1, first_index=0, token_ids=pack_u32(script.token_ids))
        await scene.append(TOKENS, 3, TokensEmitted(worker_id="w0", worker_epoch=0, owner_epoch=0, chunks=(chunk,)))
        await scene.send(msgspec.structs.replace(made, attempt=2, worker_epoch=epoch))
        await until(lambda: scene.progress(RequestFinished))
    assert [chunk.attempt for event in scene.tokens(TokensEmitted) for chunk in event.chunks] == [1]
    (ended,), (finished,) = scene.tokens(ResponseEnded), scene.progress(RequestFinished)
    assert (ended.finish_reason, finished.finish_reason) == ("stop", "stop")
    assert ended.usage == Usage(prompt_tokens=len(token_ids), output_tokens=len(script.token_ids))
