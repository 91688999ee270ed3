"""Couplings and fields of an Ising system from samples or moments: inverse Ising problems by mean-field equations."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .. import _validate
from .._torch import at_least_single, host_may_look, in_own_precision
from ._matrix_inverse import inverse_and_logdet
from .bonds import Bonds, Graph
from .system import SpinSystem

InverseMethod: TypeAlias = Literal["mean_field", "tap", "adaptive_tap", "bethe"]


@in_own_precision
def fit_ising(
    samples: Float[Tensor, "*batch M N"],
    *,
    method: InverseMethod = "tap",
    pseudocount: float = 1.0,
    shrinkage: float = 0.0,
    pairs: Int[Tensor, "*batch E 2"] | None = None,
) -> SpinSystem:
    """The Ising system, at beta = 1, whose spins vary like those of the samples: `fit_ising_moments` of their moments.

    With M samples of mean m and covariance C, and a = pseudocount/(M + pseudocount), the moments are

        (1 - a) m_i,     (1 - a)^2 C_ij for i != j,     1 - (1 - a)^2 m_i^2 for i = j,

    those of samples each of whose spins has been drawn anew, +-1 with equal odds, with probability a. Spins that never
    change then have a finite field, and are coupled to nothing. (Adding samples of independent spins instead would
    couple them: together they would distinguish the two kinds of samples.)

    Args:
        samples: M configurations of N spins, -1 or 1, (*batch, M, N).
        method: as in `fit_ising_moments`.
        pseudocount: >= 0, in samples; with 0, every spin has to change.
        shrinkage: as in `fit_ising_moments`.
        pairs: as in `fit_ising_moments`; no covariance of other pairs is computed.

    Returns:
        The `SpinSystem` of `fit_ising_moments`.

    Raises:
        TypeError, ValueError: samples that are not -1 or 1, none of them, or those of `fit_ising_moments`.

    Not for vectors or for values other than -1 and 1: binarise them first.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import fit_ising
        >>> generator = torch.Generator().manual_seed(0)
        >>> first = torch.where(torch.rand(2000, generator=generator) < 0.5, 1.0, -1.0)
        >>> second = torch.where(torch.rand(2000, generator=generator) < 0.8, first, -first)
        >>> bool(fit_ising(torch.stack([first, second], dim=-1)).couplings[0, 1] > 0.5)
        True
    """
    _validate.check_float_tensor("samples", samples, min_ndim=2)
    _validate.check_number("pseudocount", pseudocount, low=0.0)
    count = samples.shape[-2]
    _validate.require(count > 0, "samples", "hold at least one sample", f"shape {tuple(samples.shape)}")
    if host_may_look(samples):
        odd = samples[(samples.abs() != 1) & samples.isfinite()]
        remedy = "binarise them, for example torch.where(x > 0, 1.0, -1.0)"
        _validate.require(odd.numel() == 0, "samples", "be -1 or 1", float(odd[0]) if odd.numel() else "", remedy)
    samples = at_least_single(samples)
    keep = count / (count + pseudocount)
    mean = samples.mean(-2)
    centred = samples - mean[..., None, :]
    m = keep * mean
    if (bonds := _bonds(pairs, method, m)) is None:
        covariance = _with_diagonal(keep**2 * (centred.mT @ centred) / count, 1 - m.square())
    else:
        # As many pairs at a time as there are spins take no more memory than the samples.
        graphs = [Graph(ends, m.shape[-1], False) for ends in torch.split(bonds.graph.ends, m.shape[-1], -1)]
        covariance = keep**2 * torch.cat([graph.overlap(centred.mT) / count for graph in graphs], -1)
    return fit_ising_moments(m, covariance, method=method, shrinkage=shrinkage, pairs=pairs)


@in_own_precision
def fit_ising_moments(
    magnetization: Float[Tensor, "*batch N"],
    covariance: Float[Tensor, "*batch N N"] | Float[Tensor, "*batch E"],
    *,
    method: InverseMethod = "tap",
    shrinkage: float = 0.0,
    pairs: Int[Tensor, "*batch E 2"] | None = None,
) -> SpinSystem:
    """The Ising system, at beta = 1, that has these moments according to a mean-field theory.

    A theory says how fields follow from magnetizations, h(m), and by linear response dh_i/dm_j = (C^{-1})_ij. For
    K = C^{-1} and i != j, without a diagonal of J:

        "mean_field":    J_ij = -K_ij,                        h_i = atanh m_i - sum_j J_ij m_j
        "tap":           J_ij + 2 m_i m_j J_ij^2 = -K_ij,     h_i = ... + m_i sum_j J_ij^2 (1 - m_j^2)
        "adaptive_tap":  J_ij = -K_ij,                        h_i = ... + m_i (K_ii - 1/(1 - m_i^2))

    of the quadratic's roots the one that is -K_ij for weak couplings. For moments of couplings J the error of J_ij and
    h_i is of second order in J for "mean_field" and "adaptive_tap", of third for "tap". "adaptive_tap" is the inverse
    of adaptive TAP, which gives the very moments back.

    "bethe" is for couplings on the given pairs alone. With the probabilities of the four states of a pair,
    p_st = ((1 + s m_i) (1 + t m_j) + s t C_ij)/4 for s, t = + or -, and i in d_i pairs,

        "bethe":  J_ij = 1/4 log(p_++ p_--/(p_+- p_-+)),
                  h_i  = sum_j 1/4 log(p_++ p_+-/(p_-+ p_--)) - (d_i - 1) atanh m_i

    That is the maximum of the likelihood where the pairs form a tree. Elsewhere `Bethe` gives the very moments back, if
    they are those of its stable solution. Time and memory are linear in the pairs.

    Args:
        magnetization: m_i = <s_i>, |m_i| < 1, (*batch, N).
        covariance: C_ij = <s_i s_j> - m_i m_j, positive definite, (*batch, N, N); its diagonal is 1 - m_i^2. With
            "bethe" that of the pairs, (*batch, E).
        method: "mean_field", "tap", "adaptive_tap" or "bethe".
        shrinkage: in [0, 1], how much of every covariance with another spin is taken away.
        pairs: with "bethe", and only then, the sites i != j of each bond, each bond once, integers (E, 2) or
            (*batch, E, 2).

    Returns:
        A `SpinSystem` with couplings (*batch, N, N), or the `Bonds` of the pairs, field (*batch, N, 1), radius 1 and
        states counted.

    Raises:
        TypeError, ValueError: shapes that do not fit; |m_i| >= 1; a covariance that is not positive definite, or for
            "bethe" leaves a state of a pair no probability; pairs that `Bonds` refuses, or are given twice; with
            "tap", pairs so strongly coupled that the quadratic has no real root. Where the host cannot look, the
            sample is NaN instead; so is one with NaN in its moments.

    Gradients: with respect to both, to any order.

    Reference: Kappen and Rodriguez (1998); Tanaka (1998) for "tap"; Opper and Winther (2001) for "adaptive_tap";
    Nguyen et al. (2017) for "bethe".

    Not for samples: `fit_ising` estimates their moments with a pseudocount.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import fit_ising_moments
        >>> system = fit_ising_moments(torch.zeros(2), torch.tensor([[1.0, 0.3], [0.3, 1.0]]))
        >>> system.couplings.round(decimals=3)  # the exact ones are 0.31
        tensor([[0.0000, 0.3300],
                [0.3300, 0.0000]])
    """
    _validate.check_float_tensor("magnetization", magnetization, min_ndim=1)
    _validate.check_float_tensor("covariance", covariance, min_ndim=1)
    _validate.check_same_kind([("magnetization", magnetization), ("covariance", covariance)])
    _validate.check_choice("method", method, get_args(InverseMethod))
    _validate.check_number("shrinkage", shrinkage, low=0.0, high=1.0)
    bonds = _bonds(pairs, method, magnetization)
    *lead, sites = magnetization.shape
    shape, text = ((*lead, sites, sites), "N, N") if bonds is None else ((*lead, bonds.graph.num_bonds), "E")
    required = f"have shape (*batch, {text}) = {shape}"
    _validate.require(covariance.shape == shape, "covariance", required, tuple(covariance.shape))
    m, covariance = at_least_single(magnetization), at_least_single(covariance)
    remedy = "use a pseudocount, or leave out spins that never change"
    m = _checked("magnetization", m, m.abs() < 1, "have |m_i| < 1 everywhere", "a spin that never changes", remedy)
    if bonds is not None:
        return _of_pairs(bonds, m, (1 - shrinkage) * covariance)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    covariance = _with_diagonal((1 - shrinkage) * (covariance + covariance.mT) / 2, variance)
    precision = _inverse(covariance)
    if method == "tap":
        twice = 2 * m[..., :, None] * m[..., None, :]
        square = _with_diagonal(1 - 4 * twice * precision, torch.ones_like(m))
        remedy = "use a larger pseudocount or shrinkage, or method='adaptive_tap'"
        what, received = "have 8 m_i m_j (C^-1)_ij <= 1 for method='tap'", "a pair too strongly coupled for that"
        square = _checked("covariance", square, square >= 0, what, received, remedy)
        # The root that stays finite for m = 0, in a form without cancellation.
        couplings = -2 * precision / (1 + square.sqrt())
    else:
        couplings = -precision
    couplings = _with_diagonal(couplings, torch.zeros_like(m))
    field = torch.atanh(m) - (couplings @ m[..., None])[..., 0]
    if method == "tap":
        field = field + m * (couplings.square() @ (1 - m.square())[..., None])[..., 0]
    elif method == "adaptive_tap":
        field = field + m * (precision.diagonal(dim1=-2, dim2=-1) - 1 / (1 - m.square()))
    return SpinSystem(couplings, field[..., None], radius=1.0, measure="counting")


def _bonds(pairs: Any, method: str, m: Tensor) -> Bonds | None:
    """Bonds between spins with the magnetizations m, whose values are not known yet; None without pairs."""
    if pairs is None and method != "bethe":
        return None
    _validate.require(method == "bethe", "pairs", "be left out unless method='bethe'", f"pairs with method={method!r}")
    required, remedy = "be a tensor of integers (E, 2) for method='bethe'", "pass the two sites of every bond"
    _validate.check_instance("pairs", pairs, Tensor, required, remedy)
    bonds = Bonds(pairs, m.new_zeros(pairs.shape[-2:-1].numel()), m.shape[-1])
    _validate.check_broadcast("pairs", pairs.shape[:-2], m.shape[:-1], "the axes that number samples")
    once = bonds.graph.num_bonds == pairs.shape[-2] and not bonds.graph.loops
    _validate.require(once, "pairs", "join two sites, each pair once", "a pair given twice, or a site with itself")
    return bonds


def _of_pairs(bonds: Bonds, m: Tensor, covariance: Tensor) -> SpinSystem:
    """The system that has these moments by the Bethe approximation."""
    (here, there), alone = bonds.graph.at_ends(m).unbind(-2), torch.atanh(m)
    weights = [(1 + s * here) * (1 + t * there) + s * t * covariance for s in (1, -1) for t in (1, -1)]
    states, what = torch.stack(weights), "leave each state of a pair a probability > 0"
    remedy = "use a larger pseudocount or shrinkage, or check that the moments belong to the pairs"
    states = _checked("covariance", states, states > 0, what, "a state that never occurs", remedy)
    both, first, second, none = states.log() / 4
    bonds.values = both + none - first - second
    fields = torch.stack([both - none + first - second, both - none - first + second], -2)
    field = alone + bonds.graph.sums(fields - bonds.graph.at_ends(alone))
    return SpinSystem(bonds, field[..., None], radius=1.0, measure="counting")


def _inverse(covariance: Tensor) -> Tensor:
    """C^{-1}, symmetric; NaN where C is not positive definite."""
    inverse, _, positive = inverse_and_logdet(covariance)
    unknown = ~covariance.isfinite().all(-1).all(-1)
    remedy = "use a pseudocount or shrinkage, or leave out spins that never change"
    good = (positive | unknown)[..., None, None]
    _checked("covariance", covariance, good, "be positive definite", "an eigenvalue <= 0", remedy)
    return torch.where(positive[..., None, None], (inverse + inverse.mT) / 2, torch.nan)


def _checked(argument: str, value: Tensor, good: Tensor, requirement: str, received: str, remedy: str) -> Tensor:
    """Return `value`, NaN where it is not `good`; where the host can look, raise for a wrong number."""
    if host_may_look(value):
        _validate.require(not bool((~good & value.isfinite()).any()), argument, requirement, received, remedy)
    return torch.where(good, value, torch.nan)


def _with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    own = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return torch.where(own, diagonal[..., None], matrix)
