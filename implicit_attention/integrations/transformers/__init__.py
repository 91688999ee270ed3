"""Equilibrium attention for Hugging Face models: `register`, then `set_attn_implementation("equilibrium")`."""

try:
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401
except ImportError as error:
    raise ImportError(
        "`implicit_attention.integrations.transformers` needs transformers 5.23 or newer; "
        'in the checkout: pip install -e ".[transformers]"'
    ) from error

from .convert import Conversion, Stage, convert
from .override import override
from .registration import register
from .report import LayerReport, evidence, report

__all__ = ["Conversion", "LayerReport", "Stage", "convert", "evidence", "override", "register", "report"]
