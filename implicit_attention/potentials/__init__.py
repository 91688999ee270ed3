"""Potentials Phi with their gradient (mean) and Hessian (covariance): one family per file."""

from .base import CovarianceMap, Potential, ReadsOut
from .log_sum_exp import LogSumExp
from .self_attention import SelfAttention
from .softmax1 import Softmax1
from .squared_scores import SquaredScores

__all__ = ["CovarianceMap", "LogSumExp", "Potential", "ReadsOut", "SelfAttention", "Softmax1", "SquaredScores"]
