"""Torch's private attention kernels are called with layouts that they take, and by nobody else."""

from pathlib import Path

import pytest
import torch
from layouts import MATRICES, Layouts
from torch.nn.attention import SDPBackend, sdpa_kernel

import implicit_attention
from implicit_attention.potentials import _attention as attention
from implicit_attention.testing.numerics import random

PRIVATE = ("torch.ops", "_scaled_dot_product", "torch._efficient_attention", "torch._flash_attention")


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("which", range(4))
def test_the_kernel_on_a_cpu_answers_every_layout(which, kind):
    draw = Layouts(0)
    given = [random(1, 1, *size, seed=i) for i, size in enumerate(((16, 8), (70, 8), (70, 8), (16, 70)))]
    given[which] = MATRICES[kind](draw.normal, tuple(given[which].shape), draw.rng)
    query, keys, values, mask = given
    mean, logsumexp = attention.flash_with_logsumexp(query, keys, values, attn_mask=mask, scale=0.5)
    query, keys, values, mask = (t.clone(memory_format=torch.contiguous_format) for t in given)
    scores = 0.5 * query @ keys.mT + mask
    torch.testing.assert_close(mean, scores.softmax(-1) @ values, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("which", range(5))
def test_its_derivative_takes_every_layout(which, kind):
    draw = Layouts(0)
    sizes = ((16, 8), (70, 8), (70, 8), (16, 70), (16, 8))
    given = [random(1, 1, *size, seed=i) for i, size in enumerate(sizes)]
    given[which] = MATRICES[kind](draw.normal, (1, 1, *sizes[which]), draw.rng)
    *inputs, mask, cotangent = (t.detach() for t in given)
    leaves = [t.requires_grad_() for t in inputs]
    expected = torch.autograd.grad(attention._formula(*leaves, mask, 0.5), leaves, cotangent.contiguous())
    (out,) = attention.differentiable(*leaves, attn_mask=mask, scale=0.5)
    for _ in range(2):
        # The second time what was kept is used up.
        found = torch.autograd.grad(out, leaves, cotangent, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    assert out.grad_fn.is_flash == (which > 2 or inputs[which].stride(-1) == 1)


@pytest.mark.parametrize("change", ["nothing", "backend", "autocast", "one leaf", "written to"])
def test_derivatives_follow_what_torch_chose(change):
    query, keys, values = (
        random(1, 2, n, 8, seed=n).requires_grad_(n != 71 or change != "one leaf") for n in (5, 70, 71)
    )
    values = values[:, :, :70]
    backends = [SDPBackend.MATH] if change == "backend" else list(SDPBackend.__members__.values())
    with sdpa_kernel(backends), torch.autocast("cpu", enabled=change == "autocast"):
        (out,) = attention.differentiable(query, keys, values, attn_mask=None, scale=0.5)
    assert out.grad_fn.is_flash == (change not in ("backend", "autocast"))
    leaves = [t for t in (query, keys, values) if t.requires_grad]
    expected = torch.autograd.grad(attention._formula(query, keys, values, None, 0.5).sum(), leaves)
    loss = out.sum()
    if change == "written to":
        with torch.no_grad():
            out.mul_(3.0)
    bound = {"rtol": 3e-2, "atol": 3e-2} if change == "autocast" else {"rtol": 1e-11, "atol": 1e-12}
    for a, b in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(a, b, **bound)


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("count", [64, 70])
def test_the_kernel_on_cuda_is_given_what_torch_would_give_it(count, kind, monkeypatch):
    def kernel(query, keys, values, mask, compute, *, is_causal, scale):
        for tensor in (query, keys, values):
            assert tensor.stride(-1) == 1
            assert tensor.stride(-2) >= tensor.shape[-1]
        assert mask.stride(-1) == 1
        assert not any(step % 8 for step in mask.stride()[:-1])
        scores = scale * query @ keys.mT + mask
        return scores.softmax(-1) @ values, scores.logsumexp(-1)

    monkeypatch.setattr(attention, "_EFFICIENT", kernel)
    draw = Layouts(0)
    query, keys, mask = (
        MATRICES[kind](draw.normal, (1, 1, *size), draw.rng) for size in ((16, 8), (count, 8), (16, count))
    )
    mean, _ = attention.efficient_with_logsumexp(query, keys, keys, attn_mask=mask, scale=0.5)
    torch.testing.assert_close(mean, (0.5 * query @ keys.mT + mask).softmax(-1) @ keys, rtol=1e-12, atol=1e-13)


def test_nobody_else_calls_private_operations():
    package = Path(implicit_attention.__file__).parent
    callers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(name in path.read_text() for name in PRIVATE)
    }
    assert callers == {"potentials/_attention.py"}
