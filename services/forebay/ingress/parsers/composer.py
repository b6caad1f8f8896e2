"""An answer as its tokens come: text up to a stop string, taken apart by a parser, with probabilities where asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.events.tokens import TokenLogprob
from forebay.ingress.model import Model
from forebay.ingress.parsers.deltas import EMPTY_DELTA, DecodedLogprob, OutputDelta, Parser, merge_deltas
from forebay.ingress.parsers.selection import ParseOptions, ParserFactory
from forebay.ingress.parsers.text import TextAssembler
from forebay.ingress.token_bytes import TokenBytes

LOGPROB_MIN = -9999.0  # OpenAI's for what is all but impossible; of an engine's minus infinity JSON would make null


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How an answer is put into words.

    Attributes:
        stops: strings that end it.
        splitting: what is looked for in its text, None for nothing.
        logprobs: how many alternatives to each token are told, None for not even its own probability.
        special: whether special tokens are part of its text.
    """

    stops: Sequence[str] = ()
    splitting: ParseOptions | None = None
    logprobs: int | None = None
    special: bool = False

    def composer(self, model: Model, parsing: ParserFactory, request_id: str) -> "Composer":
        """For one answer."""
        how = self.splitting
        shown = None if self.special else () if how is None else parsing.shown(how)
        parser = None if how is None else parsing.parser(how, request_id)
        text = TextAssembler(model.decoder(shown), self.stops)
        return Composer(text, parser, None if self.logprobs is None else (model.token_bytes, self.logprobs))


class Composer:
    """Puts one answer into words.

    Attributes:
        stopped: a stop string ended it; nothing follows.
    """

    __slots__ = ("_called", "_parser", "_telling", "_text", "stopped")

    def __init__(
        self, text: TextAssembler, parser: Parser | None = None, telling: tuple[TokenBytes, int] | None = None
    ) -> None:
        self._text = text
        self._parser = parser
        self._telling = telling
        self._called = False
        self.stopped = False

    def push(self, token_ids: list[int], logprobs: Sequence[TokenLogprob] = ()) -> OutputDelta:
        """What these tokens add."""
        told: tuple[DecodedLogprob, ...] = ()
        if self._telling is None or len(logprobs) < len(token_ids):
            text = self._text.push(token_ids)
        else:
            text, told = self._tell(token_ids, logprobs)
        self.stopped = self._text.stopped
        if self._parser is None:
            return OutputDelta(text, logprobs=told)
        said = self._parser.push(text, token_ids)
        if self.stopped:
            said = merge_deltas([said, self._parser.finish()])
        return self._noted(said, told)

    def finish(self) -> OutputDelta:
        """What was held back, now that nothing follows."""
        text = self._text.finish()
        if self._parser is None:
            return OutputDelta(text) if text else EMPTY_DELTA
        return self._noted(merge_deltas([self._parser.push(text, []), self._parser.finish()]))

    def reason(self, reason: str) -> str:
        """Why the answer ended, as clients know it."""
        return "tool_calls" if self._called and reason == "stop" else reason

    def _noted(self, said: OutputDelta, told: tuple[DecodedLogprob, ...] = ()) -> OutputDelta:
        self._called = self._called or bool(said.calls)
        return OutputDelta(said.content, said.reasoning, said.calls, told) if told else said

    def _tell(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> tuple[str, tuple[DecodedLogprob, ...]]:
        """One by one: what stands behind a stop string is not told."""
        assert self._telling is not None
        names, count = self._telling
        texts: list[str] = []
        told: list[DecodedLogprob] = []
        for token_id, known in zip(token_ids, logprobs, strict=False):
            texts.append(self._text.push([token_id]))
            top = tuple(DecodedLogprob(names[one.token_id], max(one.logprob, LOGPROB_MIN)) for one in known.top[:count])
            told.append(DecodedLogprob(names[token_id], max(known.logprob, LOGPROB_MIN), top))
            if self._text.stopped:
                break
        return "".join(texts), tuple(told)
