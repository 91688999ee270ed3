"""Figures as files, and whether their texts can be read."""

import io
import itertools
import warnings

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def png(figure):
    """The bytes of the figure, drawn without a warning."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(stream, format="png")
    return stream.getvalue()


def covered(figure):
    """Return the texts, those of ticks left out, that lie over a curve, the edge of an area or another text."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    parts = [part for owner in (figure, *figure.axes) for part in owner.get_children()]
    parts += [axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    parts += [text for part in parts if isinstance(part, Legend) for text in part.get_texts()]
    texts = [part for part in parts if isinstance(part, Text) and part.get_text().strip()]
    boxes = [(text, text.get_window_extent(renderer)) for text in texts]
    found = []
    for axes in figure.axes:
        frame = axes.get_window_extent(renderer)
        curves = [
            line.get_path().transformed(line.get_transform()) for line in axes.lines if line.get_linestyle() != "None"
        ]
        curves += [path.transformed(part.get_transform()) for part in axes.collections for path in part.get_paths()]
        for text, box in boxes:
            # What is drawn of a curve is within the frame.
            part = Bbox.intersection(box, frame)
            if part is not None and any(len(path) and path.intersects_bbox(part, filled=False) for path in curves):
                found.append(text.get_text())
    pairs = itertools.combinations(boxes, 2)
    return found + [a.get_text() for (a, one), (_, other) in pairs if Bbox.intersection(one, other) is not None]
