"""Figures as files."""

import io
import warnings


def png(figure):
    """The bytes of the figure, drawn without a warning."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(stream, format="png")
    return stream.getvalue()
