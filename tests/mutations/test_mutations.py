"""The list of mutations is current: each one can be applied, and its tests exist."""

from pathlib import Path

import pytest

from tests.mutations.mutation import ROOT, Mutation, load


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_applied(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    files = [Path(part.partition("::")[0]) for part in mutation.tests.split() if part.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files)
