"""Images as patches that descend one energy together, which fills in the patches that are masked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from .. import _validate
from .._torch import at_least_single, host_may_look
from ..layers import EnergyTransformer
from ..layers.calls import Place, plain
from ..layers.reference_weights import IMAGE_ARRAYS, Layout, read_reference
from ..options import SolveKeywords


class PatchEmbedding(nn.Module):
    """Images as tokens: square patches through a linear encoder, a CLS token in front, learned positions added.

    Args:
        image_size: height and width of the images, or one number for both.
        patch_size: side of a patch, a divisor of both.
        channels: of the images.
        dim: width of a token.
        **place: device and dtype of the parameters.

    Attributes:
        count: number of patches, P.
        width: numbers in a patch, channels * patch_size^2.
        encoder, cls_token (dim,), positions (1 + P, dim): the parameters; tokens and positions from N(0, .002^2).

    Raises:
        TypeError, ValueError: sizes that do not fit.

    Examples:
        >>> import torch
        >>> from implicit_attention.models.image import PatchEmbedding
        >>> embedding = PatchEmbedding((4, 6), patch_size=2, channels=3, dim=8)
        >>> embedding(embedding.patches(torch.randn(5, 3, 4, 6))).shape
        torch.Size([5, 7, 8])

    Not for images of several sizes: positions are learned for one.
    """

    def __init__(
        self, image_size: int | tuple[int, int], patch_size: int, channels: int, dim: int, **place: Unpack[Place]
    ) -> None:
        super().__init__()
        height, width = image_size if isinstance(image_size, tuple | list) else (image_size, image_size)
        height, width = (_validate.check_integer("image_size", size, low=1) for size in (height, width))
        self.image_size: tuple[int, int] = (height, width)
        self.patch_size: int = _validate.check_integer("patch_size", patch_size, low=1)
        self.channels: int = _validate.check_integer("channels", channels, low=1)
        self.dim: int = _validate.check_integer("dim", dim, low=1)
        required, remedy = f"divide the image size {self.image_size}", "crop or pad the images, or choose a divisor"
        whole = all(size % patch_size == 0 for size in self.image_size)
        _validate.require(whole, "patch_size", required, self.patch_size, remedy)
        self.count = (height // patch_size) * (width // patch_size)
        self.width = channels * patch_size**2
        self.encoder = nn.Linear(self.width, dim, **place)
        self.cls_token = nn.Parameter(torch.empty(dim, **place))
        self.positions = nn.Parameter(torch.empty(1 + self.count, dim, **place))
        for token in (self.cls_token, self.positions):
            nn.init.normal_(token, std=0.002)

    def patches(self, images: Tensor) -> Tensor:
        """The patches of images row by row, (*batch, C, H, W) -> (*batch, P, C * patch_size^2)."""
        _validate.check_float_tensor("images", images, min_ndim=3)
        required = f"have shape (*batch, {self.channels}, {self.image_size[0]}, {self.image_size[1]})"
        fits = images.shape[-3:] == (self.channels, *self.image_size)
        _validate.require(fits, "images", required, f"shape {tuple(images.shape)}")
        side = self.patch_size
        return rearrange(images, "... c (row h) (column w) -> ... (row column) (c h w)", h=side, w=side)

    def images(self, patches: Tensor) -> Tensor:
        """The images of patches, (*batch, P, C * patch_size^2) -> (*batch, C, H, W)."""
        _validate.check_float_tensor("patches", patches, min_ndim=2)
        required = f"have shape (*batch, {self.count}, {self.width})"
        fits = patches.shape[-2:] == (self.count, self.width)
        _validate.require(fits, "patches", required, f"shape {tuple(patches.shape)}")
        rows, side = self.image_size[0] // self.patch_size, self.patch_size
        pattern = "... (row column) (c h w) -> ... c (row h) (column w)"
        return rearrange(patches, pattern, row=rows, h=side, w=side)

    def forward(self, patches: Tensor, masked: Tensor | None = None, mask_token: Tensor | None = None) -> Tensor:
        """The tokens (*batch, 1 + P, dim); those of masked patches are `mask_token` and its position."""
        if masked is not None:
            # 0 * NaN is NaN: a number in a masked patch must not reach the encoder's gradient either.
            patches = patches.masked_fill(masked[..., None], 0.0)
        tokens = self.encoder(patches)
        if masked is not None:
            assert mask_token is not None
            tokens = torch.where(masked[..., None], mask_token.to(tokens.dtype), tokens)
        front = self.cls_token.to(tokens.dtype).expand(*tokens.shape[:-2], 1, -1)
        return torch.cat([front, tokens], dim=-2) + self.positions

    def extra_repr(self) -> str:
        return f"{self.image_size}, patch_size={self.patch_size}, channels={self.channels}, dim={self.dim}"


class ImageEnergyTransformer(nn.Module):
    """Masked image modelling: the masked patches of images, predicted from the others by one energy.

    patches -> linear encoder -> MASK token where masked -> CLS token in front -> learned positions added
    -> `EnergyTransformer` -> its layer norm, the same module, once -> linear decoder -> patches.

    Args:
        image_size: height and width of the images, or one number for both.
        patch_size: side of a patch, a divisor of both.
        channels: of the images.
        dim: width of a token.
        heads: number of heads.
        head_dim: width of queries and keys.
        memories: number of stored patterns.
        **block: the other arguments of `EnergyTransformer`: mode, steps, step_size, solver, ...; `device` and `dtype`
            are those of all parameters.

    Attributes:
        embedding: the `PatchEmbedding`.
        mask_token (dim,): stands for every masked patch.
        block: the `EnergyTransformer`, with `block.last_solve` and `block.norm`.
        decoder: `nn.Linear`.

    Images are numbers of about unit size: subtract the mean of the data and divide by its standard deviation.

    Raises:
        TypeError, ValueError: sizes, shapes and dtypes that do not fit, such as images that patches do not divide.

    Gradients: with respect to images (visible pixels alone) and all parameters, to second order.

    Reference: Hoover et al. (2023), Energy Transformer. A public implementation of it normalises twice before the
    decoder.

    Examples:
        >>> import torch
        >>> from implicit_attention.models import ImageEnergyTransformer, scatter_mask
        >>> model = ImageEnergyTransformer(8, patch_size=2, channels=1, dim=12, heads=2, head_dim=6, memories=16)
        >>> images = torch.randn(3, 1, 8, 8)
        >>> masked, scored = scatter_mask(3, 16, replaced=7, kept=1)
        >>> model(images, masked).shape, model.loss(images, masked, scored).shape
        (torch.Size([3, 16, 4]), torch.Size([]))
        >>> model.reconstruct(images, masked).shape
        torch.Size([3, 1, 8, 8])

    Not for labels of images: use `ImageClassifier`, which may take over a trained model's parts.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int],
        patch_size: int,
        channels: int,
        dim: int,
        heads: int,
        head_dim: int,
        memories: int,
        **block: Any,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {name: block.get(name) for name in ("device", "dtype")}
        self.embedding = PatchEmbedding(image_size, patch_size, channels, dim, **place)
        self.mask_token = nn.Parameter(torch.empty(dim, **place))
        nn.init.normal_(self.mask_token, std=0.002)
        self.block = EnergyTransformer(dim, heads, head_dim, memories, **block)
        self.decoder = nn.Linear(dim, self.embedding.width, **place)

    def patches(self, images: Tensor) -> Tensor:
        """The patches of images row by row, (*batch, C, H, W) -> (*batch, P, C * patch_size^2)."""
        return self.embedding.patches(images)

    def images(self, patches: Tensor) -> Tensor:
        """The images of patches, (*batch, P, C * patch_size^2) -> (*batch, C, H, W)."""
        return self.embedding.images(patches)

    def forward(
        self,
        images: Tensor,
        masked: Tensor,
        *,
        return_energies: bool = False,
        return_solution: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """All patches as the model predicts them.

        Args:
            images: (*batch, C, H, W).
            masked: boolean, broadcasts to (*batch, P): True = the MASK token stands for the patch, whose pixels are not
                read.
            return_energies: return (patches, energies), see `EnergyTransformer`.
            return_solution: return the `Solution` of the tokens as well, last.
            **options: replace the block's for this call, see `SolveOptions`.

        Returns:
            Patches (*batch, P, C * patch_size^2), or a tuple with the requested parts.
        """
        patches = self.patches(images)
        tokens = self.embedding(patches, checked_patches("masked", masked, patches), self.mask_token)
        # A block in this one's place need not know evidence that nobody wants.
        flags = {"return_energies": return_energies, "return_solution": return_solution}
        wanted = {name: True for name, flag in flags.items() if flag}
        result = self.block(tokens, **wanted, **options)
        settled, *evidence = result if wanted else (result,)
        predicted = self.decoder(self.block.norm(settled)[..., 1:, :])
        return (predicted, *evidence) if evidence else predicted

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    def reconstruct(self, images: Tensor, masked: Tensor, **options: Unpack[SolveKeywords]) -> Tensor:
        """The images (*batch, C, H, W): visible patches as they are, masked ones as predicted."""
        predicted, patches = self(images, masked, **options), self.patches(images)
        return self.images(torch.where(checked_patches("masked", masked, patches)[..., None], predicted, patches))

    def loss(
        self, images: Tensor, masked: Tensor, scored: Tensor | None = None, **options: Unpack[SolveKeywords]
    ) -> Tensor:
        """The root of the mean squared error over the scored pixels of all images together, ().

        The published loss takes the mean over the pixels of all patches, with 0 as the error of those that are not
        scored: it is this one times sqrt(share of scored patches), so that its scale depends on the ratio that is
        masked, and its values at two ratios cannot be compared.

        Args:
            images: (*batch, C, H, W).
            masked: as in a call.
            scored: which patches count, boolean like `masked`; None is `masked`.
            **options: replace the block's for this call, see `SolveOptions`.

        Raises:
            ValueError: no patch is scored. On other devices than a CPU, where the host would wait, it is NaN instead.
        """
        patches = self.patches(images)
        scored = checked_patches("scored", masked if scored is None else scored, patches)
        if host_may_look(scored):
            _validate.require(bool(scored.any()), "scored", "hold at least one patch", "none", "mask some")
        predicted = at_least_single(self(images, masked, **options))
        wrong = (predicted - patches).masked_fill(~scored[..., None], 0.0)
        # The norm has a gradient, 0, where nothing is wrong; the root of a sum of squares has none.
        error: Tensor = torch.linalg.vector_norm(wrong) / (scored.sum().to(wrong) * self.embedding.width).sqrt()
        return error

    @classmethod
    def from_reference(
        cls,
        weights: Mapping[str, Any] | str | os.PathLike[str],
        layout: Layout | None = None,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        **block: Any,
    ) -> Self:
        """A model with the weights of a public implementation.

        Args:
            weights: arrays or tensors by name, or the path of a .npz (read without pickles) or .safetensors file: those
                of `EnergyTransformer.from_reference`, and Wenc (C * patch_size^2, D), Benc (D,), Wdec
                (D, C * patch_size^2), Bdec (C * patch_size^2,), CLS_token (D,), MASK_token (D,), POS_embed (1 + P, D).
                They multiply from the right, patches @ Wenc, and the numbers of a patch are ordered as (C, h, w).
            layout: of the block's arrays, see `EnergyTransformer.from_reference`.
            image_size: height and width of the images, or one number for both.
            patch_size: side of a patch. The channels follow from Wenc.
            **block: the other arguments of `EnergyTransformer`, device and dtype.

        Raises:
            TypeError, ValueError: as `EnergyTransformer.from_reference`; image arrays that are missing, or whose shapes
                contradict the sizes.
        """
        read = read_reference(weights, layout)
        missing = [name for name in IMAGE_ARRAYS if name not in read]
        remedy = "use EnergyTransformer.from_reference for a block alone"
        _validate.require(not missing, "weights", "hold an image model's arrays", f"no {', '.join(missing)}", remedy)
        heads, head_dim, dim = read["w_query"].shape
        side: int = _validate.check_integer("patch_size", patch_size, low=1)
        width = read["Wenc"].shape[0] if read["Wenc"].ndim else 0
        required = f"have C * patch_size^2 rows, with patch_size={side}"
        _validate.require(width > 0 and width % side**2 == 0, "Wenc", required, f"shape {tuple(read['Wenc'].shape)}")
        block.setdefault("dtype", read["w_query"].dtype)
        sizes = (dim, heads, head_dim, read["memories"].shape[0])
        model = cls(image_size, side, width // side**2, *sizes, **block)
        model.block = EnergyTransformer.from_reference(weights, layout, **block)
        embedding, decoder = model.embedding, model.decoder
        into = (embedding.encoder.weight.mT, embedding.encoder.bias, decoder.weight.mT, decoder.bias)
        tokens = (embedding.cls_token, model.mask_token, embedding.positions)
        with torch.no_grad():
            for name, parameter in zip(IMAGE_ARRAYS, (*into, *tokens), strict=True):
                array = read[name]
                if name in ("CLS_token", "MASK_token") and array.shape == (1, dim):
                    array = array[0]
                required, received = f"have shape {tuple(parameter.shape)}", f"shape {tuple(array.shape)}"
                remedy = f"the sizes are image_size={embedding.image_size}, patch_size={side}, D={dim}"
                _validate.require(array.shape == parameter.shape, name, required, received, remedy)
                parameter.copy_(array)
        return model


def checked_patches(name: str, chosen: Tensor, patches: Tensor) -> Tensor:
    """Which patches are chosen, boolean (*batch, P)."""
    _validate.check_boolean(name, chosen, "be a boolean tensor, (*batch, P)")
    _validate.check_same_kind([("images", patches), (name, chosen)])
    shape = tuple(patches.shape[:-1])
    _validate.check_broadcast(name, chosen.shape, shape, "(*batch, P)")
    return chosen.expand(shape)


def scatter_mask(
    batch: int,
    patches: int,
    replaced: int = 90,
    kept: int = 10,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The masked and the scored patches: as many in every image, at random places of its own.

    `replaced` patches are masked and scored; `kept` others are scored though the model sees them, so that it learns to
    keep visible patches. The defaults are the published numbers for 196 patches.

    Args:
        batch: number of images, >= 0.
        patches: number of patches of an image.
        replaced: number of patches that the MASK token stands for, >= 0.
        kept: number of patches that are scored as well, >= 0.
        generator: draws the places, on its device. None is torch's own generator of the CPU.

    Returns:
        masked, scored: boolean, (batch, patches).

    Raises:
        ValueError: more patches asked for than there are, or none.

    Examples:
        >>> import torch
        >>> from implicit_attention.models import scatter_mask
        >>> masked, scored = scatter_mask(4, 16, replaced=6, kept=2, generator=torch.Generator().manual_seed(0))
        >>> masked.sum(-1).tolist(), scored.sum(-1).tolist(), bool(scored[masked].all())
        ([6, 6, 6, 6], [8, 8, 8, 8], True)

    Not for masks with structure, such as one missing region: any boolean (batch, patches) serves the model.
    """
    for name, number in (("batch", batch), ("patches", patches), ("replaced", replaced), ("kept", kept)):
        _validate.check_integer(name, number, low=0)
    required = f"be 1 to {patches} together with `kept`, the patches of an image"
    _validate.require(0 < replaced + kept <= patches, "replaced", required, f"{replaced} + {kept}")
    device = "cpu" if generator is None else generator.device
    # Row by row a random order of the patches.
    order = torch.rand(batch, patches, generator=generator, device=device).argsort(-1)
    return order < replaced, order < replaced + kept
