"""Pages: one file with everything in it, that asks the network for nothing.

What users named is text here, never markup: templates escape it, charts get it as JSON, and the page's own policy
forbids whatever would come from elsewhere.
"""

from typing import Any

import jinja2
import msgspec
from plotly import graph_objects
from plotly.offline import get_plotlyjs

from forebay.cli.common.terminal import printable

LAYOUT: dict[str, Any] = {
    "margin": {"l": 64, "r": 16, "t": 16, "b": 48},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    "hovermode": "closest",
}


class Chart(msgspec.Struct, kw_only=True):
    """A figure and what it shows; the first and the last of a pair stand side by side where there is room."""

    id: str
    title: str
    text: str
    figure: graph_objects.Figure
    height: int = 360
    begins_pair: bool = False
    ends_pair: bool = False


def render(template: str, charts: list[Chart], **values: Any) -> str:
    """The whole page; `template` is a file under `forebay/cli` that extends `common/page.html`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("forebay.cli", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        keep_trailing_newline=True,
    )
    figures = "{" + ",".join(f'"{chart.id}":{chart.figure.to_json()}' for chart in charts) + "}"
    return environment.get_template(template).render(
        charts=charts, figures=in_script(figures), plotly_js=get_plotlyjs(), **values
    )


def in_script(json: str) -> str:
    """JSON as the text of a script element, which ends at the first "</script" whatever the quotes around it."""
    return json.replace("<", "\\u003c")


def plain(text: str) -> str:
    """Text that plotly, which knows a few tags, takes for no markup."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(name: str) -> str:
    """A name that fits below an axis."""
    return name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}"


def _visible(value: Any) -> Any:
    """What a template shows: of a text every letter, none that turns the others around."""
    return printable(value) if type(value) is str else value
