"""Chat templates are rendered in the environment of transformers, and get their input in the form that they need."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from forebay.ingress.errors import ApiError
from forebay.ingress.model import DEFAULT_MODEL, InvalidModel, Model
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import ChatBody
from forebay.ingress.parsers.selection import ParserFactory
from forebay.ingress.prepare import Preparer
from forebay.ingress.settings import IngressSettings

HELLO = {"role": "user", "content": "hello"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "x": None}
TOOL = {"type": "function", "function": {"name": "wetter", "description": "Größe <b>", "parameters": PARAMETERS}}


@functools.cache
def small_tokenizer() -> str:
    """Return a tokenizer.json that is loaded in a fraction of the time of the default one."""
    made = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    made.add_special_tokens(["<|im_end|>"])
    text: str = made.to_str()
    return text


def model_of(directory: Path, template: Any = None, **files: Any) -> Model:
    """Return a model with a chat template in tokenizer_config.json, and with other files such as `config_json`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(small_tokenizer())
    config = {"chat_template": template, **files.pop("tokenizer_config_json", {})}
    for name, content in {"tokenizer_config_json": config, **files}.items():
        (directory / name.replace("_json", ".json")).write_text(json.dumps(content))
    return Model(directory)


def prompt(model: Model, *messages: dict[str, Any], **fields: Any) -> str:
    body = parse(ChatBody, msgspec.json.encode({"model": "m", "messages": messages, **fields}))
    (text,) = Preparer(model, ParserFactory(model), IngressSettings("m", "i")).render(body)
    assert isinstance(text, str)
    return text


def calling(arguments: str, **fields: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "wetter", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "1"}


def test_the_local_date_can_be_formatted(tmp_path: Path) -> None:
    text = prompt(model_of(tmp_path, "{{ strftime_now('%Y-%m-%d|%d %b %Y|%%') }}"), HELLO)
    assert re.fullmatch(r"20\d\d-\d\d-\d\d\|\d\d \w+ 20\d\d\|%", text)


