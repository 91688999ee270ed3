"""What the figures share."""

from __future__ import annotations

#: Okabe and Ito (2008), distinguishable with colour-blindness; yellow is left out, as it is faint on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")
GOOD, BAD = "#0072B2", "#D55E00"
DPI = 150
