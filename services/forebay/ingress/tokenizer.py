"""Tokenise prompts off the event loop, with bounded work.

Theory of operation. Tokenising takes about a second and 100 bytes of memory per input byte for each megabyte, so a text
that cannot fit the context is rejected before it is tokenised whole:

1. `Model.text_chars_max` is a length that no text of the context exceeds, where the tokenizer allows such a bound.
2. A text of more than `CHARS_PER_TOKEN` characters per token of the context is first counted in pieces, and rejected as
   soon as the pieces exceed the context.

The count decides nothing else: an accepted text is tokenised whole, so its tokens do not depend on the pieces.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from forebay import runtime
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.model import Model

INLINE_CHARS_MAX = (
    8_000  # longer texts take milliseconds and are tokenised in a thread, so that other requests do not wait
)
THREADS = 2
QUEUE_CHARS_MAX = 8 << 20  # about ten seconds of work for the threads, the longest wait
CHARS_PER_TOKEN = 4  # a rejected text costs no more than an accepted one of English
PIECE_CHARS = 32_768  # counted at a time: some 50 ms
# Tokens that a cut may add: the text on both sides of it is one token sequence in the whole text. Far more than a merge
# reaches; a text within this of the limit is tokenised whole, which decides.
CUT_TOKENS = 64

T = TypeVar("T")


class TokenizerPool:
    """Tokenizer threads of one ingress.

    Attributes:
        chars_queued: characters submitted to the threads and not finished.
    """

    def __init__(self) -> None:
        self.chars_queued = 0
        self._threads = runtime.executor(THREADS, "tokenise")

    def close(self) -> None:
        """Drop queued work that has not started."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], chars: int, *, is_patient: bool = False) -> T:
        """Run `work`, in a thread if it processes many characters.

        Args:
            work: the function to run.
            chars: characters that it processes.
            is_patient: whether to wait even if the queue is full, as the Kafka API does.

        Raises:
            ApiError: 503 if the queue is full and `is_patient` is false.
        """
        if chars <= INLINE_CHARS_MAX:
            return work()
        if not is_patient and self.chars_queued and self.chars_queued + chars > QUEUE_CHARS_MAX:
            text = f"the tokenizer queue is full ({self.chars_queued:,} characters); try again later"
            raise ApiError(503, "overloaded", text)
        self.chars_queued += chars
        future = self._threads.submit(work)
        # Counted until the thread finishes, because a disconnected client does not stop started work.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call(loop, lambda: self._done(chars)))
        return await asyncio.wrap_future(future)

    def _done(self, chars: int) -> None:
        self.chars_queued -= chars


def encode_prompt(model: Model, text: str, what: str, param: str, *, special: bool = False) -> list[int]:
    """Return the token ids of a text.

    Args:
        model: the model directory.
        text: the text.
        what: name of the text in an error message.
        param: parameter of the request that contains the text.
        special: whether to add the special tokens around a prompt.

    Raises:
        ApiError: the text cannot fit the context.
    """
    require_fits(model, text, what, param)
    return model.encode(text, special=special)


def require_fits(model: Model, text: str, what: str, param: str) -> None:
    """Raise ApiError for a text with more tokens than the context, without tokenising more than the context."""
    context = model.context_tokens
    if model.text_chars_max is not None and len(text) > model.text_chars_max:
        problem = f"{what} has {len(text):,} characters, more than the context of {context} tokens can hold; shorten it"
        raise invalid(problem, param, "context_length_exceeded")
    if len(text) <= context * CHARS_PER_TOKEN:
        return
    count = at = 0
    while at < len(text):
        end = _cut(text, at)
        count += max(0, model.count(text[at:end]) - CUT_TOKENS)
        if count > context:
            problem = f"{what} has more tokens than the context of {context} tokens; shorten it"
            raise invalid(problem, param, "context_length_exceeded")
        at = end


def _cut(text: str, at: int) -> int:
    """Return the end of the piece that begins at `at`: before white space, where pre-tokenizers cut, if any is near."""
    end = at + PIECE_CHARS
    if end >= len(text):
        return len(text)
    for place in range(end, end - PIECE_CHARS // 8, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return end


def _call(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Call from another thread, unless the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(action)
