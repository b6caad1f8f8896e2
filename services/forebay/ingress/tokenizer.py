"""Tokenize prompts off the event loop, with bounded work.

Theory of operation. Tokenizing takes about one second per megabyte of text, and 100 bytes of memory per byte of text.
So a text that cannot fit into the context is rejected before it is tokenized as a whole. The tokens of a text of more
than `CHARS_PER_TOKEN` characters per token of the context are first counted piece by piece, until they exceed the
context. The count has no other effect: an accepted text is tokenized as a whole, so its tokens do not depend on the
pieces.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from forebay import runtime
from forebay.ingress.errors import ApiError, invalid
from forebay.ingress.model import Model

INLINE_CHARS_MAX = 8_000  # longer texts take milliseconds, so a thread tokenizes them
THREADS = 2
QUEUE_CHARS_MAX = 8 << 20  # about ten seconds of work for the threads, the longest wait
CHARS_PER_TOKEN = 4  # as in English: rejecting a text costs no more than accepting an English text
PIECE_CHARS = 32_768  # length of a piece; counting its tokens takes about 50 ms
# Tokens subtracted per piece, because a cut may add tokens: in the whole text one token can span the cut. Few tokens
# are affected, so 64 is far more than needed. A text this close to the limit is tokenized as a whole, which decides.
CUT_TOKENS = 64

T = TypeVar("T")


class TokenizerPool:
    """Threads of one ingress that tokenize long texts. `chars_queued` counts characters of unfinished work."""

    def __init__(self) -> None:
        self.chars_queued = 0
        self._threads = runtime.executor(THREADS, "tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], chars: int, *, is_patient: bool = False) -> T:
        """Run `work`, in a thread if it processes more than `INLINE_CHARS_MAX` characters.

        If the queue is full, a patient caller waits, as the Kafka API does; others get ApiError (503).
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
    """Return the token ids of a text. Raises ApiError (400) if the text does not fit into the context.

    Args:
        what: name of the text in an error message.
        param: parameter of the request that contains the text.
        special: whether to add the special tokens that the tokenizer puts around a prompt.
    """
    _require_fits(model, text, what, param)
    return model.encode(text, special=special)


def _require_fits(model: Model, text: str, what: str, param: str) -> None:
    """Raise ApiError (400) for a text with more tokens than the context, without tokenizing all of it."""
    context = model.context_tokens
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
