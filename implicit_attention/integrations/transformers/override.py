"""Options of one model alone, kept on its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from .settings import OVERRIDES, Settings, check_fixed


@contextmanager
def override(model: nn.Module, **options: Any) -> Iterator[None]:
    """Inside this context all attention of a model has these options, whatever arguments it hands down.

    `with override(model, max_steps=0): model.generate(...)`.

    Args:
        model: the model, or a part of it.
        **options: `anchor`, `max_steps`, `solver`, `adjoint`, `impl`, `on_failure`, as in `register`.

    Raises:
        TypeError, ValueError: options that do not fit; an unknown one names those there are.
    """
    Settings().override(options, "options")
    check_fixed(options.get("anchor"))
    modules = list(model.modules())
    before = [getattr(module, OVERRIDES, None) for module in modules]
    for module in modules:
        setattr(module, OVERRIDES, options)
    try:
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            if held is None:
                delattr(module, OVERRIDES)
            else:
                setattr(module, OVERRIDES, held)
