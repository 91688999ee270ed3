"""Layers that remember the evidence of their last solve."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..equilibrium import Measured
from ..options import SolveOptions
from ..solution import Evidence


class Remembering(nn.Module):
    """Base of layers with `last_solve`: part of neither the state dict, copies nor pickles."""

    options: SolveOptions
    _last: Evidence | Measured | None

    def __init__(self) -> None:
        super().__init__()
        self._last = None

    @property
    def last_solve(self) -> Evidence | None:
        """The evidence of the last call; of a compiled one, which could not tell, failures are warned of here."""
        if isinstance(self._last, Measured):
            self._last = self._last.evidence(self.options.on_failure)
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}
