"""A model directory as an ingress needs it: tokenizer, chat template, context length. No weights.

Files: tokenizer.json, tokenizer_config.json (chat_template, bos_token, eos_token) or chat_template.jinja,
config.json (max_position_embeddings). Templates are rendered as transformers does: sandboxed, with
`raise_exception`, whitespace trimmed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from forebay.ingress.errors import Unusable, invalid

CONTEXT_TOKENS_DEFAULT = 131_072
DEFAULT_MODEL = Path(__file__).with_name("default_model")
DEFAULT_NAME = "forebay-default"


class ModelUnusable(Unusable):
    """The model directory cannot be served from; one line says what is wrong and what is needed."""


class Model:
    """Text to tokens and back for one model directory."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ModelUnusable(f"{directory}: no such model directory; give one that holds a tokenizer.json")
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
        self._template = _compile(directory, tokenizer_config)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt of a chat. Raises ApiError when the template refuses the messages."""
        if self._template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        try:
            text: str = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
            return text
        except (TemplateError, TypeError, ValueError) as error:
            raise invalid(f"the chat template refuses these messages: {error}", "messages") from error

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens in the text count as such, none are added."""
        # The batch call with `fast` leaves out the offsets of every token, which nobody asks for here.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decoder(self) -> "Decoder":
        """A decoder for one answer."""
        return Decoder(self.tokenizer)


class Decoder:
    """Tokens to text, piece by piece; a character that is split over tokens waits for its rest."""

    __slots__ = ("_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_ids: list[int]) -> str:
        """The text that these tokens complete."""
        text: str | None = self._stream.step(self._tokenizer, token_ids)
        return text or ""


def model_name_of(directory: Path | None, name: str) -> str:
    """What a model is called in the API: its given name, else that of its directory."""
    return name or (DEFAULT_NAME if directory is None else directory.resolve().name)


def speaking_vocabulary(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of whole lower-case words with a leading space, for a mock engine to speak with, ascending."""
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(token for token in vocabulary if re.fullmatch("[Ġ▁][a-z]{3,}", token))
    # A token that another one begins with is mostly a fragment of a word.
    whole = [word for word, after in pairwise([*words, ""]) if not after.startswith(word)]
    return tuple(sorted(vocabulary[word] for word in whole)) or tuple(sorted(vocabulary.values()))


def _compile(directory: Path, tokenizer_config: dict[str, Any]) -> Any:
    source = tokenizer_config.get("chat_template")
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        source = beside.read_text(encoding="utf-8")
    if isinstance(source, list):  # several named templates: the one called default is for chats
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if source is None:
        return None
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
