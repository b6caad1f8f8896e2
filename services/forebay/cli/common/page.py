"""HTML reports: self-contained files that load nothing from the network.

`page.html` is the template of every report, which shows a list of parts: charts, tables, cards and notes. The reports
share their style and uPlot, which draws the charts, with the page of `forebay console`. Names chosen by users are
always text, never markup: the template escapes them, scripts receive them as data and insert text nodes, and the
content security policy of the page blocks all external resources.
"""

import functools
import zlib
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from forebay.cli.common.errors import BROKEN, fail
from forebay.cli.common.terminal import printable

if TYPE_CHECKING:
    import jinja2

HEAD_BYTES = 1024  # the first bytes of a report, which contain its title
COLOURS = 8  # names curve-0, curve-1, ... in page.css; more curves repeat them
Unit = Literal["number", "ms", "share"]  # a share is shown in percent


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An axis of a chart: of numbers, or of `names` for 0, 1 and so on. An `end` of None is the largest value."""

    title: str = ""
    unit: Unit = "number"
    log: bool = False
    names: list[str] = []
    end: float | None = None


class Curve(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Values of one series of a panel.

    Attributes:
        x: ascending; bars of several curves have the same values.
        y: None where the curve is interrupted.
        group: identifier by which the page shows and hides curves together.
    """

    x: Sequence[float]
    y: Sequence[float | None]
    name: str = ""
    colour: str = "soft"
    group: str = ""
    style: Literal["line", "points", "step", "area", "bars"] = "line"


class Heat(msgspec.Struct, kw_only=True):
    """Values of a heat map, per row and column, instead of curves."""

    rows: list[str]
    width: float  # of a column on the x axis
    values: list[list[float]]
    max: float


class Panel(msgspec.Struct, kw_only=True, omit_defaults=True):
    curves: list[Curve] = []
    y: Axis = Axis()
    title: str = ""
    colour: str = ""
    heat: Heat | None = None
    height: int = 280


class Mark(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A vertical line across all panels."""

    at: float
    colour: str = "ink"
    text: str = ""


class Chart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Panels with a common x axis. A wide page shows two charts that are `paired` side by side."""

    id: str
    title: str
    text: str
    panels: list[Panel]
    x: Axis = Axis()
    marks: list[Mark] = []
    paired: bool = False

    kind: ClassVar[str] = "chart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a page other than a chart.

    Attributes:
        kind: a kind of `page.html`, or the path of a template under `forebay/cli`, which gets `part` as a variable.
        rows: for cards: name, value and comment; for terms: name and text; for tables: cells.
        left: number of columns of a table that are aligned to the left.
    """

    kind: str
    title: str = ""
    text: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    items: Sequence[str] = ()
    left: int = 1
    values: Any = None


def render(
    title: str,
    parts: Sequence[Part | Chart],
    *,
    heading: str,
    colours: dict[str, str] | None = None,
    data: dict[str, Any] | None = None,
    style: str = "",
    scripts: Sequence[str] = (),
) -> str:
    """Return a report as HTML.

    The title begins with the name of the command. `colours` are those of words in the heads of tables and terms.
    `style` and `scripts` are paths under `forebay/cli`; the last script draws the charts.
    """
    charts = {part.id: part for part in parts if isinstance(part, Chart)}
    packed = zlib.compress(msgspec.json.encode({"charts": charts, **(data or {})}), 9)
    return (
        _environment()
        .get_template("common/page.html")
        .render(
            title=title,
            heading=heading,
            parts=parts,
            colours=colours or {},
            style=style,
            scripts=scripts,
            data=b64encode(packed).decode(),
        )
    )


@functools.cache
def _environment() -> "jinja2.Environment":
    """Return the environment of the templates, which compiles each template once."""
    import jinja2  # noqa: PLC0415 - commands that write no report do not wait for it

    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("forebay.cli", "."), jinja2.PackageLoader("forebay.console", "static")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Unprintable characters are escaped, such as marks that reverse the text direction.
        finalize=lambda value: printable(value) if type(value) is str else value,
        keep_trailing_newline=True,
    )


def require_writable(option: str, path: Path, title: str) -> None:
    """Check, before any work is done, that a report can be written to `path`.

    Exits if the file cannot be written, or exists and is not an earlier report of the same command, whose title begins
    with `title`.
    """
    if not path.parent.is_dir():
        fail(f"{option} {path}: no such directory {path.parent}")
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe or a terminal would wait
        fail(f"{option} {path}: not a regular file; choose another name")
    try:
        with path.open("rb") as file:
            is_page = f"<title>{title}".encode() in file.read(HEAD_BYTES)
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}")
    if not is_page:
        fail(f"{option} {path}: the file exists and is not a report of this command; choose another name")


def write(option: str, path: Path, page: Callable[[], str]) -> None:
    """Render a report and write it atomically. A file that cannot be written ends the command."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(page(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        fail(f"{option} {path}: {error.strerror}", BROKEN)
    finally:
        part.unlink(missing_ok=True)
