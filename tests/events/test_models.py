"""Digests of model cards and keys of aliases."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.models import AliasSet, AliasTarget, ModelCard, ModelFile

SHAS = st.sampled_from(["0" * 64, "a" * 64])
FILES = st.builds(ModelFile, name=st.sampled_from(["a.json", "b.json"]), sha256=SHAS, size=st.integers(0, 2))
CARDS = st.builds(ModelCard, files=st.lists(FILES, max_size=2).map(tuple), context_tokens=st.integers(0, 2))


@given(CARDS, CARDS)
def test_equal_cards_have_equal_digests_and_others_do_not(first: ModelCard, second: ModelCard) -> None:
    assert (first.digest() == second.digest()) == (first == second)
    assert len(first.digest()) == 64


@given(CARDS)
def test_the_revision_does_not_change_the_digest(card: ModelCard) -> None:
    assert msgspec.structs.replace(card, revision="1f0c").digest() == card.digest()
    assert msgspec.structs.replace(card, dtype="bfloat16").digest() != card.digest()


def test_the_key_of_an_alias_differs_from_that_of_a_card() -> None:
    alias = AliasSet(alias="prod", targets=(AliasTarget(model="m"),))
    assert alias.key == b"alias/prod"
