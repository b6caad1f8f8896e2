"""Hooks of MkDocs: pages outside of docs, links to other files, navigation, and the Markdown that only GitHub reads."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ADDED = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SOURCES = "files"  # folder of the site for other files of the repository that pages link to
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*""")


def on_config(config: MkDocsConfig) -> None:
    """List the pages in the order of docs/index.md, each once, and the decision records at the end."""
    docs = Path(config.docs_dir)
    first, *sections = re.split(r"^## (.+)$", (docs / "index.md").read_text(), flags=re.MULTILINE)
    nav: list[Any] = ["index.md", ADDED["README.md"], *LINK.findall(first)]
    listed = set(nav)
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        found = [ADDED.get(link.removeprefix("../"), link) for link in LINK.findall(text)]
        pages = [link for link in dict.fromkeys(found) if link.endswith(".md") and link not in listed]
        listed.update(pages)
        nav.append({title: pages})
    records = sorted(path.relative_to(docs).as_posix() for path in docs.glob("adr/*.md"))
    config.nav = [*nav, ADDED["CHANGELOG.md"], {"Decision records": records}]


def on_files(files: Files, config: MkDocsConfig) -> None:
    for path, uri in ADDED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    pages = files.documentation_pages()
    linked = {_target(page, link) for page in pages for link in LINK.findall(page.content_string)}
    for target in sorted(linked):
        if target.is_file() and (uri := _uri(target)).startswith(f"{SOURCES}/"):
            files.append(File.generated(config, uri, abs_src_path=str(target)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def link(found: re.Match[str]) -> str:
        path, folder = _target(page.file, found[1]), posixpath.dirname(page.file.src_uri)
        return f"]({posixpath.relpath(_uri(path), folder or '.')}" if path.is_file() else found[0]

    text = re.sub(r"^<!-- .*?-->$", "", markdown, flags=re.DOTALL | re.MULTILINE)  # blocks that only tests run
    text = re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)[^)]+/\)|\[([^\]]+)\]\(\.\./[\w/]+\)", r"\1\2", text)  # folders
    return _indented(LINK.sub(link, text))


def on_post_build(config: MkDocsConfig) -> None:
    for page in Path(config.site_dir).rglob("*.html"):
        if found := LOADED.search(page.read_text()):
            raise PluginError(f"{page} loads a file from the network: {found[0]}")


def _target(page: File, link: str) -> Path:
    """Return the file of the repository to which a page links."""
    assert page.abs_src_path is not None
    return (Path(page.abs_src_path).parent / link).resolve()


def _uri(path: Path) -> str:
    """Return the place in the site of a file of the repository. Browsers show texts of any kind as `.txt`."""
    name = path.relative_to(ROOT).as_posix()
    return name.removeprefix("docs/") if name.startswith("docs/") else ADDED.get(name, f"{SOURCES}/{name}.txt")


def _indented(markdown: str) -> str:
    """Indent the content of lists by four, and keep only the language, or the file name as a title, after a fence."""
    lines, width, is_code = [], 0, False
    for line in markdown.split("\n"):
        if line.startswith("```"):
            is_code = not is_code
            lines.append(re.sub(r"^(```\w+) (\S+)$", lambda m: f'{m[1]} title="{m[2]}"' if "." in m[2] else m[1], line))
        elif is_code:
            lines.append(line)
        else:
            if marker := re.match(r"- |\d+\. ", line):
                width = len(marker[0])
            elif line and not line.startswith(" " * width):
                width = 0
            shift = 4 - width if width and line.startswith(" " * width) else 0
            lines.append(" " * shift + line)
    return "\n".join(lines)
