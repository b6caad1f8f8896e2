"""Read the parts of a model directory that an ingress needs: tokenizer, chat template and context length, not weights.

Files: tokenizer.json; config.json (context length, eos_token_id, matryoshka_dimensions, placeholders of media);
generation_config.json (eos_token_id); tokenizer_config.json and special_tokens_map.json (special tokens);
preprocessor_config.json, video_preprocessor_config.json and processor_config.json (sizes of images and videos). The
chat templates are in chat_template.jinja and additional_chat_templates, in chat_template.json or in
tokenizer_config.json.
"""

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from forebay.events.media import MediaKind
from forebay.events.models import ModelCard, ModelFile
from forebay.events.names import NameInvalid, require_name
from forebay.ingress.chat_template import COMPILE_ERRORS, RENDERED_CHARS_MAX, TEMPLATE_ERRORS, ChatTemplate, TooLong
from forebay.ingress.errors import invalid
from forebay.ingress.media.tokens import media_tokens_of
from forebay.ingress.token_bytes import TokenBytes
from forebay.ingress.word_tokens import word_tokens
from forebay.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

CONTEXT_TOKENS_DEFAULT = 131_072
# Names of the context length in config.json, as in vLLM, and the older `n_ctx`. The smallest value counts, but
# `model_max_length` has priority: Command R has a smaller `max_position_embeddings`.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
MAX_LENGTH = "model_max_length"
CONTEXT_TOKENS_MAX = 1 << 31  # transformers writes 10 ** 30 for an unknown length
# Names of the part of a config.json that describes the language model, which may have such a part, too.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "generator")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GENERATION_FILE = "generation_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
PROCESSOR_FILE = "processor_config.json"
IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
VIDEO_PROCESSOR_FILE = "video_preprocessor_config.json"
NAMED_TEMPLATE_FILES = {name: f"additional_chat_templates/{name}.jinja" for name in ("default", "tool_use")}
DEFAULT_MODEL = Path(__file__).with_name("default_model")
DEFAULT_NAME = "forebay-default"
WORDS_CHARS_MAX = 8_000  # threads tokenize longer texts; the library then lets other threads run, Python does not
NO_TEXT = "\ufffd"  # the decoder writes it for bytes that are not a valid character


class InvalidModel(ConfigError):
    """The model directory cannot be used. The message is one line: what is wrong and what is needed."""


class GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of requests that do not set them, from generation_config.json; vLLM reads the same fields."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: int = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Model:
    """Tokenizer, chat template and configuration of one model directory.

    The argument `context_tokens` replaces the context length of the directory.

    Attributes:
        card: what the model card says about the model, without the files.
        context_tokens: maximum number of tokens of a prompt and its response together.
        vocabulary_size: number of token ids, including added tokens.
        generation: defaults of sampling parameters.
        types: values of `model_type` in the config.json and in its parts for language.
        dimensions: lengths to which embeddings may be truncated; None if truncation is not allowed, empty for any.
    """

    def __init__(self, directory: Path, context_tokens: int | None = None) -> None:
        if not directory.is_dir():
            raise InvalidModel(f"{directory}: no such model directory; give a directory with a tokenizer.json")
        self.directory = directory
        config = read_json(directory / "config.json")
        tokenizer_config = read_json(directory / "tokenizer_config.json")
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidModel(f"{path}: no such file; a model directory needs a tokenizer.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise InvalidModel(f"{path}: not a valid tokenizer ({error})") from error
        self.tokenizer.no_truncation()  # a prompt that is too long must be rejected, not cut
        self.tokenizer.no_padding()
        self.card = card_of(directory, context_tokens=context_tokens)
        self.context_tokens = self.card.context_tokens
        self.vocabulary_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        special = _special_tokens(tokenizer_config, read_json(directory / "special_tokens_map.json"))
        self.token_bytes = TokenBytes(self.tokenizer)
        self._words = word_tokens(self.tokenizer)
        self._texts = TokenTexts(self.tokenizer) if isinstance(self.tokenizer.decoder, ByteLevel) else None
        generation = read_json(directory / GENERATION_FILE)
        try:
            given = {name: value for name, value in generation.items() if value is not None}
            self.generation = msgspec.convert(given, GenerationConfig)
        except msgspec.ValidationError as error:
            raise InvalidModel(f"{directory / GENERATION_FILE}: {error}") from error
        self.end_ids = _end_ids(generation, config, self.tokenizer, special.get("eos_token", ""))
        self.dimensions = _dimensions(config)
        types = (one.get("model_type") for one in _text_configs(config))
        self.types = frozenset(one for one in types if isinstance(one, str))
        try:
            settings = _processor_settings(directory)
            self.media = media_tokens_of(config, self.tokenizer.id_to_token, self.tokenizer.token_to_id, settings)
        except ConfigError as error:
            raise InvalidModel(f"{directory}: {error}") from error
        sources = _template_sources(directory, tokenizer_config)
        self.template_source = "\n".join(sources.values())
        self._reserved = {"messages", "tools", "documents", "add_generation_prompt", *SPECIAL_TOKENS, *special}
        try:
            self._templates = {name: ChatTemplate(one, special, self.media.texts) for name, one in sources.items()}
        except COMPILE_ERRORS as error:
            raise InvalidModel(f"{directory}: the chat template does not compile ({error})") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
        chars_max: int = RENDERED_CHARS_MAX,
        *,
        is_open: bool = True,
        continues: bool = False,
    ) -> str:
        """Return the prompt of a chat as text: the output of the chat template.

        Args:
            chars_max: maximum characters of the prompt. Rendering stops there, because a template may repeat its input.
            is_open: whether the prompt ends with the beginning of the assistant's next message.
            continues: whether the prompt ends within the last message, so that the model continues it.

        Raises ApiError if the template rejects the messages, or the prompt is too long.
        """
        template = self._templates.get("tool_use" if tools else "default", self._templates.get("default"))
        if template is None:
            raise invalid("this model has no chat template; use /v1/completions", "messages", "no_chat_template")
        if tools and "tools" not in template.source:
            raise invalid("the chat template of this model does not support tools", "tools", "unsupported_parameter")
        for name in arguments or ():
            if name in self._reserved:
                text = f"chat_template_kwargs.{name} is reserved: the chat itself sets it"
                raise invalid(text, f"chat_template_kwargs.{name}")
        try:
            return template.render(
                messages, tools, arguments or {}, chars_max, is_open=is_open and not continues, continues=continues
            )
        except TooLong as error:
            text = f"the rendered prompt exceeds {chars_max:,} characters; send shorter messages"
            raise invalid(text, "messages", "context_length_exceeded") from error
        except TEMPLATE_ERRORS as error:
            raise invalid(f"the chat template rejects these messages: {error}", "messages") from error

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text. Special tokens in it are recognised; `special` adds those around a prompt."""
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
        """Return a decoder for one response that drops special tokens, except those with a text in `visible`.

        If `visible` is None, only end tokens are dropped.
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
        if len(token_ids) == 1:
            return "" if token_ids[0] in hidden else self._step(token_ids[0])
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
    """Return the name of a model in the API. Raises ConfigError if `name`, the value of `--model-name`, is invalid."""
    try:
        return require_name("model", name or (DEFAULT_NAME if directory is None else directory.resolve().name))
    except NameInvalid as error:
        raise ConfigError(f"{error}; set another name with --model-name") from error


def word_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of tokens that are a whole lower-case word with a leading space, in ascending order.

    A mock engine generates its output from them. If the vocabulary has no such token, all ids are returned.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
    words = sorted(token for token in vocabulary if re.fullmatch("[Ġ▁][a-z]{3,}", token))
    # A token that is a prefix of another token is usually a fragment of a word.
    whole = [word for word, after in pairwise([*words, ""]) if not after.startswith(word)]
    return tuple(sorted(vocabulary[word] for word in whole)) or tuple(sorted(vocabulary.values()))


