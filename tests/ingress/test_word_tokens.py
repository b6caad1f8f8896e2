"""Word-by-word tokenization of ASCII texts: the tokens are those of the library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from forebay.ingress import word_tokens as module
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.word_tokens import BYTE_LEVEL, PATTERNS, word_tokens

MODEL = Model(DEFAULT_MODEL)
ADDED = ("<|im_start|>", "<|im_end|>", "<|im", "<think>")
PIECES = (
    *ADDED,
    *("the", "The", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'v", "1", "2345", "x", "_", "!?", "<|", "\x1c"),
)
TEXTS = st.one_of(st.text(st.characters(max_codepoint=0x7F)), st.lists(st.sampled_from(PIECES)).map("".join))


def tokenizer_with(pattern: str) -> Tokenizer:
    """Return the default tokenizer with another expression, and with added tokens of which one begins another."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    if pattern != BYTE_LEVEL:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return tokenizer


TOKENIZERS = [tokenizer_with(pattern) for pattern in PATTERNS]
WORDS = [word_tokens(tokenizer) for tokenizer in TOKENIZERS]


@given(TEXTS, st.sampled_from(range(len(TOKENIZERS))))
def test_the_tokens_are_those_of_the_library(text: str, number: int) -> None:
    words = WORDS[number]
    assert words is not None
    assert words.encode(text) == TOKENIZERS[number].encode(text, add_special_tokens=False).ids


@given(st.text())
def test_a_model_encodes_every_text_as_the_library_does(text: str) -> None:
    assert MODEL.encode(text) == MODEL.tokenizer.encode(text, add_special_tokens=False).ids


def test_other_texts_are_left_to_the_library() -> None:
    words = word_tokens(tokenizer_with(BYTE_LEVEL))
    assert words is not None
    assert words.encode("na\u00efve") is None


def test_a_full_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORDS_MAX", 3)
    tokenizer = tokenizer_with(BYTE_LEVEL)
    words = word_tokens(tokenizer)
    assert words is not None
    text = " ".join(f"{chr(ord('a') + number)}x" for number in range(20)) + " long" * 40
    for _ in range(2):
        assert words.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


def other(**changes: object) -> Tokenizer:
    tokenizer = tokenizer_with(BYTE_LEVEL)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = tokenizer_with(BYTE_LEVEL)
    tokenizer.add_tokens([token])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        other(model=models.WordLevel({"a": 0}, unk_token="a")),
        other(normalizer=normalizers.Lowercase()),
        other(encode_special_tokens=True),
        other(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        other(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        other(pre_tokenizer=pre_tokenizers.Whitespace()),
        tokenizer_with(r"\p{L}+"),
        with_added(AddedToken("<x>", lstrip=True, normalized=False)),
        with_added(AddedToken("<x>", rstrip=True, normalized=False)),
        with_added(AddedToken("<x>", single_word=True, normalized=False)),
        with_added(AddedToken("<x>", normalized=True)),
    ],
)
def test_other_tokenizers_are_left_to_the_library(tokenizer: Tokenizer) -> None:
    assert word_tokens(tokenizer) is None


def test_a_tokenizer_that_truncates_is_left_to_the_library() -> None:
    tokenizer = tokenizer_with(BYTE_LEVEL)
    tokenizer.enable_truncation(4)
    assert word_tokens(tokenizer) is None
