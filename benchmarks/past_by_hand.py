"""What stands in the place of a `Past` where decoding is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class PastByHand:
    """All that attentions ask of a `Past` for one token but `update`, which a subclass has."""

    mask, is_causal = None, False

    def __init__(self, place: int = 0) -> None:
        self.begin(place)

    def begin(self, place: int) -> None:
        """Go to the token at this place."""
        self.positions, self.turns = torch.tensor([place]), None
        #: How often an attention has called `update` for this token.
        self.called = 0

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The rotary angles of the token, which are the same in all attentions and steps."""
        self.turns = make() if self.turns is None else self.turns
        return self.turns