OBJECTS = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ '[' + c.function.arguments + ']' }}{% endfor %}{% endfor %}"
)
PRINTED = "{% for m in messages %}{% for c in m.tool_calls %}[{{ c.function.arguments }}]{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% for c in m.tool_calls %}[{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}]{% endfor %}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% for name, value in c.function.arguments | items %}"
    "<{{ name }}={{ value }}>{% endfor %}{% endfor %}{% endfor %}"
)
SECOND = (  # needs the other form for some arguments only
    "{% for m in messages %}{% for c in m.tool_calls %}{% set given = c.function.arguments %}"
    "{% if 'zip' in given %}{{ '[' + given + ']' }}{% else %}{{ given | tojson }}{% endif %}{% endfor %}{% endfor %}"
)
SAYS_ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Options of `tojson`, and what it writes.
JSON = [
    ("", '{"b": "Größe <b>", "a": [1, null]}'),
    ("()", '{"b": "Größe <b>", "a": [1, null]}'),
    ("(ensure_ascii=True)", '{"b": "Gr\\u00f6\\u00dfe <b>", "a": [1, null]}'),
    ("(True)", '{"b": "Gr\\u00f6\\u00dfe <b>", "a": [1, null]}'),
    ("(ensure_ascii=False, separators=(',', ':'))", '{"b":"Größe <b>","a":[1,null]}'),
    ("(sort_keys=True)", '{"a": [1, null], "b": "Größe <b>"}'),
    ("(indent=1)", '{\n "b": "Größe <b>",\n "a": [\n  1,\n  null\n ]\n}'),
    ("(False, None, (', ', ':'), True)", '{"a":[1, null], "b":"Größe <b>"}'),
]
CALLED = "{%% for m in messages if m.tool_calls %%}%s{{ m.tool_calls[0].function.arguments.x }}{%% endfor %%}"
REASONING = "{%% for m in messages %%}{{ m.%s }}{%% endfor %%}"
NAMED = "{% for m in messages %}{{ m.name or m.role }};{% endfor %}"
TAGGED = [
    "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{%- for m in messages -%}\n  {%- generation -%}\n {{ m.content }}1 {%- endgeneration -%}\n{%- endfor -%}",
    "{% for m in messages %}\n    {% generation %}\n{{ m.content }}1{% endgeneration %}\n{% endfor %}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}1{% endfor %}",
]
# Template, arguments of a call, and the prompt.
ARGUMENTS = [
    (OBJECTS, '{"city":"Köln"}', '{"name": "wetter", "arguments": {"city": "Köln"}}'),
    (OBJECTS, "", '{"name": "wetter", "arguments": {}}'),
    (OBJECTS, f'{{"n": {1 << 70}}}', f'{{"name": "wetter", "arguments": {{"n": {1 << 70}}}}}'),
    (OBJECTS, '{"city": ', '{"name": "wetter", "arguments": "{\\"city\\": "}'),
    (TEXT, '{"city":"Köln"}', '[{"city":"Köln"}]'),
    (TEXT, '{"city": ', '[{"city": ]'),
    (TEXT, "[1]", "[[1]]"),
    (PRINTED, '{"city":"Köln"}', '[{"city":"Köln"}]'),
    (EITHER, '{"city":"Köln"}', '[{"city": "Köln"}]'),
    (EITHER, '{"city": ', '[{"city": ]'),
    (ITEMS, '{"city":"Köln","days":2}', "<city=Köln><days=2>"),
    (ITEMS, '{"city": ', '<arguments={"city": >'),
    (ITEMS, "[" * 5_000, "<arguments=" + "[" * 5_000 + ">"),
    (SECOND, '{"zip":1}', '[{"zip":1}]'),
]  # fmt: skip
# What a template does with a message that only calls.
CALLS = [
    ("{{ m.content is none }}", "True"),
    ("{{ m.content }}", ""),
    ("{{ m.content + '' }}", ""),
    ("{% if m.content %}said{% endif %}", ""),
]
DEVELOPER = {"role": "developer", "content": "be brief"}
PROMPTS: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [  # template, messages, fields, and the prompt
    *(
        (f"{{% set value = {{'b': 'Größe <b>', 'a': [1, none]}} %}}{{{{ value | tojson{options} }}}}", [], {}, written)
        for options, written in JSON
    ),
    *((template, [], {}, "hello1") for template in TAGGED),
    *(
        ("{# tools #}" + template, [calling(arguments), RESULT], {"tools": [TOOL]}, written)
        for template, arguments, written in ARGUMENTS
    ),
    *(
        (CALLED % template, [calling("{}", **content), RESULT], {}, written)
        for template, written in CALLS
        for content in ({}, {"content": None})
    ),
    # The developer is the system, unless the template knows the role.
    (SAYS_ALL, [DEVELOPER], {}, "<user>hello<system>be brief"),
    (SAYS_ALL + "{# developer #}", [DEVELOPER], {}, "<user>hello<developer>be brief"),
    # Every role may have a name.
    *(
        (NAMED, [{"role": role, "name": "alice", "content": "x"}], {}, "user;alice;")
        for role in ("system", "developer", "user", "assistant")
    ),
    (NAMED, [{**RESULT, "name": "alice"}], {}, "user;alice;"),
    # Reasoning has both names.
    *(
        (REASONING % used, [{"role": "assistant", "content": "x", name: "why"}], {}, "why")
        for name in ("reasoning", "reasoning_content")
        for used in ("reasoning", "reasoning_content")
    ),
]


@pytest.mark.parametrize(("template", "messages", "fields", "written"), PROMPTS)
def test_templates_get_messages_in_the_form_that_they_need(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], fields: dict[str, Any], written: str
) -> None:
    assert prompt(model_of(tmp_path, template), HELLO, *messages, **fields) == written


SAYS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}%s{% endif %}{% endfor %}"
)
LISTS = SAYS.replace("%s", "{% for p in m.content %}({{ p.text }}){% endfor %}")
TEXTS = SAYS_ALL
ONLY_LISTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}({{ p['text'] }}){% endfor %}{% endfor %}"
USER_LISTS = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}({{ p.text }}){% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501
ONLY_FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ (m.content or [{'text': ''}])[0].text + '' }}{% endfor %}"
FIRST_PART = SAYS.replace("%s", "{{ m.content[0].text }}")


@pytest.mark.parametrize(
    ("template", "as_list", "as_text"),
    [
        (LISTS, "<user>(a)(b)<tool>(c)(d)", "<user>ab<tool>cd"),
        (TEXTS, "<user>ab<tool>cd", "<user>ab<tool>cd"),
        (ONLY_LISTS, "<user>(a)(b)<tool>(c)(d)", "<user>(ab)<tool>(cd)"),
        (USER_LISTS, "<user>(a)(b)<tool>cd", "<user>ab<tool>cd"),
        (FIRST_PART, "<user>ab<tool>cd", "<user>ab<tool>cd"),
        (ONLY_FIRST_PART, "<user>ab<tool>cd", "<user>ab<tool>cd"),
    ],
)
def test_contents_are_lists_only_for_roles_whose_lists_the_template_shows(
    tmp_path: Path, template: str, as_list: str, as_text: str
) -> None:
    model = model_of(tmp_path, template)

    def of(texts: str, **fields: Any) -> dict[str, Any]:
        return {"content": [{"type": "text", "text": text} for text in texts], **fields}

    assert prompt(model, of("ab", role="user"), of("cd", **{k: RESULT[k] for k in ("role", "tool_call_id")})) == as_list
    assert prompt(model, {"role": "user", "content": "ab"}, {**RESULT, "content": "cd"}) == as_text


