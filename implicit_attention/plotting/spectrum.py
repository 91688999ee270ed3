"""Eigenvalues of the Jacobian of a map at its fixed points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _validate
from ..diagnostics import jacobian_eigenvalues
from .style import BAD, GOOD, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..problem import Problem