def _template_sources(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: `default`, and `tool_use` for chats with tools if there is one.

    As in transformers, templates in .jinja files replace all templates of the configuration.
    """
    files = [("default", TEMPLATE_FILE), *NAMED_TEMPLATE_FILES.items()]
    paths = {name: directory / file for name, file in files if (directory / file).is_file()}
    try:
        sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    except UnicodeDecodeError as error:
        raise InvalidModel(f"{directory}: a chat template is not valid UTF-8 ({error})") from error
    if "default" in sources:
        return sources
    # Processors of models with images have a file of their own.
    given = read_json(directory / PROCESSOR_TEMPLATE_FILE).get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    named = given if isinstance(given, dict) else {} if given is None else {"default": given}
    if not all(isinstance(source, str) for source in named.values()):
        raise InvalidModel(f"{directory}: chat_template is neither a text nor a list of named texts")
    return {name: named[name] for name in NAMED_TEMPLATE_FILES if name in named} | sources


def _processor_settings(directory: Path) -> dict[MediaKind, dict[str, Any]]:
    """Return the settings of the processors of images and videos. As in transformers, nested ones have priority.

    Those of images have the settings of the processor around them, too.
    """
    processor, images = read_json(directory / PROCESSOR_FILE), read_json(directory / IMAGE_PROCESSOR_FILE)
    videos = read_json(directory / VIDEO_PROCESSOR_FILE) or images
    nested = {name: one for name, one in processor.items() if isinstance(one, dict)}
    return {
        "image": {**processor, **nested.get("image_processor", images)},
        "video": nested.get("video_processor", videos),
    }


def _special_tokens(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens that chat templates get as variables. Tokens of tokenizer_config.json have priority."""
    found = {name: _token_text(config.get(name), mapped.get(name)) for name in SPECIAL_TOKENS}
    own = {name: _token_text(token) for name, token in config.items() if name.endswith("_token")}
    for extra in (mapped.get("extra_special_tokens"), config.get("extra_special_tokens")):
        own |= {name: _token_text(token) for name, token in extra.items()} if isinstance(extra, dict) else {}
    return {name: text for name, text in {**own, **found}.items() if text is not None}


def _end_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Tokenizer, end: str
) -> frozenset[int]:
    found = {tokenizer.token_to_id(end)} if end else set()
    for named in (generation, *_text_configs(config)):
        given = named.get("eos_token_id")
        found |= set(given if isinstance(given, list) else [given])
    return frozenset(one for one in found if isinstance(one, int) and not isinstance(one, bool))


def _dimensions(config: dict[str, Any]) -> tuple[int, ...] | None:
    """Return `Model.dimensions` for the config.json of a model, by the same rules as vLLM."""
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list) and given:
        return tuple(size for size in given if isinstance(size, int))
    return () if config.get("is_matryoshka") else None


def card_of(directory: Path, files: tuple[ModelFile, ...] = (), context_tokens: int | None = None) -> ModelCard:
    """Return the model card of a directory with these files. By default the directory has the context length.

    Raises InvalidModel if a file is not valid.
    """
    config = read_json(directory / "config.json")
    dtype = config.get("dtype", config.get("torch_dtype"))
    found = {
        "files": files,
        "context_tokens": context_tokens or _context_tokens(directory),
        "dtype": dtype if isinstance(dtype, str) else "",
        "revision": directory.name if directory.parent.name == "snapshots" else "",  # in the cache of the Hub
    }
    try:
        return msgspec.convert(found, ModelCard)  # the class itself does not check limits, which a reader does
    except msgspec.ValidationError as error:
        raise InvalidModel(f"{directory}: not a valid model card ({error})") from error


def _context_tokens(directory: Path) -> int:
    """Return the maximum tokens of a prompt and its response together. If it is unknown, log a warning."""
    for config in _text_configs(read_json(directory / "config.json")):
        if length := _length(config.get(MAX_LENGTH)) or min(
            filter(None, map(_length, map(config.get, CONTEXT_NAMES))), default=0
        ):
            return length
    if length := _length(read_json(directory / "tokenizer_config.json").get(MAX_LENGTH)):
        return length
    logger.warning(
        "%s: the config.json has no context length (%s); assuming %s tokens",
        directory,
        CONTEXT_NAMES[0],
        f"{CONTEXT_TOKENS_DEFAULT:,}",
    )
    return CONTEXT_TOKENS_DEFAULT


def _text_configs(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a config.json that describe the language model, the innermost part first."""
    for name in TEXT_CONFIGS:
        if isinstance(inner := config.get(name), dict):
            yield from _text_configs(inner)
    yield config


def _length(value: Any) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 1 <= value < CONTEXT_TOKENS_MAX else 0


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file. Raises InvalidModel if it is not valid."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidModel(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path}: not a JSON object")
    return content


def _token_text(*tokens: Any) -> str | None:
    contents = (token.get("content") if isinstance(token, dict) else token for token in tokens)
    return next((content for content in contents if isinstance(content, str)), None)
