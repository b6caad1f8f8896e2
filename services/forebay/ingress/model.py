"""A model directory as an ingress needs it: tokenizer, chat template, context length. No weights.

Files: tokenizer.json, tokenizer_config.json (chat_template, bos_token, eos_token) or chat_template.jinja,
config.json (max_position_embeddings, matryoshka_dimensions), generation_config.json (eos_token_id). Templates are
rendered as transformers does: sandboxed, with `raise_exception`, whitespace trimmed.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from forebay.events.names import NameInvalid, require_name
from forebay.ingress.errors import ApiError, Unusable, invalid
from forebay.ingress.media.tokens import media_tokens_of
from forebay.ingress.token_bytes import TokenBytes, text_chars_max

CONTEXT_TOKENS_DEFAULT = 131_072
DEFAULT_MODEL = Path(__file__).with_name("default_model")
DEFAULT_NAME = "forebay-default"
# What a template may break with when it computes with what a client gave.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
NO_TEXT = "\ufffd"  # stands for bytes that are no character
RENDERED_CHARS_MAX = 16 << 20  # of a chat: four times the text of a body, for roles, and for tools shown twice


class ModelUnusable(Unusable):
    """The model directory cannot be served from; one line says what is wrong and what is needed."""


class Model:
    """Text to tokens and back for one model directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ModelUnusable(f"{directory}: no such model directory; give one that holds a tokenizer.json")
        self.directory = directory
        config = _read_json(directory / "config.json")
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelUnusable(f"{path}: no such file; a model directory needs one")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelUnusable(f"{path}: is no tokenizer ({error})") from error
        self.context_tokens = int(config.get("max_position_embeddings", CONTEXT_TOKENS_DEFAULT))
        self.vocabulary_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = {
            name: _token_text(tokenizer_config.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self.token_bytes = TokenBytes(self.tokenizer)
        self.text_chars_max = text_chars_max(self.tokenizer, self.context_tokens)
        self.end_ids = _end_ids(directory, config, self.tokenizer, self._special["eos_token"])
        self.dimensions = _dimensions(config)
        sources = _template_sources(directory, tokenizer_config)
        self.template_source = sources.get("default", "")
        self._templates = {name: _compile(directory, source) for name, source in sources.items()}
        self._tool_source = sources.get("tool_use", self.template_source)
        self.media = media_tokens_of(config, self.tokenizer.id_to_token)
        if self.media.ids:
            self.media = replace(self.media, listed=self._takes_parts())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        chars_max: int = RENDERED_CHARS_MAX,
    ) -> str:
        """The prompt of a chat; `arguments` are the template's own. Raises ApiError when it refuses them.

        A template may repeat what it is given, so it is stopped when the prompt exceeds `chars_max`.
        """
        template = self._templates.get("tool_use" if tools else "default", self._templates.get("default"))
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        if tools and "tools" not in self._tool_source:
            raise invalid("the chat template of this model takes no tools", "tools", "unsupported_parameter")
        known = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": True}
        for name in arguments or ():
            if name in known or name in self._special:
                text = f"chat_template_kwargs.{name} is what the chat itself says"
                raise invalid(text, f"chat_template_kwargs.{name}")
        try:
            pieces, chars = [], 0
            for piece in template.generate(**known, **self._special, **(arguments or {})):
                chars += len(piece)
                if chars > chars_max:
                    text = f"the chat template makes a prompt of more than {chars_max:,} characters of these messages"
                    raise invalid(text, "messages", "context_length_exceeded")
                pieces.append(piece)
            return "".join(pieces)
        except TEMPLATE_ERRORS as error:
            raise invalid(f"the chat template refuses these messages: {error}", "messages") from error

    def _takes_parts(self) -> bool:
        """Whether the chat template knows messages that are lists of parts: it is tried."""
        text = "what is said"
        try:
            said = self.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
        except ApiError:
            return False
        return text in said and "'type'" not in said  # else it put the list there as Python writes it

    def takes_argument(self, name: str) -> bool:
        """Whether the chat template looks at an argument of this name."""
        return name in self.template_source

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids; special tokens in the text count as such, only with `special` those around it are added."""
        # The batch call with `fast` leaves out the offsets of every token, which nobody asks for here.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a piece of text, without those that surround a prompt."""
        return len(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def decoder(self, shown: Collection[str] | None = ()) -> "Decoder":
        """A decoder for one answer. Special tokens are left out but for those `shown`; None shows all but an end."""
        special = self.token_bytes.special
        if shown is None:
            hidden = special.keys() & self.end_ids
        else:
            hidden = {token_id for token_id, text in special.items() if text not in shown}
        return Decoder(self.tokenizer, frozenset(hidden) if len(hidden) < len(special) else None)


class Decoder:
    """Tokens to text, piece by piece; a character that is split over tokens waits for its rest.

    `hidden` are the special tokens to leave out, None for all.
    """

    __slots__ = ("_hidden", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int] | None = None) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=hidden is None)

    def push(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        hidden = self._hidden or ()
        # One by one: given several, the stream holds back all of their text while the last is no whole character, and
        # what is said at the end would depend on how the answer was cut.
        return "".join([self._step(token_id) for token_id in token_ids if token_id not in hidden])

    def _step(self, token_id: int) -> str:
        try:
            text: str | None = self._stream.step(self._tokenizer, [token_id])
        except Exception:  # noqa: BLE001 - the library raises bare Exception
            # With byte fallback, a byte behind a whole character can make both of them no text. What was given out
            # stays, and the stream, which cannot go on from there, begins anew.
            self._stream = DecodeStream(skip_special_tokens=self._hidden is None)
            text = self._stream.step(self._tokenizer, [token_id])
            return NO_TEXT + (text or "").lstrip(NO_TEXT)
        return text or ""


def model_name_of(directory: Path | None, name: str) -> str:
    """What a model is called in the API: its given name, else that of its directory. Raises Unusable."""
    try:
        return require_name("model", name or (DEFAULT_NAME if directory is None else directory.resolve().name))
    except NameInvalid as error:
        raise Unusable(f"{error}; --model-name gives it another") from error


def speaking_vocabulary(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of whole lower-case words with a leading space, for a mock engine to speak with, ascending."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(token for token in vocabulary if re.fullmatch("[Ġ▁][a-z]{3,}", token))
    # A token that another one begins with is mostly a fragment of a word.
    whole = [word for word, after in pairwise([*words, ""]) if not after.startswith(word)]
    return tuple(sorted(vocabulary[word] for word in whole)) or tuple(sorted(vocabulary.values()))


def _template_sources(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name: `default`, and perhaps `tool_use` for chats with tools."""
    source = tokenizer_config.get("chat_template")
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        source = beside.read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {entry.get("name"): entry["template"] for entry in source}
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    return {} if source is None else {"default": source}


def _end_ids(directory: Path, config: dict[str, Any], tokenizer: Tokenizer, end: str) -> frozenset[int]:
    """The tokens that end an answer."""
    found = {tokenizer.token_to_id(end)} if end else set()
    for named in (_read_json(directory / "generation_config.json"), config):
        given = named.get("eos_token_id")
        found |= set(given if isinstance(given, list) else [given])
    return frozenset(token_id for token_id in found if isinstance(token_id, int))


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    """To what lengths its embeddings may be cut: None for not at all, empty for any. vLLM reads the same fields."""
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list) and given:
        return tuple(size for size in given if isinstance(size, int))
    return () if config.get("is_matryoshka") else None


def _compile(directory: Path, source: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ModelUnusable(f"{directory}: its chat template does not compile ({error})") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelUnusable(f"{path}: is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{path}: holds no JSON object")
    return content


def _token_text(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
