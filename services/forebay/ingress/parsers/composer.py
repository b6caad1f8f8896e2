"""Turn output tokens into deltas: detokenise, stop at stop strings, parse, and attach log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.events.tokens import TokenLogprob
from forebay.ingress.model import Model
from forebay.ingress.parsers.deltas import EMPTY_DELTA, DecodedLogprob, OutputDelta, Parser, merge_deltas
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from forebay.ingress.parsers.text import TextAssembler
from forebay.ingress.token_bytes import TokenBytes

LOGPROB_MIN = -9999.0  # OpenAI's value for a probability near zero; JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How output tokens of one request become deltas.

    Attributes:
        stops: stop strings.
        parsing: options of the parser, None for no parser.
        logprobs: number of alternatives to report per token; None reports no log probabilities at all.
        special: whether special tokens are part of the text.
    """

    stops: Sequence[str] = ()
    parsing: ParseOptions | None = None
    logprobs: int | None = None
    special: bool = False

    def composer(self, model: Model, parsers: ParserFactory, request_id: str) -> "Composer":
        """Return the composer of one response."""
        options = self.parsing
        visible = None if self.special else () if options is None else parsers.visible_tokens(options)
        parser = None if options is None else parsers.parser(options, request_id)
        text = TextAssembler(model.decoder(visible), self.stops)
        return Composer(text, parser, None if self.logprobs is None else (model.token_bytes, self.logprobs))


class Composer:
    """Composes the deltas of one response from its output tokens.

    Args:
        text: detokeniser with the stop strings.
        parser: splits the text, None to emit all of it as content.
        logprobs: the token bytes of the model and the number of alternatives per token; None reports none.

    Attributes:
        stopped: whether a stop string ended the response.
    """

    __slots__ = ("_called", "_logprobs", "_parser", "_text", "stopped")

    def __init__(
        self, text: TextAssembler, parser: Parser | None = None, logprobs: tuple[TokenBytes, int] | None = None
    ) -> None:
        self._text = text
        self._parser = parser
        self._logprobs = logprobs
        self._called = False
        self.stopped = False

    def push(self, token_ids: list[int], logprobs: Sequence[TokenLogprob] = ()) -> OutputDelta:
        """Return the delta of these tokens; `logprobs` has one entry per token or is empty."""
        decoded: tuple[DecodedLogprob, ...] = ()
        if self._logprobs is None or len(logprobs) < len(token_ids):
            text = self._text.push(token_ids)
        else:
            text, decoded = self._push_with_logprobs(token_ids, logprobs)
        self.stopped = self._text.stopped
        if self._parser is None:
            return OutputDelta(text, logprobs=decoded)
        delta = self._parser.push(text, token_ids)
        if self.stopped:
            delta = merge_deltas([delta, self._parser.finish()])
        return self._record_calls(delta, decoded)

    def finish(self) -> OutputDelta:
        """Return the text that was buffered until the end of the response."""
        text = self._text.finish()
        if self._parser is None:
            return OutputDelta(text) if text else EMPTY_DELTA
        return self._record_calls(merge_deltas([self._parser.push(text, []), self._parser.finish()]))

    def reason(self, reason: str) -> str:
        """Return the finish reason for clients: `tool_calls` in place of `stop` if the response has tool calls."""
        return "tool_calls" if self._called and reason == "stop" else reason

    def _record_calls(self, delta: OutputDelta, decoded: tuple[DecodedLogprob, ...] = ()) -> OutputDelta:
        self._called = self._called or bool(delta.calls)
        return OutputDelta(delta.content, delta.reasoning, delta.calls, decoded) if decoded else delta

    def _push_with_logprobs(
        self, token_ids: list[int], logprobs: Sequence[TokenLogprob]
    ) -> tuple[str, tuple[DecodedLogprob, ...]]:
        """Decode tokens one by one, so that no log probability of a token after a stop string is reported."""
        assert self._logprobs is not None
        names, count = self._logprobs
        texts: list[str] = []
        decoded: list[DecodedLogprob] = []
        for token_id, known in zip(token_ids, logprobs, strict=False):
            texts.append(self._text.push([token_id]))
            top = tuple(DecodedLogprob(names[one.token_id], max(one.logprob, LOGPROB_MIN)) for one in known.top[:count])
            decoded.append(DecodedLogprob(names[token_id], max(known.logprob, LOGPROB_MIN), top))
            if self._text.stopped:
                break
        return "".join(texts), tuple(decoded)
