"""Text of an output, up to a stop string."""

from collections.abc import Sequence

from forebay.ingress.model import Decoder


class StopText:
    """Decodes output tokens, and finds stop strings."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)  # characters that may begin a stop string
        self._text = ""
        self._taken = 0
        self._end: int | None = None

    def push(self, token_ids: list[int], *, has_ended: bool) -> str | None:
        """Add tokens. Return the stop string that the output contains now, without which it ends."""
        before = max(0, len(self._text) - self._held)
        self._text += self._decoder.push(token_ids)
        for stop in self._stops:
            at = self._text.find(stop, before)
            if at >= 0:
                self._end = at
                return stop
        if has_ended:
            self._end = len(self._text)
        return None

    def take(self) -> str:
        """Return the new text. The end that may be the beginning of a stop string is returned later."""
        end = max(self._taken, len(self._text) - self._held) if self._end is None else self._end
        text = self._text[self._taken : end]
        self._taken = end
        return text
