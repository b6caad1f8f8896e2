"""The list of mutations is current: each one can be applied, and its tests exist."""

import re

import pytest

from tests.mutations.mutation import ROOT, Mutation, load


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_applied(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    files = [ROOT / part.partition("::")[0] for part in mutation.tests.split() if part.startswith("tests/")]
    assert files
    selected = re.findall(r"::(\w+)", mutation.tests)
    for expression in re.findall(r"-k ('[^']*'|\S+)", mutation.tests):
        selected += [word for word in re.findall(r"[\w-]+", expression) if word not in ("and", "or", "not")]
    text = "".join(path.read_text() for file in files for path in ([file] if file.is_file() else file.rglob("*.py")))
    # Names with a hyphen are ids of parameters, which other modules may define.
    assert [name for name in selected if "-" not in name and name not in text] == []