def test_unknown_special_tokens_are_undefined(tmp_path: Path) -> None:
    template = "{{ bos_token is defined }} {{ eos_token is defined }} {{ image_token }} {{ start }}"
    tokens = {"eos_token": {"content": "</s>"}, "image_token": "<i>", "extra_special_tokens": {"start": "<go>"}}
    model = model_of(tmp_path, template, tokenizer_config_json=tokens)
    assert prompt(model, HELLO) == "False True <i> <go>"
    with pytest.raises(ApiError, match=r"chat_template_kwargs\.bos_token is reserved"):
        prompt(model, HELLO, chat_template_kwargs={"bos_token": "x"})


TOKENS = "{{ bos_token }}{{ eos_token }}"


@pytest.mark.parametrize(
    ("config", "mapped", "written"),
    [
        ({}, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, "<s><|im_end|>"),
        ({"bos_token": None}, {"bos_token": {"content": "<s>", "lstrip": False}}, "<s>"),
        ({"bos_token": "<b>"}, {"bos_token": "<s>", "eos_token": "<|im_end|>"}, "<b><|im_end|>"),
        ({"eos_token": {"content": "<|im_end|>"}}, {"additional_special_tokens": ["<x>"]}, "<|im_end|>"),
    ],
)
def test_special_tokens_may_be_in_a_file_of_their_own(
    tmp_path: Path, config: dict[str, Any], mapped: dict[str, Any], written: str
) -> None:
    model = model_of(tmp_path, TOKENS, tokenizer_config_json=config, special_tokens_map_json=mapped)
    assert prompt(model, HELLO) == written
    end = model.tokenizer.token_to_id("<|im_end|>")
    assert model.end_ids == ({end} if "<|im_end|>" in written else set())


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 2}, {}, {2}),
        ({"text_config": {"eos_token_id": [2, 3]}}, {}, {2, 3}),
        ({"thinker_config": {"text_config": {"eos_token_id": 4}}}, {"eos_token_id": [5, 6]}, {4, 5, 6}),
        ({"eos_token_id": None, "text_config": {"eos_token_id": True}}, {}, set()),
    ],
)
def test_end_tokens_may_be_nested_and_lists(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any], ends: set[int]
) -> None:
    assert model_of(tmp_path, config_json=config, generation_config_json=generation).end_ids == ends


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"text_config": {"max_position_embeddings": 4096}, "max_position_embeddings": 77}, 4096),
        ({"llm_config": {"n_positions": 1024}}, 1024),
        ({"thinker_config": {"text_config": {"n_ctx": 4096}, "vision_config": {"n_ctx": 9}}}, 4096),
        ({"vision_config": {"max_position_embeddings": 577}, "language_config": {"seq_length": 2048}}, 2048),
        ({"n_positions": 1024, "n_ctx": 1024}, 1024),
        ({"n_ctx": 512}, 512),
        ({"max_seq_len": 2048}, 2048),
        ({"seq_length": 32_768}, 32_768),
        ({"max_sequence_length": 2048}, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),
        ({"max_position_embeddings": 4096.0}, 4096),
        ({"max_position_embeddings": None, "n_positions": 256}, 256),
    ],
)  # fmt: skip
def test_the_context_length_has_many_names_and_places(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], length: int
) -> None:
    assert model_of(tmp_path, config_json=config).context_tokens == length
    assert not caplog.records


@pytest.mark.parametrize(
    "config", [{}, {"max_position_embeddings": "long"}, {"n_positions": 0}, {"n_ctx": True}, {"seq_len": 1e30}]
)
def test_an_unknown_context_length_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any]
) -> None:
    assert model_of(tmp_path / "a", config_json=config).context_tokens == 131_072
    assert "config.json has no context length" in caplog.text
    caplog.clear()
    limit = {"model_max_length": 2048}
    assert model_of(tmp_path / "b", config_json=config, tokenizer_config_json=limit).context_tokens == 2048
    assert not caplog.records


