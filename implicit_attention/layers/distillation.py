"""`distill_correction`: train a feed-forward net on the reaction of spins to their own means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .. import _validate
from .._autograd import at_least_single
from ..spins import Approximation, SpinSystem, magnetization
from .mean_field import MeanFieldAttention


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The quality of a correction f as a fit of a method's reaction, on held-out inputs, (heads) each.

    R^2 = 1 - sum |f(m_i) - f_i|^2 / sum |f_i - mean f|^2 over sites: 1 is exact, 0 no better than the constant that is
    best there. A site's reaction depends on all sites, so that no function of m_i alone need reach 1.

    Attributes:
        r2: of the correction as trained.
        r2_before: of the correction before training.
        r2_zero: of no correction.
        r2_linear: of the best linear map of m_i on the training inputs, whose slope nothing limits.
        r2_train: of the correction as trained, on the training inputs.
        error: |z - m|/|m| of the layer's answer z as trained, over all held-out samples.
        error_before: of its answer before.
        left_out: share of the samples without an answer of the method; no other number counts them.

    Not for choosing between trainings: hold out further inputs for that.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import MeanFieldAttention, distill_correction
        >>> from implicit_attention.spins import TAP
        >>> layer = MeanFieldAttention(8, heads=1, symmetric=True, correction="learned")
        >>> found = distill_correction(layer, TAP(rtol=1e-4), [torch.randn(4, 6, 8) for _ in range(3)], steps=20)
        >>> bool((found.r2 > found.r2_zero).all())
        True
    """

    r2: Tensor
    r2_before: Tensor
    r2_zero: Tensor
    r2_linear: Tensor
    r2_train: Tensor
    error: Tensor
    error_before: Tensor
    left_out: float

    def __repr__(self) -> str:
        names = ("R^2", "before", "zero", "linear", "train", "|z - m|/|m|", "|z - m|/|m| before")
        means = (float(value.mean()) for value in vars(self).values() if isinstance(value, Tensor))
        return f"Distillation({', '.join(f'{name} {mean:.3g}' for name, mean in zip(names, means, strict=True))})"


def distill_correction(
    layer: MeanFieldAttention,
    method: Approximation,
    batches: Sequence[Tensor],
    *,
    steps: int = 500,
    learning_rate: float = 1e-2,
    held_out: float = 0.25,
) -> Distillation:
    """Fit the correction of a layer to the reaction that makes its fixed point the magnetizations of a method.

    With m the magnetizations of spins of length sqrt(head_dim) in the layer's fields x and couplings J, at beta = 1,

        f_i = x_i + sum_j J_ij m_j - m_i

    is the correction with which z = m solves the equation of the layer. For Gaussian spins it is zero; for others it is
    the Onsager reaction and the spin's own response. Only the weights of the correction are trained, by Adam on the
    squared error of f(m_i) over all training sites at once. The layer limits the slope of f, so that strong fields,
    whose reaction is steep, are fitted only as well as a contraction can.

    Args:
        layer: with couplings ("softmax", "free" or "blocks") and correction="learned", or a module of one's own.
        method: of the spins, such as `TAP()`; one for equilibrium needs a layer with symmetric=True.
        batches: inputs of the layer, (*batch, N, dim) each, at least two. The last ones are held out.
        steps: of Adam.
        learning_rate: at the start; it falls to zero as a cosine.
        held_out: share of the batches, in (0, 1); at least one is held out and one is not.

    Returns:
        A `Distillation`, with R^2 of the trivial contenders.

    Raises:
        TypeError, ValueError: a layer without couplings or weights to train; fewer than two batches.

    Not for training a layer on a task: train it as any module, starting from here.

    Examples:
        >>> import torch
        >>> from implicit_attention.layers import MeanFieldAttention, distill_correction
        >>> from implicit_attention.spins import TAP
        >>> layer = MeanFieldAttention(8, heads=1, symmetric=True, correction="learned")
        >>> found = distill_correction(layer, TAP(rtol=1e-4), [torch.randn(4, 6, 8) for _ in range(3)], steps=20)
        >>> bool((found.error < found.error_before).all())
        True
    """
    _validate.check_instance("layer", layer, MeanFieldAttention, "be a MeanFieldAttention")
    _validate.check_instance("method", method, Approximation, "be an Approximation", "for example TAP()")
    net = layer.correction
    trained = [p for p in net.parameters() if p.requires_grad] if isinstance(net, nn.Module) else []
    required, remedy = "have a correction with weights to train", "make it with correction='learned'"
    _validate.require(bool(trained), "layer", required, f"correction={net!r}", remedy)
    _validate.require(len(batches) >= 2, "batches", "be at least two, of which one is held out", len(batches))
    steps = _validate.check_integer("steps", steps, low=1)
    learning_rate = _validate.check_number("learning_rate", learning_rate, low=0.0, open_low=True)
    held_out = _validate.check_number("held_out", held_out, low=0.0, high=1.0, open_low=True)
    kept = min(max(1, round(len(batches) * (1 - held_out))), len(batches) - 1)

    targets = [_reactions(layer, method, x) for x in batches]
    train, test = _joined(targets[:kept]), _joined(targets[kept:])
    total = sum(x.shape[:-1].numel() for x in batches) * layer.heads
    left_out = 1 - sum(int(good.sum()) for *_, good in targets) / total
    before, error_before = _r2(net, *test), _error(layer, batches[kept:], targets[kept:])
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.enable_grad():
        for _ in range(steps):
            loss = _squares(net(train[0]) - train[1], train[2]).sum() / _squares(train[1], train[2]).sum()
            for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                parameter.grad = gradient
            optimizer.step()
            schedule.step()
    optimizer.zero_grad()
    fitted = torch.linalg.lstsq(*(t * train[2][..., None] for t in train[:2])).solution
    return Distillation(
        r2=_r2(net, *test),
        r2_before=before,
        r2_zero=_r2(torch.zeros_like, *test),
        r2_linear=_r2(lambda m: m @ fitted, *test),
        r2_train=_r2(net, *train),
        error=_error(layer, batches[kept:], targets[kept:]),
        error_before=error_before,
        left_out=left_out,
    )


