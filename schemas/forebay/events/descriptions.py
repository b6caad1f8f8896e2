"""Read the descriptions of fields in the docstrings of events and settings."""

import inspect
import re

# An entry of a docstring's `Attributes` section: a name, and text whose continuation lines are indented further.
_ATTRIBUTE = re.compile(r"^    (\w+): ((?:.*)(?:\n {5,}.*)*)", re.MULTILINE)


def split_description(docstring: str | None) -> tuple[str, dict[str, str]]:
    """Return the text of a class's docstring without its section `Attributes`, and that section by attribute."""
    text, _, attributes = inspect.cleandoc(docstring or "").partition("\n\nAttributes:\n")
    return text, {name: " ".join(meaning.split()) for name, meaning in _ATTRIBUTE.findall(attributes)}
