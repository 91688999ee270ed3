"""Training runs: `watch` counts the outcomes of every layer's solves, and writers store them; `SettlingLoss` trains a
block that repeats, and `calibrate` says how often its settled answers are right.

`FailurePolicy`, which says how many failures a run tolerates, is an option of every layer: `on_failure`.
"""

from ..failure import FailurePolicy
from .calibration import Calibration, calibrate, calibration_table
from .observed import Observation, Observed
from .settling import SettlingLoss
from .watch import Watch, watch
from .writers import CSVFile, JSONLines, ProgressLine, TensorBoard, Writer

__all__ = [
    "CSVFile",
    "Calibration",
    "FailurePolicy",
    "JSONLines",
    "Observation",
    "Observed",
    "ProgressLine",
    "SettlingLoss",
    "TensorBoard",
    "Watch",
    "Writer",
    "calibrate",
    "calibration_table",
    "watch",
]
