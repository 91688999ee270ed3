"""The nearness of W_q^T W_k, in a layer trained on digits, to the inverse covariance of its tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..linear import _matrices
from .data import load_digits
from .token_moments import summary

DIM, HEADS, BATCH, RATE = 16, 2, 64, 3e-3
TRAINED, INITIAL, ROTATED, IDENTITY = "trained", "before training", "rotated at random", "identity matrix"
COMPARED = (TRAINED, INITIAL, ROTATED, IDENTITY)
TRAIN = 1397
#: The measures of how near score matrices are to the inverse covariance.
NEARNESS = ("alignment", "distance", "whitened_alignment")


class DigitsClassifier(nn.Module):
    """Patches (B, 16, 4) are embedded, attend to each other once with a residual connection, and vote.

    Each head has queries and keys of all DIM dimensions, so that W_q^T W_k can have full rank. There is no layer norm,
    after which the tokens' covariance would have no inverse.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, DIM)
        self.positions = nn.Parameter(torch.randn(16, DIM))
        self.query, self.key, self.value = (nn.Linear(DIM, HEADS * DIM, bias=False) for _ in range(3))
        self.out, self.classes = nn.Linear(HEADS * DIM, DIM), nn.Linear(DIM, 10)

    def tokens(self, patches: Tensor) -> Tensor:
        """Return the input of attention, (B, 16, DIM)."""
        embedded: Tensor = self.embedding(patches)
        return embedded + self.positions

    def forward(self, patches: Tensor) -> Tensor:
        x = self.tokens(patches)
        heads = (project(x).unflatten(-1, (HEADS, DIM)) for project in (self.query, self.key, self.value))
        q, k, v = (head.transpose(-2, -3) for head in heads)
        read = nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        scores: Tensor = self.classes((x + self.out(read)).relu().mean(-2))
        return scores

    def score_matrices(self) -> Tensor:
        """Return W_q^T W_k / sqrt(DIM) of every head, (HEADS, DIM, DIM); h^T (this) g is the score of tokens h, g."""
        q, k = (layer.weight.detach().double().view(HEADS, DIM, DIM) for layer in (self.query, self.key))
        scores: Tensor = q.mT @ k / DIM**0.5
        return scores


def alignment(matrix: Tensor, other: Tensor) -> Tensor:
    """Return the cosine <A, B>/(|A| |B|) of matrices; the distance after the best factor is sqrt(1 - cosine^2)."""
    product: Tensor = (matrix * other).sum((-1, -2))
    cosine: Tensor = product / (torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(other))
    return cosine


def measure(matrices: Tensor, covariance: Tensor) -> dict[str, float]:
    """Return the distance of matrices (heads, D, D) to the inverse covariance, averaged over heads.

    In the tokens' own coordinates the directions of least variance decide; whitened, where the inverse covariance is
    the identity, all count the same.
    """
    cosine = alignment(matrices, _matrices.inverse(covariance))
    eigenvalues, basis = torch.linalg.eigh(covariance)
    root = basis @ torch.diag(eigenvalues.sqrt()) @ basis.mT
    whitened = alignment(root @ matrices @ root, torch.eye(len(covariance), dtype=covariance.dtype))
    return {
        "alignment": float(cosine.mean()),
        "distance": float((1 - cosine.square()).clamp(min=0).sqrt().mean()),
        "whitened_alignment": float(whitened.mean()),
    }


def rotated(matrices: Tensor, generator: torch.Generator) -> Tensor:
    """Multiply matrices by random orthogonal ones from both sides, which keep singular values and norms."""
    noise = torch.randn(2, *matrices.shape, generator=generator, dtype=matrices.dtype)
    left, right = torch.linalg.qr(noise).Q
    turned: Tensor = left @ matrices @ right
    return turned


def train(seed: int, *, steps: int) -> list[dict[str, Any]]:
    """Train one classifier, and return a row for its score matrices and for each of the controls."""
    from sklearn import datasets

    images = load_digits().float()
    labels = torch.from_numpy(datasets.load_digits().target)
    patches = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    learned, held_out = order[:TRAIN], order[TRAIN:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitsClassifier()
    initial, initial_covariance = model.score_matrices(), _covariance(model, patches[learned])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    for _ in range(steps):
        index = learned[torch.randint(len(learned), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(patches[index]), labels[index])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(patches[held_out]).argmax(-1) == labels[held_out]).double().mean())
    covariance, final = _covariance(model, patches[learned]), model.score_matrices()
    compared = {
        TRAINED: (final, covariance),
        INITIAL: (initial, initial_covariance),
        ROTATED: (rotated(final, generator), covariance),
        IDENTITY: (torch.eye(DIM, dtype=torch.float64).expand_as(final), covariance),
    }
    shared = {"seed": seed, "accuracy": accuracy, "condition": float(torch.linalg.cond(covariance))}
    return [{"matrix": name} | shared | measure(*pair) for name, pair in compared.items()]


@torch.no_grad()
def _covariance(model: DigitsClassifier, patches: Tensor) -> Tensor:
    return model.tokens(patches).double().flatten(0, 1).mT.cov(correction=0)


def nearness(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the nearness of the matrices in the mean over seeds, and that of the trained less the rotated ones."""

    def column(matrix: str, name: str) -> Tensor:
        return torch.tensor([row[name] for row in layers if row["matrix"] == matrix], dtype=torch.float64)

    def excess(name: str) -> dict[str, float]:
        less = column(TRAINED, name) - column(ROTATED, name)
        return {"mean": float(less.mean()), "standard_error": float(less.std() / math.sqrt(len(less)))}

    means = [{"matrix": m} | summary({name: column(m, name) for name in NEARNESS}) for m in COMPARED]
    return {"matrices": means, "trained_less_rotated": {name: excess(name) for name in NEARNESS}}
