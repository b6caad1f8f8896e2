"""Adapter of vLLM's parsers, if vLLM is installed beside the ingress: `--tool-call-parser vllm:NAME`.

vLLM's parsers cover the formats of many more models. They load the model's tokenizer with transformers once. The ids of
tool calls are not vLLM's: forebay derives them from the request id, so that a response that is sent twice is identical.
"""

import logging
from pathlib import Path
from typing import Any

from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.openai.tools import ToolSelection
from forebay.ingress.parsers.deltas import EMPTY_DELTA, OutputDelta, ToolCallDelta, merge_deltas
from forebay.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "vllm:"


class VllmParsers:
    """Creates vLLM's parsers of reasoning and tool calls, one per response. An empty name means none.

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
