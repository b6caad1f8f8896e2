"""Tokenize short ASCII texts word by word, with the tokens of each word from a cache.

Theory of operation. A byte-level BPE tokenizer splits a text at its added tokens, splits the remaining parts into words
with a regular expression, and encodes each word independently. So the tokens of a word do not depend on the text around
it, and can be cached. A lookup takes a quarter of the time of the library, which also records where each token begins.

The regular expressions use Unicode classes, which Python's `re` does not have. In an ASCII text, a class is equal to a
set of ASCII characters. So this module serves ASCII texts only, and only tokenizers whose expression is in `PATTERNS`.
All other texts and tokenizers are left to the library.
"""

import json
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from forebay.ingress.token_bytes import BYTE_OF

WORDS_MAX = 1 << 16  # about 15 MB; the words of a language that occur in prompts
WORD_CHARS_MAX = 64  # longer words are rarely repeated
# Expression of the pre-tokenizer `ByteLevel`, as in GPT-2.
BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HEAD, _TAIL = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_ASCII_HEAD, _ASCII_TAIL = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\na-zA-Z0-9]?[a-zA-Z]+|",
    r"| ?[^\sa-zA-Z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Expressions of tokenizers, each with an expression that splits ASCII texts equally.
PATTERNS = {
    BYTE_LEVEL: r"'s|'t|'re|'ve|'m|'ll|'d| ?[a-zA-Z]+| ?[0-9]+| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+",
    rf"{_HEAD}\p{{N}}{{1,3}}{_TAIL}": f"{_ASCII_HEAD}[0-9]{{1,3}}{_ASCII_TAIL}",  # Llama 3
    rf"{_HEAD}\p{{N}}{_TAIL}": f"{_ASCII_HEAD}[0-9]{_ASCII_TAIL}",  # Qwen 2 and 3
}
CHAR_OF = str.maketrans({chr(byte): char for char, byte in BYTE_OF.items() if byte < 0x80})
NEVER = "(?!)()"  # matches no text; the group is the separator that `split` returns


class WordTokens:
    def __init__(self, tokenizer: Tokenizer, pattern: str, added: Mapping[str, int]) -> None:
        self._split = re.compile(pattern, re.ASCII).findall
        # The library selects the longest of several added tokens that begin at the same place.
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        self._split_added = re.compile(f"({'|'.join(longest_first)})" if added else NEVER).split
        self._added = added
        self._words = _Words(tokenizer)

    def encode(self, text: str) -> list[int] | None:
        if not text.isascii():
            return None
        ids_of = self._words.__getitem__
        found: list[int] = []
        parts = self._split_added(text)
        found += chain.from_iterable(map(ids_of, self._split(parts[0])))
        for at in range(1, len(parts), 2):
            found.append(self._added[parts[at]])
            found += chain.from_iterable(map(ids_of, self._split(parts[at + 1])))
        return found


class _Words(dict[str, tuple[int, ...]]):
    """Token ids by word. A lookup adds a missing word."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenize = tokenizer.model.tokenize

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._tokenize(word.translate(CHAR_OF)))
        if len(word) <= WORD_CHARS_MAX:
            if len(self) >= WORDS_MAX:
                self.clear()
            self[word] = ids
        return ids


def word_tokens(tokenizer: Tokenizer) -> WordTokens | None:
    """Return the word tokenizer of a tokenizer; None if the tokenizer might encode a text differently."""
    model = tokenizer.model
    added = tokenizer.get_added_tokens_decoder()
    pattern = _pattern(tokenizer)
    if (
        pattern is None
        or not isinstance(model, BPE)
        or model.dropout
        or tokenizer.truncation is not None
        or tokenizer.padding is not None
        or tokenizer.encode_special_tokens
        or not _keeps_ascii(tokenizer.normalizer)
        or any(token.single_word or token.lstrip or token.rstrip for token in added.values())
        or len({token.normalized for token in added.values()}) > 1  # the library searches these one after the other
    ):
        return None
    return WordTokens(tokenizer, PATTERNS[pattern], {token.content: token_id for token_id, token in added.items()})


def _keeps_ascii(normalizer: Any) -> bool:
    return normalizer is None or json.loads(normalizer.__getstate__())["type"] == "NFC"


def _pattern(tokenizer: Tokenizer) -> str | None:
    """Return the key in `PATTERNS` of the expression that splits texts into words, None if there is none."""
    if tokenizer.pre_tokenizer is None:
        return None
    settings = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = settings["pretokenizers"] if settings["type"] == "Sequence" else [settings]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if len(steps) == 1:
        return BYTE_LEVEL if last["use_regex"] else None
    first = steps[0]
    if len(steps) > 2 or last["use_regex"] or first["type"] != "Split":
        return None
    pattern: str = first["pattern"].get("Regex", "")
    return pattern if pattern in PATTERNS and first["behavior"] == "Isolated" and not first["invert"] else None
