"""docs/cookbook.md as it stands: every command runs, and prints what the page shows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.cookbook import PAGE, Recipe, folder_of, recipes, run

FIRST, *OTHERS = recipes(PAGE.read_text())

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of(tmp_path_factory.mktemp("cookbook")) as folder:
        prints_what_is_shown(FIRST, folder)
        yield folder


@pytest.mark.slow  # a minute of simulations; tests of each command cover what it prints
@pytest.mark.parametrize("recipe", OTHERS, ids=[recipe.title for recipe in OTHERS])
def test_a_recipe_prints_what_the_page_shows(given: Path, tmp_path: Path, recipe: Recipe) -> None:
    with folder_of(tmp_path, given) as folder:
        prints_what_is_shown(recipe, folder)


def test_most_questions_are_answered_by_commands_that_are_run() -> None:
    assert len(OTHERS) >= 10


def prints_what_is_shown(recipe: Recipe, folder: Path) -> None:
    for step, printed in zip(recipe.steps, run(recipe, folder), strict=True):
        if step.output is not None:
            assert printed == step.output, f"{step.command}\npython -m tests.cli.cookbook writes the page anew"
