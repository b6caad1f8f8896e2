"""Every command of docs/cookbook.md runs and prints the output on the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.cookbook import PAGE, Recipe, folder_of, recipes, run

FIRST, *OTHERS = recipes(PAGE.read_text())

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def shared_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with folder_of(tmp_path_factory.mktemp("cookbook")) as folder:
        prints_documented_output(FIRST, folder)
        yield folder


@pytest.mark.slow  # a minute of simulations; other tests cover the output of each command
@pytest.mark.parametrize("recipe", OTHERS, ids=[recipe.title for recipe in OTHERS])
def test_a_recipe_prints_the_output_on_the_page(shared_files: Path, tmp_path: Path, recipe: Recipe) -> None:
    with folder_of(tmp_path, shared_files) as folder:
        prints_documented_output(recipe, folder)


def test_most_recipes_are_run() -> None:
    assert len(OTHERS) >= 10


def prints_documented_output(recipe: Recipe, folder: Path) -> None:
    for step, printed in zip(recipe.steps, run(recipe, folder), strict=True):
        if step.output is not None:
            assert printed == step.output, f"{step.command}\npython -m tests.cli.cookbook writes the page anew"
