"""Read the parts of a model directory that an ingress needs: tokenizer, chat template and context length, not weights.

Files: tokenizer.json, tokenizer_config.json (chat_template, bos_token, eos_token) or chat_template.jinja,
config.json (max_position_embeddings, matryoshka_dimensions), generation_config.json (eos_token_id). Templates
are rendered as in transformers: in a sandbox, with `raise_exception` and trimmed white space.
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
from tokenizers.decoders import ByteLevel, DecodeStream

from forebay.events.names import NameInvalid, require_name
from forebay.ingress.errors import ApiError, Unusable, invalid
from forebay.ingress.media.tokens import media_tokens_of
from forebay.ingress.token_bytes import TokenBytes, text_chars_max
from forebay.ingress.word_tokens import word_tokens

CONTEXT_TOKENS_DEFAULT = 131_072
DEFAULT_MODEL = Path(__file__).with_name("default_model")
DEFAULT_NAME = "forebay-default"
# Exceptions that a template may raise for values from a client.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
WORDS_CHARS_MAX = 8_000  # threads tokenize longer texts; the library then lets other threads run, Python does not
NO_TEXT = "\ufffd"  # the decoder writes it for bytes that are not a valid character
RENDERED_CHARS_MAX = (
    16 << 20
)  # of a chat: four times the text of a body, because templates add roles and may repeat tools


class ModelUnusable(Unusable):
    """The model directory cannot be used. The message is one line: what is wrong and what is needed."""


class Model:
    """Tokenizer, chat template and configuration of one model directory.

    Attributes:
        directory: the model directory.
        context_tokens: maximum number of tokens of a prompt and its response together.
        vocabulary_size: number of token ids, including added tokens.
        text_chars_max: maximum number of characters of a text that fits into the context; None if the tokenizer
            allows no such bound.
        end_ids: token ids that end a response.
        dimensions: lengths to which embeddings may be truncated; None if truncation is not allowed, empty for any.
        template_source: source of the default chat template; empty if the model has none.
        media: placeholder tokens of images and videos.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ModelUnusable(f"{directory}: no such model directory; give a directory with a tokenizer.json")
        self.directory = directory
        config = read_json(directory / "config.json")
        tokenizer_config = read_json(directory / "tokenizer_config.json")
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelUnusable(f"{path}: no such file; a model directory needs a tokenizer.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelUnusable(f"{path}: not a valid tokenizer ({error})") from error
        self.context_tokens = context_tokens_of(config)
        self.vocabulary_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = {
            name: _token_text(tokenizer_config.get(name))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        self.token_bytes = TokenBytes(self.tokenizer)
        self._words = word_tokens(self.tokenizer)
        self._texts = TokenTexts(self.tokenizer) if isinstance(self.tokenizer.decoder, ByteLevel) else None
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
        """Return the prompt of a chat as text: the output of the chat template.

        Args:
            messages: the messages, in the format that the chat template expects.
            tools: tools that the model may call.
            arguments: additional variables of the chat template.
            chars_max: maximum characters of the prompt. Rendering stops there, because a template may repeat its input.

        Raises:
            ApiError: the template rejects the messages, or the prompt is too long.
        """
        template = self._templates.get("tool_use" if tools else "default", self._templates.get("default"))
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        if tools and "tools" not in self._tool_source:
            raise invalid("the chat template of this model does not support tools", "tools", "unsupported_parameter")
        known = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": True}
        for name in arguments or ():
            if name in known or name in self._special:
                text = f"chat_template_kwargs.{name} is reserved: the chat itself sets it"
                raise invalid(text, f"chat_template_kwargs.{name}")
        try:
            pieces, chars = [], 0
            for piece in template.generate(**known, **self._special, **(arguments or {})):
                chars += len(piece)
                if chars > chars_max:
                    text = f"the rendered prompt exceeds {chars_max:,} characters; send shorter messages"
                    raise invalid(text, "messages", "context_length_exceeded")
                pieces.append(piece)
            return "".join(pieces)
        except TEMPLATE_ERRORS as error:
            raise invalid(f"the chat template rejects these messages: {error}", "messages") from error

    def _takes_parts(self) -> bool:
        """Return whether the chat template accepts a message as a list of parts, by rendering one."""
        text = "probe text"
        try:
            prompt = self.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
        except ApiError:
            return False
        return text in prompt and "'type'" not in prompt  # otherwise it printed the list as a Python literal

    def uses_template_argument(self, name: str) -> bool:
        """Return whether the chat template refers to a variable of this name."""
        return name in self.template_source

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. Special tokens in the text are recognised.

        Args:
            text: the text.
            special: whether to add the special tokens that the tokenizer puts around a prompt.
        """
        if self._words is not None and not special and len(text) <= WORDS_CHARS_MAX:
            found = self._words.encode(text)
            if found is not None:
                return found
        # The `fast` batch call does not compute the offsets of tokens, which are not needed.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, without special tokens. Unknown ids are dropped."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without the special tokens around a prompt."""
        return len(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def decoder(self, visible: Collection[str] | None = ()) -> "Decoder":
        """Return a decoder for one response.

        Args:
            visible: texts of the special tokens to keep; all others are dropped. None keeps all except end tokens.
        """
        special = self.token_bytes.special
        if visible is None:
            hidden = special.keys() & self.end_ids
        else:
            hidden = {token_id for token_id, text in special.items() if text not in visible}
        hides_all = len(hidden) == len(special)
        return Decoder(self.tokenizer, None if hides_all else frozenset(hidden), self._texts if hides_all else None)


class Decoder:
    """Incremental detokenizer of one response. A character that spans tokens is emitted with its last token.

    Args:
        tokenizer: the tokenizer of the model.
        hidden: ids of the special tokens to drop; None to drop all.
        texts: texts of single tokens; None if the text of a token depends on the tokens before it.
    """

    __slots__ = ("_has_part", "_hidden", "_stream", "_texts", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, hidden: frozenset[int] | None = None, texts: "TokenTexts | None" = None
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._texts = texts
        self._has_part = False  # whether the stream has tokens that are only a part of a character
        self._stream = DecodeStream(skip_special_tokens=hidden is None)

    def push(self, token_ids: list[int]) -> str:
        """Return the new text after these tokens. An incomplete character is kept for the next call."""
        hidden = self._hidden or ()
        # One by one: with several tokens the stream buffers the text of all of them while the last one is an incomplete
        # character, so the text at the end of a response would depend on how its tokens were batched.
        return "".join([self._step(token_id) for token_id in token_ids if token_id not in hidden])

    def _step(self, token_id: int) -> str:
        if self._texts is None:
            return self._decode(token_id)
        if not self._has_part:
            text = self._texts[token_id]
            if text is not None:
                return text
            self._stream = DecodeStream(skip_special_tokens=True)  # which has not seen the complete tokens before
        text = self._decode(token_id)
        self._has_part = not text or text.endswith(NO_TEXT)
        return text

    def _decode(self, token_id: int) -> str:
        try:
            text: str | None = self._stream.step(self._tokenizer, [token_id])
        except Exception:  # noqa: BLE001 - the library raises bare Exception
            # With byte fallback, a byte after a complete character can make both invalid. Emitted text stays as it is,
            # and a new stream replaces this one, which cannot continue.
            self._stream = DecodeStream(skip_special_tokens=self._hidden is None)
            text = self._stream.step(self._tokenizer, [token_id])
            return NO_TEXT + (text or "").lstrip(NO_TEXT)
        return text or ""


class TokenTexts(dict[int, str | None]):
    """Text of each token of a byte-level tokenizer, None for a token that is only a part of a character.

    Such a tokenizer decodes the bytes of all tokens together, so the text of complete characters depends on no other
    token. A lookup takes a tenth of the time of `DecodeStream`, and adds a missing token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=True)
        found = None if NO_TEXT in text else text
        if self._tokenizer.id_to_token(token_id) is not None:  # so the vocabulary bounds the number of entries
            self[token_id] = found
        return found


def model_name_of(directory: Path | None, name: str) -> str:
    """Return the name of a model in the API.

    Args:
        directory: model directory, whose name is the default; None if there is none.
        name: value of `--model-name`; empty for the default.

    Raises:
        Unusable: the name is invalid.
    """
    try:
        return require_name("model", name or (DEFAULT_NAME if directory is None else directory.resolve().name))
    except NameInvalid as error:
        raise Unusable(f"{error}; set another name with --model-name") from error


def word_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of tokens that are a whole lower-case word with a leading space, in ascending order.

    A mock engine generates its output from them. If the vocabulary has no such token, all ids are returned.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(token for token in vocabulary if re.fullmatch("[Ġ▁][a-z]{3,}", token))
    # A token that is a prefix of another token is usually a fragment of a word.
    whole = [word for word, after in pairwise([*words, ""]) if not after.startswith(word)]
    return tuple(sorted(vocabulary[word] for word in whole)) or tuple(sorted(vocabulary.values()))


def _template_sources(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: `default`, and `tool_use` for chats with tools if there is one."""
    source = tokenizer_config.get("chat_template")
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        source = beside.read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {entry.get("name"): entry["template"] for entry in source}
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    return {} if source is None else {"default": source}


def _end_ids(directory: Path, config: dict[str, Any], tokenizer: Tokenizer, end: str) -> frozenset[int]:
    """Return the token ids that end a response."""
    found = {tokenizer.token_to_id(end)} if end else set()
    for named in (read_json(directory / "generation_config.json"), config):
        given = named.get("eos_token_id")
        found |= set(given if isinstance(given, list) else [given])
    return frozenset(token_id for token_id in found if isinstance(token_id, int))


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Return `Model.dimensions` for the config.json of a model, by the same rules as vLLM."""
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
        raise ModelUnusable(f"{directory}: the chat template does not compile ({error})") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def context_tokens_of(config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens of a prompt and its response together, by the config.json of a model."""
    return int(config.get("max_position_embeddings", CONTEXT_TOKENS_DEFAULT))


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file. Raises ModelUnusable if it is not valid."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelUnusable(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{path}: not a JSON object")
    return content


def _token_text(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
