"""HTML reports: self-contained files that load nothing from the network.

They share their style with the page of `forebay console`. Names chosen by users are always text, never markup:
templates escape them, charts receive them as JSON, and the content security policy of the page blocks all external
resources.
"""

import functools
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
    """Chart of a report. `begins_pair` and `ends_pair` mark two charts that a wide page shows side by side."""

    id: str
    title: str
    text: str
    figure: graph_objects.Figure
    height: int = 360
    begins_pair: bool = False
    ends_pair: bool = False


def render(template: str, charts: list[Chart], **values: Any) -> str:
    """Return a report as HTML.

    Args:
        template: Path under `forebay/cli` of a template that extends `common/page.html`.
        charts: Charts of the page, in order.
        values: Further variables of the template.
    """
    figures = "{" + ",".join(f'"{chart.id}":{chart.figure.to_json()}' for chart in charts) + "}"
    return (
        _environment()
        .get_template(template)
        .render(charts=charts, figures=in_script(figures), plotly_js=get_plotlyjs(), **values)
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """Return the environment of the templates, which compiles each template once."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("forebay.cli", "."), jinja2.PackageLoader("forebay.console", "static")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        keep_trailing_newline=True,
    )


def in_script(json: str) -> str:
    """Escape JSON for a script element, which would otherwise end at the first "</script", even inside a string."""
    return json.replace("<", "\\u003c")


def plain(text: str) -> str:
    """Escape text for plotly, which interprets some HTML tags."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(name: str) -> str:
    """Shorten a name to at most 16 characters, for the labels of an axis."""
    return name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}"


def _visible(value: Any) -> Any:
    """Replace unprintable characters in a value of a template, such as marks that reverse the text direction."""
    return printable(value) if type(value) is str else value
