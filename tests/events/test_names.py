"""Validation of the names of models, adapters, pools, workers, services and namespaces."""

from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.names import (
    NAME_CHARS_MAX,
    NAMESPACE_CHARS_MAX,
    POOL_CHARS_MAX,
    Kind,
    NameInvalid,
    printable,
    require_adapter,
    require_name,
    unknown_name,
)
from forebay.events.topics import FIXED_TOPICS, work_topic

KAFKA_TOPIC_CHARS_MAX = 249
KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("model", "meta-llama/Llama-3.1-8B-Instruct"),
        ("model", "org/name:tag"),
        ("model", "my model"),
        ("model", "模型"),
        ("model", "a..b"),
        ("adapter", "tenant/sql-v2@2024"),
        ("pool", "decode-0.a_b"),
        ("worker", "host.example.com-1234"),
        ("worker", "mock-0"),
        ("namespace", "team.forebay-2"),
        ("namespace", "workers"),
    ],
)
def test_valid_names_are_accepted(kind: Kind, name: str) -> None:
    assert require_name(kind, name) == name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["", "a\0b", "a\n", "a\nb", "\x1b[2J", " a", "a ", "a\u200b", "\ud800", "a" * 257])
def test_invalid_names_are_rejected_and_escaped_in_the_message(kind: Kind, name: str) -> None:
    with pytest.raises(NameInvalid, match=f"the {kind} name ") as refused:
        require_name(kind, name)
    text = str(refused.value)
    assert text.isprintable()
    assert ascii(name)[:-1][:64] in text
    assert len(text) < 300


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("name", ["../x", "a/../b", "..", ".", "/etc", "a/", "a//b", "a\\..\\b"])
def test_a_model_name_cannot_escape_its_directory(kind: Kind, name: str) -> None:
    with pytest.raises(NameInvalid, match="slash"):
        require_name(kind, name)


@pytest.mark.parametrize("kind", ["pool", "namespace"])
@pytest.mark.parametrize("name", ["a/b", "a b", "a:b", "模", ".", "..", ".a", "-a", "_a"])
def test_a_name_used_in_topics_has_only_kafka_characters(kind: Kind, name: str) -> None:
    with pytest.raises(NameInvalid, match="part of Kafka topics"):
        require_name(kind, name)


def test_a_worker_name_has_no_space() -> None:
    with pytest.raises(NameInvalid, match="it has a space"):
        require_name("worker", "a b")


@pytest.mark.parametrize("name", ["work", "a.work", "a.work.b", "work.b"])
def test_a_namespace_cannot_collide_with_the_work_topics_of_another(name: str) -> None:
    with pytest.raises(NameInvalid, match="work topics of another namespace"):
        require_name("namespace", name)


def test_the_longest_topic_names_fit_kafka() -> None:
    namespace, pool = "n" * NAMESPACE_CHARS_MAX, "p" * POOL_CHARS_MAX
    names = [work_topic(require_name("pool", pool)).name, *(topic.name for topic in FIXED_TOPICS)]
    assert max(len(f"{require_name('namespace', namespace)}.{name}") for name in names) <= KAFKA_TOPIC_CHARS_MAX
    assert require_name("model", "m" * NAME_CHARS_MAX)


def test_an_adapter_cannot_have_the_name_of_its_base_model() -> None:
    assert require_adapter("sql", "base") == "sql"
    with pytest.raises(NameInvalid, match="'base' cannot be used: it is the name of the base model"):
        require_adapter("base", "base")
    with pytest.raises(NameInvalid, match=r"the adapter name '\.\./x'"):
        require_adapter("../x", "base")


@given(kind=st.sampled_from(KINDS), name=st.text(max_size=300))
def test_any_text_is_accepted_or_rejected_in_a_printable_line(kind: Kind, name: str) -> None:
    try:
        assert require_name(kind, name) == name
    except NameInvalid as error:
        assert str(error).isprintable()
    else:
        assert name.isprintable()
        assert name == name.strip()
        assert printable(name) == name


def test_a_name_in_a_message_is_one_line() -> None:
    assert printable("a\nb\0") == "a\\nb\\x00"


WORKERS = ("mock-0", "mock-1", "mock-2", "mock-3")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("mokc-1", WORKERS, "unknown thing 'mokc-1'; did you mean mock-1?"),
        ("MOCK", WORKERS, "unknown thing 'MOCK'; did you mean mock-0 or mock-1 or mock-2?"),
        ("mock-9", WORKERS, "unknown thing 'mock-9'; things are: mock-0, mock-1, mock-2, mock-3"),
        ("", WORKERS, "unknown thing ''; things are: mock-0, mock-1, mock-2, mock-3"),
        ("a\n", WORKERS, r"unknown thing 'a\n'; things are: mock-0, mock-1, mock-2, mock-3"),
        ("encoder", ("decode", "prefill", "encode"), "unknown thing 'encoder'; did you mean encode or decode?"),
        ("classes", ("queue.classes", "mode"), "unknown thing 'classes'; did you mean queue.classes?"),
        (
            "queue.xclasses",
            ("queue.classes", "queue.policy"),
            "unknown thing 'queue.xclasses'; did you mean queue.classes?",
        ),
        ("x", (), "unknown thing 'x'; there are no things"),
        ("x", [f"setting-{number}" for number in range(61)], "unknown thing 'x'; none of the 61 things is similar"),
        ("x" * 257, ("x" * 256,), f"unknown thing '{'x' * 64}'...; things are: {'x' * 256}"),
    ],
)
def test_error_for_an_unknown_name_suggests_similar_names_or_lists_all(
    name: str, known: Sequence[str], expected: str
) -> None:
    assert unknown_name("thing", name, known) == expected
    assert unknown_name("policy", name, known) == expected.replace("things", "policies").replace("thing", "policy")
