"""Problems that several processes solve together, on torch.distributed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lock_step import LockStepError
    from .sequence import sequence_parallel
    from .sharded import ShardedLogSumExp
    from .stored import Patterns, StoredPatterns

_LAZY = {
    "LockStepError": "lock_step",
    "Patterns": "stored",
    "ShardedLogSumExp": "sharded",
    "StoredPatterns": "stored",
    "sequence_parallel": "sequence",
}

__all__ = ["LockStepError", "Patterns", "ShardedLogSumExp", "StoredPatterns", "sequence_parallel"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
