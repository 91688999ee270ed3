"""Training runs, seen from outside: `watch` counts the outcomes of every layer's solves, and writers store them.

`FailurePolicy`, which says how many failures a run tolerates, is an option of every layer: `on_failure`.
"""

from ..failure_policy import FailurePolicy
from .observed import Observation, Observed
from .watch import Watch, watch
from .writers import CSVFile, JSONLines, ProgressLine, TensorBoard, Writer

__all__ = [
    "CSVFile",
    "FailurePolicy",
    "JSONLines",
    "Observation",
    "Observed",
    "ProgressLine",
    "TensorBoard",
    "Watch",
    "Writer",
    "watch",
]
