"""vLLM's own parsers, where vLLM is installed beside the ingress: `--tool-call-parser vllm:NAME`.

They cover the formats of many models that ours do not. They load the model's tokenizer with transformers once, and
what they say is theirs; only the ids of calls are ours, so that an answer that is given again is the same.
"""

import logging
from pathlib import Path
from typing import Any

from forebay.ingress.errors import ApiError, Unusable, invalid
from forebay.ingress.openai.tools import ToolSelection
from forebay.ingress.parsers.deltas import EMPTY_DELTA, OutputDelta, ToolCallDelta, merge_deltas

logger = logging.getLogger(__name__)

PREFIX = "vllm:"


class VllmParsers:
    """vLLM's parsers of these names, empty for none. Raises Unusable when they are not to be had."""

    def __init__(self, directory: Path, tool: str, reasoning: str) -> None:
        flags = " and ".join(
            f"--{kind}-parser {PREFIX}{name}" for kind, name in (("tool-call", tool), ("reasoning", reasoning)) if name
        )
        try:
            from vllm.parser.parser_manager import ParserManager  # noqa: PLC0415 - seconds, and not installed everywhere
            from vllm.tokenizers import get_tokenizer  # noqa: PLC0415
        except ImportError as error:
            raise Unusable(f"{flags}: needs vLLM 0.32 or later beside the ingress ({error})") from error
        self._tokenizer = get_tokenizer(str(directory))
        try:
            self._kind: Any = ParserManager.get_parser(
                tool_parser_name=tool or None,
                reasoning_parser_name=reasoning or None,
                enable_auto_tools=bool(tool),
                tokenizer=self._tokenizer,
            )
        except (TypeError, KeyError, ValueError) as error:
            raise Unusable(f"{flags}: {error}") from error

    def parser(self, choice: ToolSelection, prompt_ids: list[int], id_of: Any) -> "VllmParser":
        """The parser of one answer to this prompt. Raises ApiError."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415

        try:
            request = ChatCompletionRequest(
                messages=[{"role": "user", "content": ""}],
                tools=choice.plain() or None,
                tool_choice="auto" if choice.tools else "none",
            )
        except ValueError as error:
            raise invalid(f"tools: vLLM's parser does not take them: {error}", "tools") from error
        return VllmParser(self._kind(self._tokenizer, request.tools), request, prompt_ids, id_of)


class VllmParser:
    """One of vLLM's parsers, as a `Parser`."""

    def __init__(self, parser: Any, request: Any, prompt_ids: list[int], id_of: Any) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = prompt_ids
        self._id_of = id_of
        self._begun: set[int] = set()

    def push(self, text: str, token_ids: list[int]) -> OutputDelta:
        """As `Parser` has it."""
        return self._parse(text, token_ids, finished=False) if text or token_ids else EMPTY_DELTA

    def finish(self) -> OutputDelta:
        """As `Parser` has it."""
        return self._parse("", [], finished=True)

    def _parse(self, text: str, token_ids: list[int], *, finished: bool) -> OutputDelta:
        try:
            delta = self._parser.parse_delta(text, token_ids, self._request, self._prompt_ids, finished=finished)
        except Exception as error:
            logger.warning("a parser of vLLM broke at an answer", exc_info=True)
            text = f"{type(self._parser).__name__} of vLLM broke at this answer: {type(error).__name__}"
            raise ApiError(502, "parser_failed", text) from error
        if delta is None:
            return EMPTY_DELTA
        calls = tuple(self._piece(call) for call in delta.tool_calls or ())
        return merge_deltas([OutputDelta(delta.content or "", delta.reasoning or "", calls)])

    def _piece(self, call: Any) -> ToolCallDelta:
        function = call.function
        name = (function and function.name) or ""
        first = bool(name) and call.index not in self._begun
        if first:
            self._begun.add(call.index)
        arguments = (function and function.arguments) or ""
        if not first:
            return ToolCallDelta(call.index, arguments=arguments)
        return ToolCallDelta(call.index, name, self._id_of(call.index), arguments)
