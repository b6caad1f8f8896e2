"""Select the parsers of an ingress by name or by the model card, and create one per response.

`vllm:NAME` is a parser of vLLM, if vLLM is installed beside the ingress.
"""

import logging
from pathlib import Path
from typing import Any

import msgspec

from forebay.events.base import unpack_u32
from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.model import Model
from forebay.ingress.openai.tools import NO_TOOLS, ToolSelection
from forebay.ingress.parsers.deltas import EMPTY_DELTA, OutputDelta, Parser, ToolCallDelta, merge_deltas
from forebay.ingress.parsers.formats import (
    CALL_ALIASES,
    CALL_FORMATS,
    CALL_SIGNATURES,
    HARMONY,
    HARMONY_REASONING,
    REASONING_ALIASES,
    REASONING_FORMATS,
    REASONING_SIGNATURES,
    Signature,
    select,
)
from forebay.ingress.parsers.harmony import TOKENS, HarmonyParser
from forebay.ingress.parsers.parsers import (
    DeltaCollector,
    ParserChain,
    ParserStage,
    PlainText,
    ReasoningFormat,
    ReasoningParser,
    call_ids,
)
from forebay.ingress.parsers.tool_calls import REQUIRED, CallFormat, NamedCallParser, ToolCallParser
from forebay.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "vllm:"


