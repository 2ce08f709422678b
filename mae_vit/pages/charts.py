"""Charts as SVG inside a page: they take their text color from it, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mae_vit.core.messages import plain_text

# Placeholder for the page's text color, which depends on light or dark.
INK = "#010203"
# Okabe and Ito (2008): safe for color blindness; readable on white and on black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f", "#b2182b")
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mae-vit",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
    "font.size": 11,
}


@contextmanager
def chart(
    horizontal: str, vertical: str, *, width: float = 6.2, height: float = 3.7
) -> Iterator[tuple[Figure, Axes]]:
    """Opens a figure of `width` x `height` inches with one pair of axes, in the style of pages.

    Its texts are as large as the page's, or smaller where the page has less room for the chart.
    """
    with matplotlib.rc_context(_STYLE):
        # Not pyplot's, which would have to be closed.
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(horizontal)
        axes.set_ylabel(vertical)
        axes.grid(alpha=0.2)
        yield figure, axes


def plain(name: str) -> str:
    """Escapes a name for matplotlib: dollar signs, which would begin a formula, and invalid UTF-8."""
    return plain_text(name).replace("$", r"\$")


def legend_below(figure: Figure) -> None:
    """Puts the legend below the axes, so that it hides no line."""
    figure.legend(loc="outside lower center", ncols=2, fontsize=10)


def to_svg(figure: Figure) -> Markup:
    """Returns an SVG element, equal for equal charts."""
    stream = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    svg = stream.getvalue()
    # Comments repeat texts in their source form, such as 10^{-3} on a logarithmic axis.
    svg = re.sub(r"<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL).replace(INK, "currentColor")
    # As wide as the page allows, but not wider than drawn: 12 points are 1 rem.
    size = re.search(r' width="([\d.]+)pt" height="[\d.]+pt"', svg)
    assert size is not None
    return Markup(svg.replace(size[0], f' style="max-width: {float(size[1]) / 12:.1f}rem"', 1))
