"""The console's page, as far as it can be checked without a browser."""

import posixpath
import re
from pathlib import Path

import pytest

import forebay.console

STATIC = Path(forebay.console.__file__).parent / "static"
MODULES, PAGES, STYLES = (
    sorted(path.relative_to(STATIC).as_posix() for path in STATIC.rglob(f"*.{kind}") if path.parent.name != "vendor")
    for kind in ("js", "html", "css")
)
VENDORED = {"vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"}
# Each of these would turn a text into markup or code, or needs a weaker content security policy.
UNSAFE_CODE = re.compile(
    r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|setHTMLUnsafe|srcdoc|eval)\b"
    r"|document\s*\.\s*write|new\s+Function\b|\bFunction\(|javascript:|setAttribute\(\s*[\"'](?:style|on\w+)[\"']"
)
UNSAFE_MARKUP = re.compile(r"\s(?:on\w+|style)\s*=|<style|<script(?![^>]*\ssrc=)|javascript:", re.IGNORECASE)
EXTERNAL = re.compile(r"(?:https?:|wss?:)?//[\w.-]+\.\w|@import")
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which no browser loads
IMPORTED = re.compile(r"(?:\bfrom\s+|\bimport\s*\(\s*|^import\s+)[\"']([^\"']+)[\"']", re.MULTILINE)
LOADED = re.compile(r"(?:src|href)=\"(?!data:|#)([^\"]+)\"")


def source(name: str) -> str:
    return (STATIC / name).read_text()


def references(name: str) -> list[str]:
    """Return the files under `static` that a page or a module loads."""
    if name.endswith(".html"):
        return [posixpath.relpath(found, "static") for found in LOADED.findall(source(name))]
    return [
        posixpath.normpath(posixpath.join(posixpath.dirname(name), found)) for found in IMPORTED.findall(source(name))
    ]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_never_turns_text_into_markup_or_code(name: str) -> None:
    assert UNSAFE_CODE.findall(source(name)) == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_inline_handlers_styles_and_scripts(name: str) -> None:
    assert UNSAFE_MARKUP.findall(source(name)) == []


@pytest.mark.parametrize("name", [*MODULES, *PAGES, *STYLES])
def test_nothing_is_loaded_from_a_network(name: str) -> None:
    assert EXTERNAL.findall(source(name).replace(SVG_NAMESPACE, "")) == []


@pytest.mark.parametrize("name", [*MODULES, *PAGES])
def test_every_referenced_file_exists(name: str) -> None:
    assert [found for found in references(name) if not (STATIC / found).is_file()] == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_described(name: str) -> None:
    assert source(name).startswith("/**")


def test_every_file_is_used_by_a_page() -> None:
    reached: set[str] = set(PAGES)
    pending = list(PAGES)
    while pending:
        name = pending.pop()
        if name.endswith((".html", ".js")):
            found = set(references(name)) - reached
            reached |= found
            pending += found
    assert reached == {*MODULES, *PAGES, *STYLES, *VENDORED}
