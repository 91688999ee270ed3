"""Equilibria in Hugging Face models: of attention by `attach(model)`, of the streams of HRM-Text by `settle`."""

from .._hosts import library_of

with library_of("transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401

from .attach import attach, load, register
from .checkpoints import last_whole_checkpoint
from .convert import Conversion, Stage, convert
from .learn import learn_anchors
from .report import LayerReport, last_solves, report
from .restore import restore_attention
from .settings import override
from .settle import settle
from .watching import WatchCallback

__all__ = [
    "Conversion",
    "LayerReport",
    "Stage",
    "WatchCallback",
    "attach",
    "convert",
    "last_whole_checkpoint",
    "last_solves",
    "learn_anchors",
    "load",
    "override",
    "register",
    "report",
    "restore_attention",
    "settle",
]
