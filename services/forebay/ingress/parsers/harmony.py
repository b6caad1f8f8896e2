"""Incremental parser of harmony, the response format of gpt-oss: messages on channels, some of them tool calls.

The package openai-harmony parses tokens of the vocabulary `o200k_harmony`, which it downloads. This parser needs only
the text with its special tokens, which the tokenizer of the model decodes.
"""

import re
from collections.abc import Container
from enum import Enum, auto

from forebay.ingress.parsers.call_scanner import NAME, split_at_tag
from forebay.ingress.parsers.parsers import DeltaCollector, ParserStage

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
HEADER_STARTS = (START, CHANNEL, " to=", "to=", MESSAGE)
HEADER_CHARS_MAX = 512
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")


class _At(Enum):
    GAP = auto()
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class HarmonyParser(ParserStage):
    """Stage for gpt-oss: the analysis channel is reasoning, messages to functions are calls, all others are content.

    Messages to other recipients, which are tools built into gpt-oss, are reasoning. Text outside of messages is
    content.
    """

    def __init__(self, sink: DeltaCollector, functions: Container[str], *, has_tools: bool) -> None:
        super().__init__(sink)
        self._functions = functions
        self._has_tools = has_tools
        self._at = _At.GAP
        self._held = ""
        self._is_empty = True  # whether the current call has no arguments yet

    def push(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._step(text)

    def finish(self) -> None:
        """Emit buffered text, except a partial header or tag."""
        if self._at is _At.GAP and not any(tag.startswith(self._held) for tag in HEADER_STARTS):
            self._sink.content(self._held)

    def _step(self, text: str) -> str:
        if self._at is _At.GAP:
            if text.startswith(HEADER_STARTS):
                self._at = _At.HEADER
            elif any(tag.startswith(text) for tag in (*HEADER_STARTS, *ENDS)):
                self._held = text
                return ""
            elif text.startswith(ENDS):
                return text.partition("|>")[2]
            else:
                self._at = _At.CONTENT
            return text
        if self._at is _At.HEADER:
            header, tag, rest = split_at_tag(text[:HEADER_CHARS_MAX], (MESSAGE,))
            if tag:
                self._open(header)
                return rest + text[HEADER_CHARS_MAX:]
            if len(text) < HEADER_CHARS_MAX:
                self._held = text
                return ""
            self._at = _At.CONTENT
            self._sink.content(text[:HEADER_CHARS_MAX])
            return text[HEADER_CHARS_MAX:]
        body, tag, rest = split_at_tag(text, (*ENDS, START, CHANNEL))
        self._emit(body)
        if not tag:
            self._held = rest
            return ""
        if self._at is _At.CALL and self._is_empty:
            self._sink.arguments("{}")
        self._at = _At.GAP if tag in ENDS else _At.HEADER
        return rest if tag in ENDS else tag + rest

    def _open(self, header: str) -> None:
        found = RECIPIENT.search(header)
        recipient = found[1] if found else ""
        name = recipient.removeprefix("functions.")
        is_function = name in self._functions or (recipient != name and NAME.fullmatch(name))
        if self._has_tools and is_function:
            self._sink.call(name)
            self._at, self._is_empty = _At.CALL, True
        elif ANALYSIS.search(header) or (recipient and not is_function):
            self._at = _At.REASONING
        else:
            self._at = _At.CONTENT

    def _emit(self, text: str) -> None:
        if self._at is _At.CALL:
            self._sink.arguments(text)
            self._is_empty = self._is_empty and not text.strip()
        elif self._at is _At.REASONING:
            self._sink.reasoning(text)
        else:
            self._sink.content(text)