@torch.no_grad()
def _reactions(layer: MeanFieldAttention, method: Approximation, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m, (heads, S, D) for all S sites of all samples, their reactions, and the sites that count, (heads, S)."""
    field = at_least_single(layer._read(x, None)[0])
    axis = -5 if layer.kind == "blocks" else -3
    parts = []
    for own, part in zip(layer.couplings(x).unbind(axis), field.unbind(-3), strict=True):
        system = SpinSystem(own, part, 1.0)
        m, answer = magnetization(system, method, on_failure="ignore", return_answer=True)
        reaction = part + system.coupled(m) - m
        good = (answer.report.converged & reaction.isfinite().all(-1).all(-1))[..., None].expand(m.shape[:-1])
        parts.append((*(t.masked_fill(~good[..., None], 0.0).flatten(0, -2) for t in (m, reaction)), good.flatten()))
    m, reaction, good = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return m, reaction, good


def _joined(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    m, reaction, good = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
    required, remedy = "answer the spins of a sample in training and one held out", "weaken fields or couplings"
    _validate.require(bool(good.any(-1).all()), "method", required, "no answer", remedy)
    return m, reaction, good


def _squares(v: Tensor, good: Tensor) -> Tensor:
    return v.square().sum(-1).masked_fill(~good, 0.0).sum(-1)


@torch.no_grad()
def _r2(function: Callable[[Tensor], Tensor], m: Tensor, reaction: Tensor, good: Tensor) -> Tensor:
    # Sites that do not count are zero in m and in the reaction.
    mean = reaction.sum(1, keepdim=True) / good.sum(1)[:, None, None]
    return 1 - _squares(function(m) - reaction, good) / _squares(reaction - mean, good)


@torch.no_grad()
def _error(
    layer: MeanFieldAttention, batches: Sequence[Tensor], targets: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """|z - m|/|m| of the layer's answers, (heads)."""
    off, size = [], []
    for x, (m, _, good) in zip(batches, targets, strict=True):
        state = layer(x, return_state=True)[1].movedim(-3, 0).flatten(1, -2)
        off.append(_squares(state - m, good))
        size.append(_squares(m, good))
    return (torch.stack(off).sum(0) / torch.stack(size).sum(0)).sqrt()
