"""Problems that several processes solve together, on torch.distributed."""

from .lock_step import LockStepError
from .sequence import sequence_parallel
from .sharded import ShardedLogSumExp
from .stored import Patterns, StoredPatterns

__all__ = ["LockStepError", "Patterns", "ShardedLogSumExp", "StoredPatterns", "sequence_parallel"]
