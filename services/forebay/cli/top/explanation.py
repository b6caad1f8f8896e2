"""Screen with the explanation of one request, in the form of `forebay replay explain`."""

import io
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import ScrollableContainer
from textual.screen import Screen
from textual.widgets import Footer, Static

from forebay.cli.common.terminal import printable
from forebay.cli.common.whole_words import WholeWordsConsole
from forebay.cli.replay.explain_view import print_on
from forebay.cli.top.source import Source, SourceError
from forebay.replay.catalog.facts import RequestRow
from forebay.replay.explain.explanation import Explanation


def explanation_text(explanation: Explanation, width: int) -> Text:
    """Return the text that `forebay replay explain` prints on a terminal with `width` columns."""
    out = io.StringIO()
    console = WholeWordsConsole(file=out, width=width, highlight=False, force_terminal=True, color_system="standard")
    print_on(console, explanation, everything=False)
    return Text.from_ansi(out.getvalue())


class ExplanationScreen(Screen[None]):
    """Explanation of one request."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]

    def __init__(self, source: Source, request: RequestRow) -> None:
        super().__init__()
        self._source = source
        self._request = request
        self._text = Static(Text(printable(f"explaining {request.request_id} …")), id="explanation")

    def compose(self) -> ComposeResult:
        with ScrollableContainer(can_focus=True):
            yield self._text
        yield Footer()

    def on_mount(self) -> None:
        """Explain the request while the screen is open."""
        self.query_one(ScrollableContainer).focus()
        self.run_worker(self._explain())

    async def _explain(self) -> None:
        try:
            explanation = await self._source.explain(self._request)
        except SourceError as error:
            text = f"cannot explain {self._request.request_id}: {error}"
            self._text.update(Text(printable(text), style="bold"))
            return
        self._text.update(explanation_text(explanation, self.app.size.width - 2))  # columns beside the scroll bar
