"""Small image models, images and patches by slices, for the tests beside."""

import torch

from implicit_attention import Picard
from implicit_attention.models import ImageEnergyTransformer

MODES = ["equilibrium", "published"]


def model(size=(4, 6), patch=2, channels=3, *, dim=5, dtype=torch.float64, seed=0, scale=None, **block):
    torch.manual_seed(seed)
    if block.get("mode") != "published":
        tolerance = 1e-11 if dtype == torch.float64 else 1e-4
        block.setdefault("solver", Picard(rtol=tolerance, atol=tolerance, max_steps=4000))
    made = ImageEnergyTransformer(size, patch, channels, dim, 2, 3, 7, dtype=dtype, **block)
    if scale is not None:
        with torch.no_grad():
            for parameter in (made.block.w_query, made.block.w_key, made.block.memories):
                parameter.normal_(std=scale)
            # Tokens of the usual .002 are amplified a hundredfold by the layer norm: equilibria take long to find.
            for parameter in (made.mask_token, made.embedding.cls_token):
                parameter.normal_()
    return made


def images(*batch, size=(4, 6), channels=3, dtype=torch.float64, seed=1):
    return torch.randn(*batch, channels, *size, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def cut(pictures, side):
    """The patches by slices, row by row."""
    height, width = pictures.shape[-2:]
    corners = [(i, j) for i in range(0, height, side) for j in range(0, width, side)]
    return torch.stack([pictures[..., i : i + side, j : j + side].flatten(-3) for i, j in corners], -2)