class VllmParsers:
    """Creates vLLM's parsers of reasoning and tool calls, one per response. An empty name means none.

    vLLM's parsers cover the formats of many more models. They load the model's tokenizer with transformers once. The
    ids of tool calls are not vLLM's: forebay derives them from the request id, so that a response that is sent twice is
    identical.

    Raises ConfigError if vLLM is not installed, or has no parser of this name.
    """

    def __init__(self, directory: Path, tool: str, reasoning: str) -> None:
        flags = " and ".join(
            f"--{kind}-parser {PREFIX}{name}" for kind, name in (("tool-call", tool), ("reasoning", reasoning)) if name
        )
        try:
            from vllm.parser.parser_manager import ParserManager  # noqa: PLC0415 - seconds, and not installed everywhere
            from vllm.tokenizers import get_tokenizer  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(f"{flags}: needs vLLM 0.32 or later in the Python of the ingress ({error})") from error
        self._tokenizer = get_tokenizer(str(directory))
        try:
            self._kind: Any = ParserManager.get_parser(
                tool_parser_name=tool or None,
                reasoning_parser_name=reasoning or None,
                enable_auto_tools=bool(tool),
                tokenizer=self._tokenizer,
            )
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{flags}: {error}") from error

    def parser(self, choice: ToolSelection, prompt_ids: list[int], id_of: Any) -> "VllmParser":
        """Return a new parser for one response. Raises ApiError if vLLM rejects the tools."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415

        try:
            request = ChatCompletionRequest(
                messages=[{"role": "user", "content": ""}],
                tools=choice.plain() or None,
                tool_choice="auto" if choice.tools else "none",
            )
        except ValueError as error:
            raise invalid(f"tools: vLLM's parser rejects them: {error}", "tools") from error
        return VllmParser(self._kind(self._tokenizer, request.tools), request, prompt_ids, id_of)


class VllmParser:
    """Adapter that implements `Parser` with a parser of vLLM."""

    def __init__(self, parser: Any, request: Any, prompt_ids: list[int], id_of: Any) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = prompt_ids
        self._id_of = id_of
        self._begun: set[int] = set()

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        return self._parse(text, token_ids, finished=False) if text or token_ids else EMPTY_DELTA

    def finish(self) -> OutputDelta:
        return self._parse("", [], finished=True)

    def _parse(self, text: str, token_ids: list[int], *, finished: bool) -> OutputDelta:
        try:
            delta = self._parser.parse_delta(text, token_ids, self._request, self._prompt_ids, finished=finished)
        except Exception as error:
            logger.warning("a parser of vLLM failed on a response", exc_info=True)
            text = f"{type(self._parser).__name__} of vLLM failed on this response: {type(error).__name__}"
            raise ApiError(502, "parser_failed", text) from error
        if delta is None:
            return EMPTY_DELTA
        calls = tuple(self._delta(call) for call in delta.tool_calls or ())
        return merge_deltas([OutputDelta(delta.content or "", delta.reasoning or "", calls)])

    def _delta(self, call: Any) -> ToolCallDelta:
        function = call.function
        name = (function and function.name) or ""
        first = bool(name) and call.index not in self._begun
        if first:
            self._begun.add(call.index)
        arguments = (function and function.arguments) or ""
        if not first:
            return ToolCallDelta(call.index, arguments=arguments)
        return ToolCallDelta(call.index, name, self._id_of(call.index), arguments)


AUTO, NONE = "auto", "none"
TOOL_NAMES = (*sorted({*CALL_FORMATS, *CALL_ALIASES, HARMONY}), f"{PREFIX}NAME")
REASONING_NAMES = (*sorted({*REASONING_FORMATS, *REASONING_ALIASES, HARMONY_REASONING}), f"{PREFIX}NAME")


class ParseOptions(msgspec.Struct, frozen=True):
    """Options for parsing the response to one chat request.

    Attributes:
        is_open: whether the prompt ends with the tag that begins reasoning, so that the response begins inside it.
        structured: whether the engine constrains the output to a structure, such as a JSON schema.
        prompt: token ids of the prompt as packed u32, which vLLM's parsers need.
    """

    choice: ToolSelection = NO_TOOLS
    is_open: bool = False
    structured: bool = False
    prompt: bytes = b""


class ParserFactory:
    """Creates one parser per response. `tool` and `reasoning` are names of parsers, `auto` or `none`.

    For `auto` they are selected by the chat template of the model, or by its type in config.json. If several fit, none
    is selected, and a warning is logged. Raises ConfigError for an unknown name.
    """

    def __init__(self, model: Model, tool: str = AUTO, reasoning: str = AUTO) -> None:
        self._vllm: VllmParsers | None = None
        self._calls: CallFormat | None = None
        self._reasoning: ReasoningFormat | None = None
        given = (tool, reasoning)
        if any(name.startswith(PREFIX) for name in given):
            if any(name not in (AUTO, NONE) and not name.startswith(PREFIX) for name in given):
                raise ConfigError(
                    f"--tool-call-parser {tool}, --reasoning-parser {reasoning}: use vLLM for both or for neither"
                )
            tool, reasoning = (name.removeprefix(PREFIX) if name.startswith(PREFIX) else "" for name in given)
            self._vllm = VllmParsers(model.directory, tool, reasoning)
            self.tool, self.reasoning = tool, reasoning
            return
        self.tool = (
            _selected("tool-call", CALL_SIGNATURES, model) if tool == AUTO else _known("tool-call", tool, TOOL_NAMES)
        )
        self.reasoning = (
            _selected("reasoning", REASONING_SIGNATURES, model)
            if reasoning == AUTO
            else _known("reasoning", reasoning, REASONING_NAMES)
        )
        if self._is_harmony and (self.tool not in ("", HARMONY) or self.reasoning not in ("", HARMONY_REASONING)):
            raise ConfigError(
                f"--tool-call-parser {self.tool}, --reasoning-parser {self.reasoning}: gpt-oss has one for both; "
                f"use {HARMONY} and {HARMONY_REASONING}, or none for one of them"
            )
        self._calls = CALL_FORMATS.get(CALL_ALIASES.get(self.tool, self.tool))
        self._reasoning = REASONING_FORMATS.get(REASONING_ALIASES.get(self.reasoning, self.reasoning))

    @property
    def _is_harmony(self) -> bool:
        return self._vllm is None and (self.tool == HARMONY or self.reasoning == HARMONY_REASONING)

    @property
    def tool_name(self) -> str:
        """Name with which another factory selects the same parser of tool calls; empty for none."""
        return self.tool if self._vllm is None or not self.tool else PREFIX + self.tool

    @property
    def reasoning_name(self) -> str:
        """Name with which another factory selects the same parser of reasoning; empty for none."""
        return self.reasoning if self._vllm is None or not self.reasoning else PREFIX + self.reasoning

    def visible_tokens(self, options: ParseOptions) -> tuple[str, ...] | None:
        """Return the special tokens that the decoder must keep in the text for the parser; None for all."""
        if self._vllm is not None:
            return None
        if self._is_harmony:
            return TOKENS
        row, calls = self._reasoning, self._calls if options.choice.tools else None
        return (*(row.texts if row else ()), *(calls.texts if calls else ()))

    def require(self, choice: ToolSelection) -> None:
        """Raise ApiError if the model may call the tools in `choice`, but no tool call parser is selected."""
        if choice.tools and choice.forced is None and not self.tool:
            text = "tool_choice auto needs a parser: start the ingress with --tool-call-parser"
            raise invalid(text, "tools", "unsupported_parameter")

    def is_open(self, prompt: str) -> bool:
        """Return whether the response to this prompt begins inside reasoning, because the prompt ends with its tag."""
        return self._reasoning is not None and prompt.rstrip().endswith(
            tuple(tag.rstrip() for tag in self._reasoning.begin)
        )

    def parser(self, options: ParseOptions, request_id: str) -> Parser | None:
        """Return a new parser for one response; None if it can contain neither tool calls nor reasoning."""
        choice = options.choice
        if not choice.tools and not self.reasoning and not self._is_harmony:
            return None
        ids = call_ids(request_id, chars=9, prefix="") if self.tool == "mistral" else call_ids(request_id)
        if self._vllm is not None and choice.forced is None:
            return self._vllm.parser(choice, unpack_u32(options.prompt), ids)
        sink = DeltaCollector(ids, parallel=choice.parallel)
        if self._is_harmony and choice.forced is None and not options.structured:
            functions = frozenset(tool.function.name for tool in choice.tools)
            return ParserChain(sink, HarmonyParser(sink, functions, has_tools=bool(choice.tools and self.tool)))
        link = self._stage(sink, choice)
        if self._reasoning is not None:
            # The engine enforces a structure from the first output token on, so there is no reasoning.
            is_open = (options.is_open or self._reasoning.is_implicit) and not options.structured
            row = self._calls
            ends = (
                row.begin if row is not None and row.ends_reasoning and choice.tools and not options.structured else ()
            )
            link = ReasoningParser(sink, link, self._reasoning, ends, is_open=is_open)
        return ParserChain(sink, link)

    def _stage(self, sink: DeltaCollector, choice: ToolSelection) -> ParserStage:
        if choice.forced:
            return NamedCallParser(sink, choice.forced)
        row = self._calls if choice.forced is None else REQUIRED
        return PlainText(sink) if row is None or not choice.tools else ToolCallParser(sink, row, choice)


def _known(kind: str, name: str, names: tuple[str, ...]) -> str:
    if name == NONE:
        return ""
    if name not in names[:-1]:
        raise ConfigError(f"--{kind}-parser: {unknown_name('parser', name, (AUTO, NONE, *names))}")
    return name


def _selected(kind: str, signatures: tuple[Signature, ...], model: Model) -> str:
    names = select(signatures, model.template_source, model.types)
    if names and names != {""} and len(names) == 1:
        return min(names)
    if names:
        fitting = ", ".join(sorted(filter(None, names))) or "no parser of forebay"
        logger.warning(
            "%s: the chat template has the format of %s, so no %s parser is selected; set --%s-parser",
            model.directory,
            fitting,
            kind,
            kind,
        )
    return ""
