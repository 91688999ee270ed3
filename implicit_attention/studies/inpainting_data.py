"""Images to fill in, which patches of them are hidden, and the answers of two methods that learn nothing."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, Literal

import torch
from torch import Tensor

from ..models.image import scatter_mask

#: So many of the 1797 digits are trained on.
TRAINED_DIGITS = 1400
#: Crops to train on come from this left part of a photograph's columns; the rest is held out.
TRAINED_COLUMNS = 2 / 3
#: Pixels along a side of a crop and of its patches, and the same of digits.
CROP, CROP_PATCH = 32, 4
DIGIT, DIGIT_PATCH = 8, 2


@dataclasses.dataclass(frozen=True)
class ImageTask:
    """Square images to train on and held-out ones, with pixels in [0, 1].

    Attributes:
        name: "digits" or "photos".
        regions: to train on, (count, channels, height, width); images are drawn from all places of them.
        held_out: (count, channels, side, side), none of whose pixels is in `regions`.
        patch: pixels along a side of a patch.
        source: what identifies the data in the results.
    """

    name: Literal["digits", "photos"]
    regions: Tensor
    held_out: Tensor
    patch: int
    source: dict[str, Any]

    @property
    def side(self) -> int:
        return self.held_out.shape[-1]

    @property
    def patches(self) -> int:
        """Return the number of patches of an image."""
        return (self.side // self.patch) ** 2

    @property
    def epoch(self) -> int:
        """Return the number of images with as many pixels as all regions have."""
        count, _, height, width = self.regions.shape
        return count * height * width // self.side**2

    @property
    def mean(self) -> float:
        """Return the mean of all pixels to train on."""
        return float(self.regions.mean())

    @functools.cached_property
    def scale(self) -> float:
        """Return the standard deviation of pixels of images to train on around the mean of their own image."""
        images = self.draw(1000, torch.Generator().manual_seed(0))
        return float((images - images.mean((-1, -2), keepdim=True)).square().mean().sqrt())

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw images to train on, (count, channels, side, side), at random places of random regions."""
        number, _, height, width = self.regions.shape
        which = torch.randint(number, (count,), generator=generator)
        top = torch.randint(height - self.side + 1, (count, 1, 1), generator=generator)
        left = torch.randint(width - self.side + 1, (count, 1, 1), generator=generator)
        rows, columns = top + torch.arange(self.side)[:, None], left + torch.arange(self.side)
        # Advanced indices around a slice put the channels last.
        return self.regions[which[:, None, None], :, rows, columns].permute(0, 3, 1, 2).contiguous()


def load(name: Literal["digits", "photos"]) -> ImageTask:
    """Load scikit-learn's 1797 digits, or its two photographs: both are files of its package, nothing is downloaded."""
    return _digits() if name == "digits" else _photos()


def _digits() -> ImageTask:
    from sklearn.datasets import load_digits

    raw = load_digits().images
    images = torch.from_numpy(raw / 16).float()[:, None]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = images[order].tensor_split([TRAINED_DIGITS])
    source = {
        "source": "sklearn.datasets.load_digits",
        "sha256": hashlib.sha256(raw.tobytes()).hexdigest(),
        "split": f"{len(train)} images drawn at random are trained on, the other {len(held_out)} are held out",
    }
    return ImageTask("digits", train, held_out, DIGIT_PATCH, source)


def _photos() -> ImageTask:
    from sklearn.datasets import load_sample_images

    raw = load_sample_images().images
    photos = torch.stack([torch.from_numpy(photo / 255).float().permute(2, 0, 1) for photo in raw])
    train, rest = photos.tensor_split([round(TRAINED_COLUMNS * photos.shape[-1])], dim=-1)
    # Neighbouring crops that do not overlap; a rest at the right and lower edges is not used.
    crops = rest.unfold(2, CROP, CROP).unfold(3, CROP, CROP).permute(0, 2, 3, 1, 4, 5).flatten(0, 2).contiguous()
    source = {
        "source": "sklearn.datasets.load_sample_images",
        "sha256": hashlib.sha256(b"".join(photo.tobytes() for photo in raw)).hexdigest(),
        "split": f"crops to train on come from the left {train.shape[-1]} columns of both photographs, "
        f"the {len(crops)} held-out ones from the right {rest.shape[-1]}",
    }
    return ImageTask("photos", train.contiguous(), crops, CROP_PATCH, source)


def scattered(count: int, patches: int, generator: torch.Generator) -> Tensor:
    """Hide half of the patches of every image at random, (count, patches) bool."""
    return scatter_mask(count, patches, replaced=patches // 2, kept=0, generator=generator)[0]


def hidden_pixels(masked: Tensor, side: int, patch: int) -> Tensor:
    """Return the pixels (count, 1, side, side) bool of hidden patches (count, patches), which go row by row."""
    per_side = side // patch
    grid = masked.view(-1, 1, per_side, per_side)
    return grid.repeat_interleave(patch, dim=-2).repeat_interleave(patch, dim=-1)


def visible_mean(images: Tensor, hidden: Tensor) -> Tensor:
    """Replace each hidden pixel by the mean of the visible ones of its image and channel."""
    means = images.masked_fill(hidden, 0.0).sum((-1, -2), keepdim=True) / (~hidden).sum((-1, -2), keepdim=True)
    return images.where(~hidden, means)


def harmonic(images: Tensor, hidden: Tensor) -> Tensor:
    """Fill in hidden pixels such that each is the mean of its neighbours: Laplace's equation.

    Visible pixels are its boundary; at an edge of the image there is one neighbour less. Every image needs a visible
    pixel. Computed in float64.

    Args:
        images: (count, channels, height, width).
        hidden: (count, 1, height, width) bool.
    """
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import splu

    count, channels, height, width = images.shape
    unknown = hidden.flatten().nonzero().flatten().numpy()
    if len(unknown) == 0:
        return images.clone()
    number = np.full(count * height * width, -1)
    number[unknown] = np.arange(len(unknown))
    # One row per pixel of the batch.
    values = images.double().permute(0, 2, 3, 1).reshape(-1, channels).numpy()
    row, column = unknown // width % height, unknown % width
    degree, known = np.zeros(len(unknown)), np.zeros((len(unknown), channels))
    pairs: list[tuple[Any, Any]] = []
    for inside, step in ((row > 0, -width), (row < height - 1, width), (column > 0, -1), (column < width - 1, 1)):
        pixel = inside.nonzero()[0]
        neighbour = unknown[pixel] + step
        degree[pixel] += 1
        free = number[neighbour] >= 0
        known[pixel[~free]] += values[neighbour[~free]]
        pairs.append((pixel[free], number[neighbour[free]]))
    diagonal = np.arange(len(unknown))
    rows, columns = (np.concatenate([*side, diagonal]) for side in zip(*pairs, strict=True))
    entries = np.concatenate([np.full(len(rows) - len(unknown), -1.0), degree])
    matrix = coo_array((entries, (rows, columns)), shape=(len(unknown), len(unknown))).tocsc()
    values = values.copy()
    values[unknown] = splu(matrix).solve(known)
    filled = torch.from_numpy(values).view(count, height, width, channels).permute(0, 3, 1, 2)
    return filled.to(images.dtype).contiguous()


def rmse(images: Tensor, answers: Tensor, hidden: Tensor) -> float:
    """Return the root mean square difference over the hidden pixels of all channels."""
    square = (answers - images).double().square().masked_select(hidden.expand_as(images))
    return float(square.mean().sqrt())
