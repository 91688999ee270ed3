"""Potentials Phi with their gradient (mean) and Hessian (covariance): one family per file."""

from .base import CovarianceMap, Potential
from .log_sum_exp import LogSumExp
from .squared_scores import SquaredScores

__all__ = ["CovarianceMap", "LogSumExp", "Potential", "SquaredScores"]
