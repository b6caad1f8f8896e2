"""Charts of a report, as data for `page.js`, which draws them with uPlot."""

from collections.abc import Sequence
from typing import Literal

import msgspec

COLOURS = 8  # names curve-0, curve-1, ... in page.css; more curves repeat them
Unit = Literal["number", "ms", "share"]  # a share is shown in percent


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An axis of a chart. An `end` of None is the largest value."""

    title: str = ""
    unit: Unit = "number"
    log: bool = False
    end: float | None = None


class Curve(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Values of one series of a panel.

    Attributes:
        x: ascending.
        y: None where the curve is interrupted.
        group: identifier by which the page shows and hides curves together.
    """

    x: Sequence[float]
    y: Sequence[float | None]
    name: str
    colour: str
    group: str
    is_step: bool = False


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


class Chart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Panels with a common x axis, and an x value that a vertical line marks in all of them."""

    id: str
    title: str
    text: str
    panels: list[Panel]
    x: Axis
    mark: float | None = None
