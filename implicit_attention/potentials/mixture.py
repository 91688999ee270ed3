"""Attention as a mixture: the law behind a potential as a distribution of torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, MultivariateNormal, Normal

from .. import _validate
from .._torch import host_may_look, transforms_active
from ._read import joined
from ._shapes import States
from .base import Potential
from .gaussian_mixture import GaussianMixture
from .log_sum_exp import LogSumExp, as_log_sum_exp


def as_distribution(potential: Potential, tilt: States | None = None) -> MixtureSameFamily:
    """The law p(v) whose posterior mean is attention, as a mixture that torch samples and evaluates.

    `LogSumExp`: p(v) = exp(<tilt, v> - beta (|v|^2/2 - Phi(v)))/Z, with the components N(k_j + tilt/beta, I/beta) and
    the logits beta |k_j|^2/2 + bias_j + <k_j, tilt>. Without tilt, -grad E(v) = grad log p(v)/beta = mean(v) - v for
    E(v) = |v|^2/2 - Phi(v): mean(v) is the average of the component means under their posterior at v.
    `GaussianMixture`: p(v) = exp(<tilt, v> - G(tilt)) sum_n pi_n N(v; mu_n, Sigma_n), with the components
    N(mu_n + Sigma_n tilt, Sigma_n) and the logits log pi_n + <mu_n, tilt> + <tilt, Sigma_n tilt>/2; its mean is
    `potential.mean(tilt)`.

    Args:
        potential: a `LogSumExp`, a `DistanceLogSumExp` (whose keys have one weight), a `Softmax1` (with one more
            component at 0) or a `GaussianMixture`, of these very classes: subclasses may compute otherwise.
        tilt: natural parameter that is added, (*batch, N, D), in units of 1/v. None is 0.

    Returns:
        One law of v (D,) per batch entry, batch shape (*batch); per row, (*batch, N), where there is a tilt, a mask or
        a bias. A row that attends to no key has Phi = 0 and the law N(tilt/beta, I/beta).

    Raises:
        TypeError: another potential.
        ValueError: a tilt that does not fit; a covariance of a component that is not positive definite, which has no
            density (not looked for on an accelerator, where torch reports it).

    Gradients: `log_prob`, `mean` and `variance` with respect to every tensor of the potential, the tilt and v, to any
    order, as torch has them. Samples of a mixture have none.

    Reference: Ramsauer et al. (2020); Shim (2022), section 3, for the tilt.

    Not for attention weights: use `LogSumExp.probabilities`, which needs no density.

    Examples:
        The weights of the components grow with the squared norms of the keys, the faster the larger beta:

        >>> import torch
        >>> from implicit_attention import LogSumExp
        >>> from implicit_attention.potentials import as_distribution
        >>> keys = torch.diag(torch.tensor([1.0, 1.5, 2.0]))
        >>> for beta in (0.1, 1.0, 4.0):
        ...     print(beta, as_distribution(LogSumExp(keys, beta)).mixture_distribution.probs)
        0.1 tensor([0.3099, 0.3299, 0.3601])
        1.0 tensor([0.1361, 0.2542, 0.6098])
        4.0 tensor([0.0024, 0.0292, 0.9684])
        >>> law = as_distribution(LogSumExp(keys, 1.0))
        >>> law.sample((5,)).shape, law.log_prob(torch.zeros(7, 3)).shape
        (torch.Size([5, 3]), torch.Size([7]))
    """
    attention = as_log_sum_exp(potential)
    if attention is None and type(potential) is not GaussianMixture:
        remedy = "write attention with other scores as LogSumExp with a bias"
        received = type(potential).__name__
        raise TypeError(_validate.message("potential", "be a LogSumExp or a GaussianMixture", received, remedy))
    if tilt is not None:
        potential.check_state("tilt", tilt)
    if attention is not None:
        return _of_keys(attention, tilt)
    assert isinstance(potential, GaussianMixture)
    return _of_gaussians(potential, tilt)


def _of_keys(potential: LogSumExp, tilt: Tensor | None) -> MixtureSameFamily:
    if potential.query_offset is not None:
        required = "be given for a potential with `query_offset`, whose queries differ in the keys that they read"
        _validate.require(tilt is not None, "tilt", required, "None", "use LogSumExp(keys, beta, mask=mask)")
        potential = potential.masked_for(tilt.shape[-2])  # type: ignore[union-attr]
    keys, (pairs, attended) = potential.keys, joined(potential.mask, potential.bias)
    by_row = tilt is not None or pairs is not None
    beta = torch.as_tensor(potential._scale if by_row else potential._row_scale, dtype=keys.dtype, device=keys.device)
    means = keys[..., None, :, :] if by_row else keys
    if attended is not None:
        # A masked key, also one of NaN, reaches no row that does not attend to it.
        means = torch.where(attended[..., None], means, 0.0)
    logits = beta * means.square().sum(-1) / 2
    if tilt is not None:
        logits = logits + (means * tilt[..., None, :]).sum(-1)
        means = means + (tilt / beta)[..., None, :]
    if pairs is not None and attended is not None:
        logits = logits.masked_fill(~pairs, -torch.inf) if pairs.dtype == torch.bool else logits + pairs
        # All components of a row without keys are the same.
        logits = torch.where(attended.any(-1, keepdim=True), logits, 0.0)
    batch = torch.broadcast_shapes(logits.shape, means.shape[:-1])  # type: ignore[no-untyped-call]
    means = means.expand(*batch, keys.shape[-1])
    width = beta.rsqrt()[..., None].expand_as(means)
    return MixtureSameFamily(Categorical(logits=logits.expand(batch)), Independent(Normal(means, width), 1))


def _of_gaussians(potential: GaussianMixture, tilt: Tensor | None) -> MixtureSameFamily:
    covariances = (potential.covariances + potential.covariances.mT) / 2
    factors, failed = torch.linalg.cholesky_ex(covariances)
    looks = not transforms_active() and host_may_look(covariances)
    if looks and bool((failed.bool() & covariances.isfinite().all(-1).all(-1)).any()):
        required, received = "be positive definite for a law with a density", "one that is not"
        remedy = "add a small multiple of the identity"
        raise ValueError(_validate.message("covariances", required, received, remedy))
    means, logits = potential.means, potential.log_weights
    if tilt is not None:
        pushed = potential._pushed(tilt)
        means, logits = means[..., None, :, :] + pushed, potential._scores(tilt, pushed)
        factors = factors if factors.ndim == 2 else factors[..., None, :, :, :]
    batch = means.shape[:-1]
    law = MultivariateNormal(means, scale_tril=factors.expand(*batch, *factors.shape[-2:]))
    return MixtureSameFamily(Categorical(logits=logits.expand(batch)), law)
