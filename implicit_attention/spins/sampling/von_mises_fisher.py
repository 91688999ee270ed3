"""One spin drawn from its law in a field: the von Mises-Fisher law in any dimension, exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ... import _validate
from ..._torch import at_least_single, exact_precision
from ...potentials._cosine import one_minus_cosine


class Noise(NamedTuple):
    """The random numbers of one draw per spin, which do not depend on the field.

    level: (..., C); for D = 1 half a logistic variable, else uniform in (0, 1).
    tangent: (..., D - 1, C), unit vectors, uniformly distributed; None for D = 1.
    """

    level: Tensor
    tangent: Tensor | None

    def site(self, i: int) -> Noise:
        """The numbers of site i, where (..., C) is (B, N, C)."""
        return Noise(self.level[:, i], None if self.tangent is None else self.tangent[:, i])


@torch.no_grad()
def sample_spins(
    field: Float[Tensor, "*batch N D"],
    beta: float | Float[Tensor, "*#batch"],
    radius: float,
    generator: torch.Generator,
) -> Float[Tensor, "*batch N D"]:
    """Independent spins of length R with the law exp(beta f.s) against the uniform measure, one for every field.

    The cosine with the field is drawn by inversion for D = 3 and by rejection for D = 2 and D > 3, the direction across
    the field uniformly; D = 1 is R with probability sigmoid(2 beta R f), else -R. Exact to rounding for every
    kappa = beta R |f|: small numbers, such as 1 - cosine ~ 1/kappa, are never differences of large ones.

    Args:
        field: f, (*batch, N, D).
        beta: > 0, a float or a tensor that broadcasts to *batch.
        radius: R > 0.
        generator: where randomness comes from, on the field's device. The same state gives the same spins.

    Returns:
        (*batch, N, D); NaN where kappa has no finite square. Half precision is drawn in float32, and returned in half.

    Raises:
        TypeError, ValueError: arguments of wrong types, shapes or ranges.

    Gradients: none.

    Reference: Wood (1994), Simulation of the von Mises-Fisher distribution, for the rejection; Ulrich (1984), Computer
    generation of distributions on the m-sphere, for symmetric beta variables.

    Not for spins that are coupled: use `heat_bath`.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import sample_spins
        >>> field, generator = torch.ones(5, 4, 3), torch.Generator().manual_seed(0)
        >>> spins = sample_spins(field, beta=2.0, radius=1.5, generator=generator)
        >>> torch.allclose(spins.norm(dim=-1), torch.tensor(1.5))
        True
    """
    _validate.check_float_tensor("field", field, min_ndim=2)
    _validate.require(field.shape[-1] > 0, "field", "have at least one dimension", f"shape {tuple(field.shape)}")
    _validate.check_number("radius", radius, low=0.0, open_low=True)
    check_generator(generator, field)
    scale = _validate.check_per_batch("beta", beta, low=0.0, open_low=True)
    _validate.check_fits_batch("beta", beta, "field", field)
    if isinstance(scale, Tensor):
        scale = _validate.inside(scale, low=0.0, open_low=True)[..., None, None]
    with exact_precision(field):
        pull = (radius * scale * at_least_single(field))[..., None]
        spins = radius * unit_spins(pull, draw_noise(pull, generator), generator)[..., 0]
        known = torch.isfinite(pull.square().sum(-2))
        return spins.masked_fill(~known, torch.nan).to(field.dtype)


def check_generator(generator: torch.Generator, like: Tensor) -> None:
    """Raise unless `generator` is a torch.Generator on the device of `like`."""
    remedy = f'pass torch.Generator("{like.device}").manual_seed(0)'
    _validate.check_instance("generator", generator, torch.Generator, "be a torch.Generator", remedy)
    same = generator.device.type == like.device.type and generator.device.index in (None, like.device.index)
    _validate.require(same, "generator", f"be on the device of the field ({like.device})", generator.device, remedy)


def draw_noise(like: Tensor, generator: torch.Generator) -> Noise:
    """Noise for pulls (..., D, C), of their dtype."""
    *lead, dim, chains = like.shape
    level = like.new_empty(*lead, chains).uniform_(generator=generator)
    # Numbers from [0, 1) come in steps of eps/2, 0 included, which as a logistic variable is infinite.
    step = torch.finfo(like.dtype).eps / 2
    if dim == 1:
        return Noise(level.logit_(eps=step).div_(2), None)
    tangent = like.new_empty(*lead, dim - 1, chains).normal_(generator=generator)
    length = _length(tangent)
    # Pairs of normal numbers that are both zero do happen in single precision.
    nothing = length == 0
    tangent[..., 0, :].masked_fill_(nothing, 1.0)
    return Noise(level.clamp_(min=step), tangent.div_(length.masked_fill_(nothing, 1.0).unsqueeze(-2)))


def unit_spins(pull: Tensor, noise: Noise, generator: torch.Generator) -> Tensor:
    """Unit vectors with the law exp(x.s) for pulls x, (..., D, C)."""
    dim = pull.shape[-2]
    if noise.tangent is None:
        return torch.where(pull > noise.level.unsqueeze(-2), 1.0, -1.0).to(pull.dtype)
    kappa = _length(pull)
    # Below this the law is uniform to rounding, and pull/kappa would not be a unit vector.
    directed = kappa > torch.finfo(pull.dtype).tiny ** 0.5
    axis = pull / kappa.masked_fill(~directed, 1.0).unsqueeze(-2)
    below = one_minus_cosine(kappa, dim, generator, noise.level)
    local = torch.cat([(1 - below).unsqueeze(-2), (below * (2 - below)).sqrt().unsqueeze(-2) * noise.tangent], dim=-2)
    return torch.where(directed.unsqueeze(-2), _turned(local, axis), local)


def _length(vectors: Tensor) -> Tensor:
    # Many times as fast as torch.linalg.vector_norm along this axis.
    return vectors.square().sum(-2).sqrt()


def _turned(local: Tensor, axis: Tensor) -> Tensor:
    """The reflection that carries the first unit vector to `axis`, applied to `local`.

    v = e_1 + sign(a_1) a is long whatever the axis a, and -sign(a_1) (1 - 2 v v^T/|v|^2) carries e_1 to a.
    """
    first = axis[..., :1, :]
    sign = torch.where(first < 0, -1.0, 1.0).to(axis.dtype)
    along = (local[..., :1, :] + sign * (axis * local).sum(-2, keepdim=True)) / (1 + first.abs())
    turned = along * axis - sign * local
    turned[..., :1, :] += sign * along
    return turned
