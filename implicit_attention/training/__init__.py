"""Training runs, seen from outside: `watch` counts what the solves of every layer came to, and writers keep it.

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
