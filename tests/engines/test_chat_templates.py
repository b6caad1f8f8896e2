"""Prompts of chats equal those of transformers, for the chat templates that other packages contain.

The oracle is `apply_chat_template`. It gets the messages of a request in each form that a template may need, because
OpenAI's API has only one form. The prompt must be the oracle's output for the messages as they were sent, with tool
calls as objects. Only if that output shows a wrong form, it may be the output for another form.
"""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.ingress.errors import ApiError
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.requests import ChatBody
from forebay.ingress.parsers.selection import ParserFactory
from forebay.ingress.prepare import Preparer
from forebay.ingress.settings import IngressSettings
from tests.certificates import original_environment
from tests.depth import examples

pytest.importorskip("transformers", reason="transformers is not installed here")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Messages = list[dict[str, Any]]
ROOT = Path(__file__).parents[2]
PACKAGES = ("axolotl==0.19.0", "llama-cpp-python==0.3.36", "trl==1.16.0")
FOLDER = ROOT / ".tools" / "chat-templates"
DOWNLOAD_S = 240  # 80 MB


def templates() -> dict[str, str]:
    """Return the templates of vLLM, TRL, Axolotl and llama.cpp, by package and name.

    The packages are downloaded once. Only their templates are kept, in `.tools`, which git ignores. Without a network,
    skip the test, or let it fail as CI demands.
    """
    folder = FOLDER / "_".join(PACKAGES)
    if not folder.is_dir():
        try:
            _download(folder)
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or b""
            reason = f"cannot download {', '.join(PACKAGES)}: {error} {output.decode(errors='replace')}"
            if os.environ.get("FOREBAY_REQUIRE_PARTS"):
                pytest.fail(reason)
            pytest.skip(reason)
    found = {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.jinja"))}
    vllm = importlib.util.find_spec("vllm")
    for path in sorted(Path(vllm.submodule_search_locations[0]).rglob("*.jinja")) if vllm else ():  # type: ignore[index]
        found[f"vllm/{path.name}"] = path.read_text()
    return found


def _download(folder: Path) -> None:
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as scratch:
        options = ["--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", scratch]
        command = [uv, "tool", "run", "--quiet", "pip", "download", *options, *PACKAGES]
        subprocess.run(command, check=True, timeout=DOWNLOAD_S, capture_output=True, env=original_environment())
        kept = Path(scratch) / "kept"
        for archive in sorted(Path(scratch).iterdir()):
            for name, content in _members(archive):
                path = kept / archive.name.partition("-")[0] / Path(name).name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        kept.rename(folder)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each template of a wheel or a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if name.endswith(".jinja"))
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and member.name.endswith(".jinja") and (content := source.extractfile(member)):
                yield member.name, content.read()


class Oracle:
    """Renders the same chats with forebay and with transformers, for every template of the corpus."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - tests are collected without it, too

        self.sources = templates()
        self.names = sorted(self.sources)
        self._folder = folder
        self._models: dict[str, Model] = {}
        self._tokenizer = AutoTokenizer.from_pretrained(self._directory("oracle", "-"))

    def _directory(self, name: str, source: str) -> Path:
        directory = self._folder / name.replace("/", "_")
        directory.mkdir()
        (directory / "tokenizer.json").write_bytes((DEFAULT_MODEL / "tokenizer.json").read_bytes())
        (directory / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 1 << 20}))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source, **SPECIAL}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    def model(self, name: str) -> Model:
        if name not in self._models:
            self._models[name] = Model(self._directory(name, self.sources[name]))
        return self._models[name]

    def ours(self, name: str, body: dict[str, Any]) -> str | None:
        """Return forebay's prompt of a request; None if it is rejected with status 400."""
        chat, model = parse(ChatBody, msgspec.json.encode({"model": "m", **body})), self.model(name)
        try:
            (prompt,) = Preparer(model, ParserFactory(model), IngressSettings("m", "i")).render(chat)
        except ApiError as error:
            assert error.status == 400
            assert str(error)
            return None
        assert isinstance(prompt, str)
        return prompt

    def theirs(self, name: str, messages: Messages, body: dict[str, Any]) -> str | None:
        """Return the oracle's prompt of the messages; None if the template raises an error."""
        variables = dict(body.get("chat_template_kwargs", {}))
        if body.get("continue_final_message"):
            variables["continue_final_message"] = True
        else:
            variables["add_generation_prompt"] = body.get("add_generation_prompt", True)
        try:
            prompt: str = self._tokenizer.apply_chat_template(
                messages,
                tools=body.get("tools"),
                chat_template=self.sources[name],
                tokenize=False,
                **variables,
            )
        except Exception:  # noqa: BLE001 - a template may raise anything
            return None
        return prompt

    def check(self, name: str, body: dict[str, Any]) -> None:
        day = datetime.now().date()  # noqa: DTZ005 - templates contain the local date
        ours, source = self.ours(name, body), self.sources[name]
        outputs = (self.theirs(name, messages, body) for messages in forms(body["messages"], source))
        sent = next(outputs)
        has_end = not body.get("continue_final_message") or body["messages"][-1].get("content") is not None
        if not has_end or (sent is not None and is_faithful(sent, body["messages"])):
            expected: list[str | None] = [sent]
        else:
            found = [one for one in (sent, *outputs) if one is not None]
            expected = [*filter(lambda one: is_faithful(one, body["messages"]), found)] or [*found] or [None]
        assert ours in expected or datetime.now().date() != day, (name, ours, sent)  # noqa: DTZ005


