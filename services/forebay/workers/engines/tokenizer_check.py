"""Compare the tokenizer of a model directory, which the ingress uses, with the engine's own tokenizer.

Prompts are sent as token ids. An engine that has other ids for a text would give other outputs for it than alone.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

from forebay.workers.engines.settings import EngineSettings

logger = logging.getLogger(__name__)

IDS_SHOWN = 12
EQUAL_SHOWN = 3  # of these, before the first difference
CHARS_SHOWN = 80
REMEDY = (
    "start all processes with a --model directory whose tokenizer.json is the engine's own tokenizer (transformers:"
    " AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or accept other outputs with --allow-tokenizer-mismatch"
)
Tokenize = Callable[[str, bool], Awaitable[list[int] | None]]
"""Function of a text, and whether to add the special tokens around a prompt. None: the engine does not offer that."""


async def check_tokenizer(settings: EngineSettings, tokenize: Tokenize, engine: str, error: type[Exception]) -> None:
    """Raise `error`, or log a warning if the settings allow it, at the first probe with other ids in the engine."""
    for text, is_prompt, own in settings.tokenizer_probes:
        found = await tokenize(text, is_prompt)
        if found is None:
            logger.info("%s does not offer its tokenizer, so it is not compared with tokenizer.json", engine)
            return
        if found != list(own):
            pairs, shorter = zip(own, found, strict=False), min(len(own), len(found))
            at = next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)
            problem = (
                f"the tokenizer of {engine} differs from {settings.model / 'tokenizer.json'}:"
                f" {text[:CHARS_SHOWN]!r} has {_shown(own, at)} by that file, but {_shown(found, at)} by the engine"
            )
            if not settings.allow_tokenizer_mismatch:
                raise error(f"{problem}; {REMEDY}")
            logger.warning("%s; --allow-tokenizer-mismatch permits it", problem)
            return


def _shown(ids: Sequence[int], at: int) -> str:
    first = max(0, at - EQUAL_SHOWN)
    part = ["…"] * (first > 0) + [str(one) for one in ids[first : first + IDS_SHOWN]]
    return f"{len(ids)} tokens ({' '.join(part)}{' …' if first + IDS_SHOWN < len(ids) else ''})"
