"""The common style of the figures: colours, a new figure, the look of its axes, its legends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib import figure

#: The class of matplotlib, which is imported when the first figure is drawn.
Figure: TypeAlias = "figure.Figure"
#: Okabe and Ito (2008), distinguishable with colour-blindness; yellow is left out, as it is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
GOOD, BAD = "#0072B2", "#D55E00"
DPI = 150


def new_figure(width: float, height: float, title: str, *, constrained: bool = True, **place: Any) -> Figure:
    """A figure without global state, in inches; `place` are options of its title."""
    try:
        from matplotlib import figure
    except ModuleNotFoundError as error:
        message = "figures need matplotlib, which is not installed; install it: pip install matplotlib"
        raise ModuleNotFoundError(message, name=error.name) from None

    drawn = figure.Figure(figsize=(width, height), dpi=DPI, layout="constrained" if constrained else None)
    drawn.suptitle(title, **{"fontsize": 9} | place)
    return drawn


def finish(axes: Any, x: str = "", y: str = "", *, size: float = 8, grid: float = 0.25, frame: bool = True) -> None:
    """Label both axes, and draw a faint grid; without a frame the edges above and on the right are left out."""
    axes.set_xlabel(x, fontsize=size)
    axes.set_ylabel(y, fontsize=size)
    axes.tick_params(labelsize=size - 1)
    if grid:
        axes.grid(alpha=grid)
    if not frame:
        axes.spines[["top", "right"]].set_visible(False)


def add_bar(figure: Figure, drawn: Any, label: str, *, size: float = 8, **place: Any) -> Any:
    """Add and return the bar that explains the colours of `drawn`; `place` are options of `Figure.colorbar`."""
    bar = figure.colorbar(drawn, **place)
    bar.set_label(label, fontsize=size)
    bar.ax.tick_params(labelsize=size - 1)
    return bar


def name_columns(grid: Any, label: str) -> None:
    """Label the x axis below the lowest panel of every column, below which a place may be empty."""
    for column in grid.T:
        lowest = [axes for axes in column if axes.axison][-1]
        lowest.set_xlabel(label, fontsize=8)
        lowest.tick_params(labelbottom=True)


def add_legend(figure: Figure, axes: Any, fontsize: float, marks: tuple[Any, ...] = ()) -> None:
    """Name the lines of `axes`, and further `marks`, at the right of the figure."""
    if handles := [*axes.get_legend_handles_labels()[0], *marks]:
        figure.legend(handles=handles, loc="outside right center", fontsize=fontsize, frameon=False)


def legend_below(figure: Figure, handles: list[Any], columns: int) -> None:
    """Name `handles` below all panels."""
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def hide_ticks(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