def forms(messages: Messages, source: str) -> Iterator[Messages]:
    """Yield the messages in each form that a template may need: first as sent, with calls as objects."""
    messages = [normal(message, source) for message in messages]
    roles = sorted({message["role"] for message in messages if message["content"] is not None})
    for has_objects, null in itertools.product((True, False), (None, "")):
        for shapes in itertools.product(("sent", "text", "list"), repeat=len(roles)):
            yield [shaped(message, dict(zip(roles, shapes, strict=True)), null, has_objects) for message in messages]


def normal(message: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a message with what the API defines: a null content, both names of reasoning, the role of instructions."""
    changed = {"content": None, **message}
    if changed["role"] == "developer" and "developer" not in source:
        changed["role"] = "system"
    for one, other in itertools.permutations(("reasoning_content", "reasoning")):
        if one in changed:
            changed.setdefault(other, changed[one])
    return changed


def shaped(message: dict[str, Any], shapes: dict[str, str], null: str | None, has_objects: bool) -> dict[str, Any]:
    changed, content = dict(message), message["content"]
    if content is None:
        changed["content"] = null
    elif shapes[message["role"]] != "sent":
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        changed["content"] = text if shapes[message["role"]] == "text" else [{"type": "text", "text": text}]
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            if has_objects
            else call
            for call in calls
        ]
    return changed


def is_faithful(prompt: str, messages: Messages) -> bool:
    """Return whether a prompt shows the texts of the messages, and no Python literals or JSON in JSON."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        texts += [content] if isinstance(content, str) else [part["text"] for part in content or []]
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            if any(f"'{key}'" in prompt or f'\\"{key}\\"' in prompt for key in arguments):
                return False
    has_null = "null" in json.dumps([message.get("tool_calls") for message in messages if message.get("tool_calls")])
    traces = ("'type': 'text'", '"type": "text"', *(() if has_null else ("None",)))
    literal = any(trace in prompt for trace in traces)
    return not literal and all(text.strip() in prompt for text in texts)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("templates"))


WORDS = st.sampled_from(["tea", "Größe", "日本", "a <b> & 'c'", 'say "hi"', "two\nlines", "{{ x }}", "🙂"])
SPACES = st.sampled_from(["", "", " ", "\n"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=3,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "days", "options"]), VALUES, max_size=3)
NAMES = st.sampled_from(["weather", "get_time"])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Größe"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Now <b>", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "description": "The time.", "parameters": SCHEMA}},
]