@pytest.mark.parametrize(
    ("given", "files", "plain", "with_tools"),
    [
        ("c", {}, "c", None),
        ("c", {"chat_template.jinja": "j"}, "j", None),
        ("c", {"chat_template.json": {"chat_template": "p {{ tools }}"}}, "p ", "p ["),
        ("c", {"chat_template.json": {"chat_template": "p"}, "chat_template.jinja": "j"}, "j", None),
        (None, {"chat_template.json": {"chat_template": "p"}}, "p", None),
        ("c", {"additional_chat_templates/tool_use.jinja": "t {{ tools }}"}, "c", "t ["),
        ("c", {"chat_template.jinja": "j", "additional_chat_templates/tool_use.jinja": "t {{ tools }}"}, "j", "t ["),
        ("c", {"chat_template.jinja": "j", "additional_chat_templates/rag.jinja": "{% for %}"}, "j", None),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t {{ tools }}"}], {}, "d", "t ["),
        ([{"name": "tool_use", "template": "t {{ tools }}"}], {"chat_template.jinja": "j"}, "j", None),
    ],
)
def test_templates_are_found_in_every_place(
    tmp_path: Path, given: Any, files: dict[str, Any], plain: str, with_tools: str | None
) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    model = model_of(tmp_path, given)
    assert prompt(model, HELLO).startswith(plain.replace("[", "").strip() if with_tools is None else plain[:1])
    if with_tools is None:
        with pytest.raises(ApiError, match="does not support tools"):
            prompt(model, HELLO, tools=[TOOL])
    else:
        assert prompt(model, HELLO, tools=[TOOL]).startswith(with_tools)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (7, "neither a text nor a list of named texts"),
        ([{"name": "default"}], "neither a text nor a list of named texts"),
        ("{% generation %}", "does not compile"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "does not compile"),
    ],
)
def test_unusable_templates_are_reported_when_the_model_is_loaded(tmp_path: Path, template: Any, says: str) -> None:
    with pytest.raises(InvalidModel, match=says):
        model_of(tmp_path, template)


def test_the_tokenizer_neither_cuts_nor_pads_prompts(tmp_path: Path) -> None:
    tokenizer = json.loads((DEFAULT_MODEL / "tokenizer.json").read_bytes())
    pad = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "<|pad|>"}
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "truncation": cut, "padding": {**pad, "pad_to_multiple_of": None}})
    )
    model, text = Model(tmp_path), "one two three four five six seven"
    assert model.decode(model.encode(text, special=True)) == text
    assert model.encode(text, special=True) == Model(DEFAULT_MODEL).encode(text, special=True)


ENDS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)
LIST_ENDS = ENDS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text | trim }}{% endfor %}")
CONTINUES = {"continue_final_message": True}
LAST = {"role": "assistant", "content": "It is "}
LAST_PART = {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": "is "}]}


@pytest.mark.parametrize(
    ("template", "last", "fields", "written"),
    [
        (ENDS, LAST, {}, "<user>hello</s><assistant>It is </s><go>"),
        (ENDS, LAST, {"add_generation_prompt": None}, "<user>hello</s><assistant>It is </s><go>"),
        (ENDS, LAST, {"add_generation_prompt": False}, "<user>hello</s><assistant>It is </s>"),
        (ENDS, LAST, CONTINUES, "<user>hello</s><assistant>It is "),
        (ENDS, LAST, {**CONTINUES, "add_generation_prompt": True}, "<user>hello</s><assistant>It is "),
        (ENDS, LAST_PART, CONTINUES, "<user>hello</s><assistant>Itis "),
        (LIST_ENDS, LAST_PART, CONTINUES, "<user>hello</s><assistant>Itis"),
        (LIST_ENDS, LAST, {**CONTINUES, "add_generation_prompt": False}, "<user>hello</s><assistant>It is"),
    ],
)  # fmt: skip
def test_a_prompt_may_end_within_the_last_message(
    tmp_path: Path, template: str, last: dict[str, Any], fields: dict[str, Any], written: str
) -> None:
    assert prompt(model_of(tmp_path, template), HELLO, last, **fields) == written


@pytest.mark.parametrize(
    ("template", "last", "fields", "says"),
    [
        (ENDS, calling("{}"), {}, "requires a last message with text"),
        (ENDS.replace("m.content", "m.content | upper"), LAST, {}, "changes or omits the last message"),
        ("{{ messages[0].content }}", LAST, {}, "changes or omits the last message"),
    ],
)
def test_a_last_message_that_cannot_be_continued_is_rejected(
    tmp_path: Path, template: str, last: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        prompt(model_of(tmp_path, template), HELLO, last, continue_final_message=True, **fields)
    assert (caught.value.status, caught.value.param) == (400, "continue_final_message")


@given(st.text(), st.sampled_from([OBJECTS, TEXT, PRINTED, EITHER, ITEMS]))
def test_any_text_of_arguments_can_be_history(
    tmp_path_factory: pytest.TempPathFactory, text: str, template: str
) -> None:
    model = model_of(tmp_path_factory.mktemp("model"), template)
    written = prompt(model, HELLO, calling(text), RESULT)
    assert (
        text in written or json.dumps(text, ensure_ascii=False)[1:-1] in written or not text.strip() or is_object(text)
    )


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False
