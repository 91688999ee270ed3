"""Labels of images, read off the CLS token of an image model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import Unpack

from .. import _validate
from ..layers.calls import plain
from ..options import SolveKeywords
from .image import ImageEnergyTransformer


class ImageClassifier(nn.Module):
    """Logits of an image from its CLS token: patches -> tokens -> block -> layer norm -> Linear -> ReLU -> Linear.

    It shares the embedding and the block with `image_model`, without a copy: training one trains the other, so that a
    model that learned to fill in patches goes on to labels. `copy.deepcopy(image_model)` keeps them apart. The MASK
    token and the decoder are no part of it.

    Args:
        image_model: the `ImageEnergyTransformer`, trained or new.
        classes: number of labels.
        hidden: width between the two linear layers; None is that of a token.

    Attributes:
        embedding, block: those of the image model; the block has `last_solve`.
        head: the two linear layers.

    Raises:
        TypeError, ValueError: arguments and images that do not fit.

    Gradients: with respect to images and all parameters, to second order.

    Reference: Hoover et al. (2023), Energy Transformer, trained there with label smoothing .1.

    Examples:
        >>> import torch
        >>> from implicit_attention.models import ImageClassifier, ImageEnergyTransformer
        >>> model = ImageEnergyTransformer(8, patch_size=2, channels=1, dim=12, heads=2, head_dim=6, memories=16)
        >>> classifier = ImageClassifier(model, classes=10)
        >>> classifier(torch.randn(3, 1, 8, 8)).shape, classifier.block is model.block
        (torch.Size([3, 10]), True)

    Not for a label of every patch: read `block.norm` of the tokens that `block` returns.
    """

    def __init__(self, image_model: ImageEnergyTransformer, classes: int, hidden: int | None = None) -> None:
        super().__init__()
        _validate.check_instance("image_model", image_model, ImageEnergyTransformer, "be an ImageEnergyTransformer")
        _validate.check_integer("classes", classes, low=1)
        self.embedding, self.block = image_model.embedding, image_model.block
        dim, like = self.embedding.dim, self.embedding.encoder.weight
        hidden = dim if hidden is None else _validate.check_integer("hidden", hidden, low=1)
        place: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.head = nn.Sequential(nn.Linear(dim, hidden, **place), nn.ReLU(), nn.Linear(hidden, classes, **place))

    def forward(self, images: Tensor, *, return_solution: bool = False, **options: Unpack[SolveKeywords]) -> Any:
        """The logits of images.

        Args:
            images: (*batch, C, H, W).
            return_solution: return (logits, solution), with the `Solution` of the tokens.
            **options: replace the block's for this call, see `SolveOptions`.

        Returns:
            (*batch, classes).
        """
        tokens = self.embedding(self.embedding.patches(images))
        result = self.block(tokens, return_solution=return_solution, **options)
        settled, *evidence = result if return_solution else (result,)
        logits = self.head(self.block.norm(settled)[..., 0, :])
        return (logits, *evidence) if evidence else logits

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call