class Chat:
    """Draws the parts of a chat. Each text has a number, so that a prompt without it cannot go unnoticed."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._numbers = itertools.count(1000)

    def text(self) -> str:
        space, word = self._draw(SPACES), self._draw(WORDS)
        return f"{space}{word} {next(self._numbers)}{self._draw(SPACES)}"

    def content(self) -> Any:
        count = self._draw(st.integers(0, 3))
        return [{"type": "text", "text": self.text()} for _ in range(count)] or self.text()

    def maybe(self, **fields: Any) -> dict[str, Any]:
        return fields if self._draw(st.booleans()) else {}

    def call(self, call_id: str) -> dict[str, Any]:
        arguments = json.dumps(self._draw(ARGUMENTS), ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": self._draw(NAMES), "arguments": arguments}}

    def turn(self, rounds: int) -> Messages:
        """Return the messages of one turn: a question, rounds of tool calls, and an answer."""
        messages: Messages = [{"role": "user", "content": self.content(), **self.maybe(name="alice")}]
        for number in range(rounds):
            ids = [f"call{number}{index:04}" for index in range(self._draw(st.integers(1, 2)))]
            said: dict[str, Any] = self._draw(st.sampled_from([{}, {"content": None}, {"content": self.text()}]))
            reasoning = self.maybe(reasoning_content=self.text())
            calls = [self.call(call_id) for call_id in ids]
            messages.append({"role": "assistant", **said, "tool_calls": calls, **reasoning})
            for call_id in ids:
                result = {"role": "tool", "tool_call_id": call_id, "content": self.content()}
                messages.append(result | self.maybe(name="weather"))
        reasoning = {self._draw(st.sampled_from(["reasoning_content", "reasoning"])): self.text()}
        return [*messages, {"role": "assistant", "content": self.content(), **self.maybe(**reasoning)}]


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    chat, has_tools = Chat(draw), draw(st.booleans())
    role = draw(st.sampled_from(["", "system", "developer"]))
    messages: Messages = [{"role": role, "content": chat.content()}] if role else []
    for _ in range(draw(st.integers(1, 2))):
        messages += chat.turn(draw(st.integers(0, 2)) if has_tools else 0)
    kept = max(len(messages) - draw(st.integers(0, 2)), 1 + bool(role))
    thinks = {"enable_thinking": draw(st.booleans())}
    tools: dict[str, Any] = {"tools": TOOLS} if has_tools else {}
    end: dict[str, Any] = draw(
        st.sampled_from([{}, {}, {"add_generation_prompt": False}, {"continue_final_message": True}])
    )
    return {"messages": messages[:kept], **tools, **chat.maybe(chat_template_kwargs=thinks), **end}


@pytest.mark.timeout(900)  # loads a tokenizer for each of 185 templates
@examples(10)
@given(st.data())
def test_prompts_equal_those_of_transformers(oracle: Oracle, data: st.DataObject) -> None:
    name, body = data.draw(st.sampled_from(oracle.names)), data.draw(bodies())
    if "tools" not in oracle.sources[name]:
        body.pop("tools", None)  # forebay rejects tools that the template would ignore
    oracle.check(name, body)


def test_the_chat_template_of_a_family_selects_its_parsers(oracle: Oracle) -> None:
    """The names are those of the templates in llama.cpp, which has them from the families."""
    expected = {
        "GLM-4.6": ("glm45", "qwen3"),
        "Kimi-K2-Instruct": ("kimi_k2", ""),
        "Kimi-K2-Thinking": ("kimi_k2", "qwen3"),
        "MiniMax-M1": ("minimax", ""),
        "MiniMax-M2": ("minimax_m2", "qwen3"),
        "MiniMax-M3": ("", ""),
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", ""),
        "Qwen-Qwen2.5-7B-Instruct": ("hermes", ""),
        "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
        "Qwen3-Coder": ("qwen3_coder", ""),
        "Qwen3.5-4B": ("qwen3_coder", "qwen3"),
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "qwen3"),
        "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
        "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "qwen3"),
        "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "qwen3"),
        "google-gemma-2-2b-it": ("", ""),
        "google-gemma-4-31B-it": ("gemma4", "gemma4"),
        "ibm-granite-granite-3.3-2B-Instruct": ("granite", "qwen3"),
        "ibm-granite-granite-4.0": ("hermes", ""),
        "meetkai-functionary-medium-v3.1": ("", ""),
        "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", ""),
        "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", ""),
        "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
        "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", ""),
        "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
        "unsloth-Apriel-1.5": ("", ""),
    }
    by_stem = {Path(name).stem: name for name in oracle.names if "llama" in name.partition("/")[0]}
    found = {}
    for stem in expected:
        factory = ParserFactory(oracle.model(by_stem[stem]))
        found[stem] = factory.tool, factory.reasoning
    assert found == expected
