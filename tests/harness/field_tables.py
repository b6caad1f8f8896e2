"""Derive the tables of fields in the pages of the APIs from their bodies; `tests.harness.schemas` writes them."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from forebay.ingress.messages.body import (
    Block,
    CustomTool,
    ImageSource,
    MessageParam,
    MessagesBody,
    OutputConfig,
    OutputFormat,
    Thinking,
    ToolChoiceParam,
)
from forebay.ingress.openai.fields import Body
from forebay.ingress.responses.body import (
    ChosenTool,
    FunctionTool,
    Reasoning,
    ResponsesBody,
    ResponseStreamOptions,
    TextFormat,
    TextOptions,
)
from forebay.ingress.responses.items import Item, Part

ROOT = Path(__file__).resolve().parents[2]
# Classes of each page, by the headings of their tables.
PAGES: Mapping[str, Mapping[str, type[Body]]] = {
    "docs/responses.md": {
        "Body": ResponsesBody,
        "Text": TextOptions,
        "Format": TextFormat,
        "Reasoning": Reasoning,
        "Tools": FunctionTool,
        "Tool choice": ChosenTool,
        "Stream options": ResponseStreamOptions,
        "Items": Item,
        "Parts": Part,
    },
    "docs/messages.md": {
        "Body": MessagesBody,
        "Messages": MessageParam,
        "Blocks": Block,
        "Images": ImageSource,
        "Tools": CustomTool,
        "Tool choice": ToolChoiceParam,
        "Thinking options": Thinking,
        "Output": OutputConfig,
        "Output format": OutputFormat,
    },
}
_TABLES = re.compile(r"(?<=<!-- fields -->\n).*?(?=<!-- end of fields -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Return the text of each page, with tables that match the bodies."""
    return {ROOT / name: _page(ROOT / name, kinds) for name, kinds in PAGES.items()}


def rows(kind: type[Body]) -> Iterator[tuple[str, str, str]]:
    """Yield name, handling and meaning of each field of a body: `mapped`, `accepted` without effect, or `refused`."""
    for name, field in kind.model_fields.items():
        meaning = field.description or " or ".join(f"`{value}`" for value in _literals(field.annotation))
        assert meaning, f"{kind.__name__}.{name} has no description"
        yield field.alias or name, "accepted" if meaning.startswith("No effect") else "mapped", meaning
    for name in sorted(kind.ignored):
        yield name, "accepted", "No effect."
    for name, values in sorted(kind.neutral.items()):
        neutral = " or ".join(f"`{json.dumps(value)}`" for value in values)
        yield name, "refused", f"Accepted only as {neutral}, without effect."


def _page(path: Path, kinds: Mapping[str, type[Body]]) -> str:
    tables = _tables(kinds)
    return _TABLES.sub(lambda _: tables, path.read_text())


def _tables(kinds: Mapping[str, type[Body]]) -> str:
    lines = []
    for heading, kind in kinds.items():
        lines += ["", f"### {heading}", "", inspect.cleandoc(kind.__doc__ or ""), ""]
        lines += ["| field | handling | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {handling} | {meaning} |" for name, handling, meaning in rows(kind)]
    return "\n".join([*lines, "", ""])


def _literals(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _literals(part)
