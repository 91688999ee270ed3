"""The common style of the figures: colours, a new figure, its legend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Okabe and Ito (2008), distinguishable with colour-blindness; yellow is left out, as it is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
GOOD, BAD = "#0072B2", "#D55E00"
DPI = 150


def new_figure(width: float, height: float, title: str, *, constrained: bool = True, **place: Any) -> Figure:
    """A figure without global state, in inches; `place` are options of its title."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        told = "figures need matplotlib, which is not installed; install it: pip install matplotlib"
        raise ModuleNotFoundError(told, name=error.name) from None

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained" if constrained else None)
    figure.suptitle(title, **{"fontsize": 9} | place)
    return figure


def add_legend(figure: Figure, axes: Any, fontsize: float, marks: tuple[Any, ...] = ()) -> None:
    """Name the lines of `axes`, and further `marks`, at the right of the figure."""
    handles = [*axes.get_legend_handles_labels()[0], *marks]
    if handles:
        labels = [handle.get_label() for handle in handles]
        figure.legend(handles, labels, loc="outside right center", fontsize=fontsize, frameon=False)


def hide_ticks(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
