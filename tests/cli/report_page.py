"""The HTML page of a report, parsed."""

import json
import zlib
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

HOSTILE = "</script><img src=x onerror=alert(1)>[bold]\x1b[31m&amp;"


class Page(HTMLParser):
    """Parsed page: texts by tag, external references and embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.scripts: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.text = " ".join(
            text for tag, texts in self.texts.items() if tag not in ("script", "style") for text in texts
        )
        self.data: dict[str, Any] = json.loads(zlib.decompress(b64decode(self.scripts[0])))
        self.charts: dict[str, Any] = self.data["charts"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "input"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)
