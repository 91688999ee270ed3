"""The log-partition function of a mixture of Gaussians: softmax attention whose values move with the query."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import Self

from .. import _validate
from .._torch import LinearMap, host_may_look, sum_to_shape, transforms_active
from ._attention import common
from ._rays import Ray
from ._shapes import Keys, PerRow, States, Weights
from .base import CovarianceMap, Potential, check_fits
from .masked_keys import in_double


class GaussianMixture(Potential):
    r"""The cumulant generating function of a mixture of Gaussians.

    ```math
    G(\eta) = \log \sum_n \pi_n\, e^{\mu_n \cdot \eta + \frac12 \eta \cdot \Sigma_n \eta}
    ```

    mean(eta) = sum_n p_n c_n with c_n = mu_n + Sigma_n eta and the responsibilities
    p = softmax_n(log pi_n + mu_n.eta + eta.Sigma_n eta/2): attention of an exponential family, exact for every Sigma_n.
    covariance_product(eta, v) = sum_n p_n Sigma_n v + sum_n p_n c_n <c_n, v> - mean <mean, v>.
    With Sigma = 0 it is `LogSumExp` with keys mu, beta = 1 and bias log pi.

    Args:
        means: mu, (*batch, M, D).
        covariances: Sigma, broadcasts to (*batch, M, D, D): (D, D) is shared by all components and costs no more than
            softmax attention, (M, D, D) one for each, with (*batch, N, M, D) numbers in memory. Positive semi-definite,
            or G is not convex; of a matrix that is not symmetric the symmetric part counts.
        log_weights: log pi, broadcasts to (*batch, M); -inf leaves a component out. G(0) = log sum_n pi_n: subtract the
            logsumexp for a law.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit; a covariance with a negative eigenvalue (not
            looked for on an accelerator, inside torch.func or torch.compile).

    Not for components without spread: `LogSumExp` has fused operations, and masks.

    Gradients: with respect to eta, means, covariances and log_weights, to any order.

    Examples:
        >>> import torch
        >>> from implicit_attention.potentials import GaussianMixture
        >>> means, covariance = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.5 * torch.eye(2)
        >>> mixture = GaussianMixture(means, covariance, log_weights=torch.tensor([0.5, 0.5]).log())
        >>> mixture.responsibilities(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
        tensor([[0.5000, 0.5000],
                [0.8808, 0.1192]])
        >>> mixture.mean(torch.tensor([[2.0, 0.0]]))
        tensor([[1.8808, 0.1192]])
    """

    convex = True
    declares_all = True

    def __init__(
        self, means: Keys, covariances: Float[Tensor, "*#batch D D"], log_weights: Float[Tensor, "*#batch M"]
    ) -> None:
        _validate.check_float_tensor("means", means, min_ndim=2)
        required = "hold at least one component, shape (*batch, M, D)"
        _validate.require(0 not in means.shape[-2:], "means", required, f"shape {tuple(means.shape)}")
        _validate.check_float_tensor("covariances", covariances, min_ndim=2)
        _validate.check_float_tensor("log_weights", log_weights, min_ndim=1)
        _validate.check_same_kind([("means", means), ("covariances", covariances), ("log_weights", log_weights)])
        dim = means.shape[-1]
        required, received = f"be matrices of {dim} x {dim}", f"shape {tuple(covariances.shape)}"
        remedy = "use torch.diag_embed for variances"
        _validate.require(covariances.shape[-2:] == (dim, dim), "covariances", required, received, remedy)
        _validate.check_broadcast("covariances", covariances.shape, (*means.shape, dim), "(*batch, M, D, D)")
        _validate.check_broadcast("log_weights", log_weights.shape, means.shape[:-1], "(*batch, M)")
        _check_semidefinite(covariances)
        self.means = means
        self.covariances = covariances
        self.log_weights = log_weights

    def check_state(self, argument: str, z: Tensor) -> None:
        dim = self.means.shape[-1]
        check_fits(argument, z, dim, f"the means' dimension {dim}", "means", self.means)

    def value(self, z: States) -> PerRow:
        """G(eta), (*batch, N, D) -> (*batch, N)."""
        return self._scores(z, self._pushed(z)).logsumexp(-1)

    def mean(self, z: States) -> States:
        """sum_n p_n (mu_n + Sigma_n eta), (*batch, N, D) -> (*batch, N, D)."""
        pushed = self._pushed(z)
        return self._mixed(self._scores(z, pushed).softmax(-1), pushed)

    def covariance_product(self, z: States, v: States) -> States:
        """Hess G(eta) v, per row: within the components and between them."""
        return self._covariance(z)[-1](v)

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        pushed = self._pushed(z)
        scores = self._scores(z, pushed)
        return scores.logsumexp(-1), self._mixed(scores.softmax(-1), pushed)

    def responsibilities(self, z: States) -> Weights:
        """p_n, the probability of each component under the law tilted by eta, (*batch, N, M)."""
        return self._scores(z, self._pushed(z)).softmax(-1)

    def linearize(self, z: Tensor) -> CovarianceMap | None:
        if not self._has_only("means", "covariances", "log_weights"):
            return None
        own, pushed, p, product = self._covariance(z)

        def pullback(u: Tensor) -> tuple[Tensor | None, ...]:
            changes = own._changes(p, pushed, u)
            by_means = p.mT @ u + changes.mT @ z
            # Per component, or summed over them where the matrix is shared: (*batch, N, M or 1, D).
            one = pushed.shape[-2] == 1
            weight, change = (x.sum(-1, keepdim=True) if one else x for x in (p, changes))
            left = weight[..., None] * u[..., None, :] + change[..., None] * z[..., None, :] / 2
            by_matrices = left.movedim(-3, -1) @ z[..., None, :, :]
            return (
                sum_to_shape(by_means, self.means.shape),
                sum_to_shape((by_matrices + by_matrices.mT) / 2, self.covariances.shape),
                sum_to_shape(changes.sum(-2), self.log_weights.shape),
            )

        return CovarianceMap(product, pullback)

    def select(self, index: Tensor) -> Self | None:
        return self if self._has_only("means", "covariances", "log_weights") else None

    def _covariance(self, z: Tensor) -> tuple[Self, Tensor, Tensor, LinearMap]:
        """The same mixture around other means, Sigma_n eta, the responsibilities, and the product with the covariance.

        Responsibilities and their changes do not change with a shift of all means, but their rounding errors do.
        """
        own = self.replace(self.means - common(self.means), *self.tensors()[1:])
        pushed = self._pushed(z)
        p = own._scores(z, pushed).softmax(-1)
        return own, pushed, p, lambda v: _average(p, self._pushed(v)) + own._mixed(own._changes(p, pushed, v), pushed)

    def _pushed(self, z: Tensor) -> Tensor:
        """Sigma_n eta, (*batch, N, M, D), with an axis of 1 for M where Sigma is shared."""
        symmetric = (self.covariances + self.covariances.mT) / 2
        if symmetric.ndim == 2:
            return (z @ symmetric)[..., None, :]
        return (z[..., None, :, :] @ symmetric).movedim(-3, -2)

    def _scores(self, z: Tensor, pushed: Tensor) -> Tensor:
        """Log pi_n + mu_n.eta + eta.Sigma_n eta/2, (*batch, N, M)."""
        return z @ self.means.mT + (pushed * z[..., None, :]).sum(-1) / 2 + self.log_weights[..., None, :]

    def _mixed(self, weights: Tensor, pushed: Tensor) -> Tensor:
        """sum_n weights_n (mu_n + Sigma_n eta), (*batch, N, D)."""
        return weights @ self.means + _average(weights, pushed)

    def _changes(self, p: Tensor, pushed: Tensor, v: Tensor) -> Tensor:
        """Return the change of the responsibilities when eta moves by v, p_n <c_n - mean, v>, (*batch, N, M)."""
        along = v @ self.means.mT + (pushed * v[..., None, :]).sum(-1)
        return p * (along - (p * along).sum(-1, keepdim=True))

    def bounded_below(self, scale: float) -> bool:
        """Whether scale lambda_max(Sigma_n) < 1 for every component: G grows like the widest one."""
        return bool((scale * _eigenvalues(self.covariances)[..., -1] < 1).all())

    def falling_ray(self, scale: float | Tensor = math.inf) -> Ray:
        """The widest axis of the widest component, from scale 1/lambda_max on."""
        matrices = in_double(self.covariances)
        # A matrix that is not finite counts as one of zeros, along which nothing falls.
        known = matrices.isfinite().all(-1).all(-1)[..., None, None]
        widths, axes = torch.linalg.eigh(((matrices + matrices.mT) / 2).where(known, 0.0))
        # A component of weight 0 does not count.
        widths = widths[..., -1].where(in_double(self.log_weights) > -torch.inf, 0.0)
        largest, widest = widths.max(-1)
        axes = axes[..., -1].expand(*widths.shape, -1)
        direction = axes.gather(-2, widest[..., None, None].expand(*widest.shape, 1, axes.shape[-1])).squeeze(-2)
        return Ray(direction, 1 / largest)


def _average(weights: Tensor, pushed: Tensor) -> Tensor:
    """Return sum_n weights_n y_n for weights (*batch, N, M) and y (*batch, N, M or 1, D)."""
    if pushed.shape[-2] == 1:
        return weights.sum(-1, keepdim=True) * pushed.squeeze(-2)
    return (weights[..., None, :] @ pushed).squeeze(-2)


def _eigenvalues(covariances: Tensor) -> Tensor:
    """Return the eigenvalues in ascending order, without graph; NaN for a matrix that is not finite (LAPACK raises)."""
    matrices = covariances.detach().double()
    finite = matrices.isfinite().all(-1).all(-1)[..., None]
    eigenvalues: Tensor = torch.linalg.eigvalsh(((matrices + matrices.mT) / 2).where(finite[..., None], 0.0))
    return eigenvalues.where(finite, torch.nan)


def _check_semidefinite(covariances: Tensor) -> None:
    if transforms_active() or not host_may_look(covariances):
        return
    eigenvalues = _eigenvalues(covariances)
    rounding = covariances.shape[-1] * torch.finfo(covariances.dtype).eps * eigenvalues.abs().amax(-1)
    bad = eigenvalues[..., 0] < -rounding
    if bool(bad.any()):
        received = f"the eigenvalue {eigenvalues[..., 0][bad].flatten()[0].item():.6g}"
        remedy = "parametrise them, for example as A A^T"
        raise ValueError(_validate.message("covariances", "be positive semi-definite", received, remedy))
