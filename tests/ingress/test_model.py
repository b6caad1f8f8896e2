"""Model directories: the default model, templates, tokenization, decoding, and invalid directories."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from forebay.ingress import word_tokens as module
from forebay.ingress.errors import ApiError
from forebay.ingress.model import DEFAULT_MODEL, Decoder, InvalidModel, Model, word_token_ids
from forebay.ingress.parsers.composer import TextAssembler
from forebay.ingress.token_bytes import BYTE_OF
from forebay.ingress.word_tokens import BYTE_LEVEL, PATTERNS, word_tokens
from tests.harness.models.make_default_model import files

MODEL = Model(DEFAULT_MODEL)


def test_the_default_model_equals_the_output_of_its_script() -> None:
    made = files()
    assert {path.name: path.read_bytes() for path in DEFAULT_MODEL.iterdir()} == made
    assert sum(map(len, made.values())) < 200_000


@given(st.text())
def test_encoding_and_decoding_any_text_is_lossless(text: str) -> None:
    decoder = MODEL.decoder()
    assert "".join(decoder.push([token]) for token in MODEL.encode(text)) == text


PARTS = [MODEL.tokenizer.token_to_id(char) for char, byte in BYTE_OF.items() if byte >= 0x80]


@given(st.lists(st.one_of(st.integers(0, MODEL.vocabulary_size + 1), st.sampled_from(PARTS), st.integers(0, 3))))
def test_texts_of_single_tokens_do_not_change_the_output(token_ids: list[int]) -> None:
    cached, plain = MODEL.decoder(), Decoder(MODEL.tokenizer)
    assert [cached.push([token]) for token in token_ids] == [plain.push([token]) for token in token_ids]


def test_word_token_ids_are_words() -> None:
    words = word_token_ids(MODEL.tokenizer)
    assert len(words) > 100
    text = MODEL.decoder().push(list(words))
    assert all(word.islower() and word.isalpha() and len(word) > 2 for word in text.split())
    assert len(text.split()) == len(words)


def copy(tmp_path: Path, **config: object) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(DEFAULT_MODEL, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return directory


def test_templates_may_reject_messages(tmp_path: Path) -> None:
    directory = copy(tmp_path, chat_template="{{ raise_exception('only users speak') }}")
    with pytest.raises(ApiError, match="only users speak"):
        Model(directory).render([{"role": "user", "content": "x"}])


def test_a_template_gets_no_tools_by_default(tmp_path: Path) -> None:
    source = "{% if tools is not none or documents is not none %}tools{% else %}plain{% endif %}"
    assert Model(copy(tmp_path, chat_template=source)).render([]) == "plain"


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ApiError, match="rejects"):
        Model(copy(tmp_path, chat_template=source)).render([{"role": "user", "content": "x"}])


def test_a_model_without_template_rejects_chats(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="no chat template"):
        Model(copy(tmp_path, chat_template=None)).render([])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "needs a tokenizer.json"),
        ("tokenizer.json", "{}", "not a valid tokenizer"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", f'{{"dtype": "{"x" * 257}"}}', r"not a valid model card .* length <= 256 - at `\$\.dtype`"),
        ("chat_template.jinja", "{% for %}", "does not compile"),
    ],
)
def test_an_invalid_directory_is_rejected_with_the_reason(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    directory = copy(tmp_path)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    with pytest.raises(InvalidModel, match=message):
        Model(directory)


def test_a_missing_directory_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="no such model directory"):
        Model(tmp_path / "none")


@given(text=st.text("ab ", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_do_not_depend_on_how_the_text_is_split(text: str, stops: list[str]) -> None:
    assembler = TextAssembler(Decoder(MODEL.tokenizer), stops)
    out = ""
    for token in MODEL.encode(text):
        out += assembler.push([token])
        if assembler.stop:
            break
    out += assembler.finish()
    cuts = [at for at in map(text.find, stops) if at >= 0]
    assert bool(assembler.stop) == bool(cuts)
    if cuts:
        # A later stop string may complete first: what comes out is cut at a stop string and holds none whole.
        assert assembler.stop in stops
        assert text.startswith(out + assembler.stop)
        assert not any(stop in out for stop in stops)
    else:
        assert out == text


def of_bytes() -> Tokenizer:
    """Return a tokenizer whose tokens are words or bytes, like those of Llama 2 and Gemma."""
    vocabulary = {"<unk>": 0, "a": 1, "▁b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


OF_BYTES = of_bytes()


@given(st.lists(st.lists(st.integers(0, 258), min_size=1, max_size=4)))
def test_any_sequence_of_bytes_decodes(pieces: list[list[int]]) -> None:
    decoder = Decoder(OF_BYTES)
    for piece in pieces:
        decoder.push(piece)
    assert decoder.push([2, 2]).endswith(" b b")


@pytest.mark.parametrize("tokenizer", [OF_BYTES, MODEL.tokenizer], ids=["of bytes", "default"])
@given(pieces=st.lists(st.lists(st.integers(0, 258), min_size=1, max_size=6)))
def test_the_text_does_not_depend_on_how_tokens_are_split(tokenizer: Tokenizer, pieces: list[list[int]]) -> None:
    cut, single = Decoder(tokenizer), Decoder(tokenizer)
    output = "".join([cut.push(piece) for piece in pieces])
    assert output == "".join([single.push([token_id]) for piece in pieces for token_id in piece])


def test_characters_before_an_invalid_byte_are_emitted_at_once() -> None:
    assert Decoder(OF_BYTES).push([1, 2, 3 + "中".encode()[0]]) == "a b"


def test_invalid_bytes_become_the_replacement_character() -> None:
    decoder = Decoder(OF_BYTES)
    character = [3 + byte for byte in "中".encode()]
    assert [decoder.push(ids) for ids in (character, [3 + 0x80], [1], [2])] == ["中", "", "\ufffda", " b"]


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
