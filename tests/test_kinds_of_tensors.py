"""What is no ordinary tensor is refused by name, or answered as it should be: shapes with shapes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import implicit_attention as ia
from implicit_attention.kernels import hopfield_adjoint, hopfield_solve
from implicit_attention.testing.numerics import random


def tensors(dim=8):
    return [random(2, n, dim, seed=n, dtype=torch.float32) for n in (5, 70, 71)]


def energy(q, k, **pairs):
    return ia.AnchoredEnergy(ia.LogSumExp(k, 0.3, **pairs), q, 0.5)


def spins(q, k):
    return ia.spins.magnetization(ia.spins.SpinSystem(torch.zeros(5, 5), q, 0.5), ia.spins.MeanField())


DOORS = {
    "solve": lambda q, k: ia.solve(energy(q, k), q).value,
    "a map": lambda q, k: ia.solve(ia.FixedPointMap(lambda z, q: q + z.tanh() / 9, q, event_ndim=1), q).value,
    "tokens": lambda q, k: ia.solve(ia.SelfAttentionEnergy(q, 0.1, 0.9), q).value,
    "hopfield_solve": lambda q, k: hopfield_solve(q, k, beta=0.3, anchor=0.5).state,
    "hopfield_adjoint": lambda q, k: hopfield_adjoint(q, k, q, q, beta=0.3, anchor=0.5).value,
    "attention": lambda q, k: ia.equilibrium_attention(q, k, k),
    "an explicit step": lambda q, k: ia.equilibrium_attention(q, k, k, max_steps=0),
    "a layer": lambda q, k: ia.ImplicitAttention(8, 2)(q, k),
    "the energy itself": lambda q, k: ia.ImplicitAttention(8, 1, bare=True)(q, k),
    "spins": spins,
}


SHAPES = (
    "hopfield_solve",
    "hopfield_adjoint",
    "attention",
    "an explicit step",
    "a layer",
    "the energy itself",
)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_answered_with_shapes_under_fake_tensors(name):
    with FakeTensorMode():
        q, k, _ = (torch.randn(2, n, 8) for n in (5, 70, 71))
        found = DOORS[name](q, k)
        assert isinstance(found, FakeTensor)
        assert (found.shape, found.device, found.dtype) == (q.shape, q.device, q.dtype)


def test_gradients_have_shapes_under_fake_tensors():
    with FakeTensorMode():
        q, k, _ = (torch.randn(2, n, 8, requires_grad=True) for n in (5, 70, 71))
        ia.equilibrium_attention(q, k, k).sum().backward()
        assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


@pytest.mark.parametrize("name", ["hopfield_solve", "hopfield_adjoint", "attention", "an explicit step"])
def test_shapes_are_answered_with_shapes_on_meta(name):
    q, k, _ = (t.to("meta") for t in tensors())
    found = DOORS[name](q, k)
    assert (found.device.type, found.shape, found.dtype) == ("meta", q.shape, q.dtype)


@pytest.mark.parametrize("name", ["solve", "a map", "tokens", "spins"])
def test_what_depends_on_numbers_asks_for_them(name):
    q, k, _ = (t.to("meta") for t in tensors())
    with pytest.raises(ValueError, match="must hold numbers, got a tensor on the device meta"):
        DOORS[name](q, k)
    with FakeTensorMode():
        q, k, _ = (torch.randn(2, n, 8) for n in (5, 70, 71))
        with pytest.raises(ValueError, match="must hold numbers, got a FakeTensor"):
            DOORS[name](q, k)


# No dimension.


@pytest.mark.parametrize("count", [3, 70])
@pytest.mark.parametrize("max_steps", [None, 0])
def test_without_a_dimension_every_key_has_the_same_weight(max_steps, count):
    q, k, v = torch.zeros(2, 5, 0), torch.zeros(2, count, 0), random(2, count, 4, dtype=torch.float32).requires_grad_()
    output = ia.equilibrium_attention(q, k, v, max_steps=max_steps)
    torch.testing.assert_close(output, v.mean(-2, keepdim=True).expand(2, 5, 4))
    output.sum().backward()
    torch.testing.assert_close(v.grad, torch.full_like(v, 5 / count))


def test_an_operation_without_a_dimension_knows_its_logsumexp():
    found = hopfield_solve(torch.zeros(2, 5, 0), torch.zeros(2, 7, 0), beta=0.5)
    assert (found.state.shape, found.mean.shape) == ((2, 5, 0), (2, 5, 0))
    torch.testing.assert_close(found.logsumexp, torch.full((2, 5), 7.0).log())
    assert (found.status == ia.Status.CONVERGED).all()


# Masks with one axis.


@pytest.mark.parametrize("count", [20, 70])
@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_of_the_keys_alone_hides_one_that_is_not_finite(boolean, count):
    q, k, v = (t[:, :count] for t in tensors())
    v = v[:, : k.shape[1]]
    mask = torch.arange(k.shape[1]) != 3
    mask = mask if boolean else torch.zeros(len(mask)).masked_fill(~mask, -torch.inf)
    k[1, 3] = torch.nan
    kept = [i for i in range(k.shape[1]) if i != 3]
    for steps in (None, 0):
        found = ia.equilibrium_attention(q, k, v, mask, max_steps=steps)
        expected = ia.equilibrium_attention(q, k[:, kept], v[:, kept], max_steps=steps)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    pairs = {"mask" if boolean else "bias": mask}
    solution = ia.solve(energy(q, k, **pairs), q)
    torch.testing.assert_close(solution.value, ia.solve(energy(q, k[:, kept]), q).value, rtol=1e-3, atol=1e-4)
    k[1, 5] = torch.nan
    status = ia.solve(energy(q, k, **pairs), q, on_failure="ignore").status
    assert (status[0] == ia.Status.CONVERGED).all()
    assert (status[1] == ia.Status.NONFINITE).all()


@pytest.mark.slow
@pytest.mark.parametrize("boolean", [True, False])
def test_a_mask_of_the_keys_alone_compiles(boolean):
    q, k, _ = tensors()
    mask = torch.arange(70) % 3 > 0
    mask = mask if boolean else mask.float()
    compiled = torch.compile(lambda q: ia.equilibrium_attention(q, k, k, mask), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), ia.equilibrium_attention(q, k, k, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_memory_compiles_as_it_comes():
    memory = ia.MemoryLookup(8)
    memory.store(random(70, 8, dtype=torch.float32))
    queries = random(3, 8, seed=2, dtype=torch.float32)
    compiled = torch.compile(memory, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(queries), memory(queries), rtol=1e-4, atol=1e-5)


# Anomaly mode.


@pytest.mark.parametrize("count", [20, 70])
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("max_steps", [None, 0])
def test_queries_that_attend_to_nothing_are_no_anomaly(max_steps, additive, count):
    q, k, v = (t.requires_grad_() for t in tensors())
    mask = random(2, 5, count, seed=4) > -0.5
    mask[0, 2] = False
    mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf) if additive else mask
    with torch.autograd.set_detect_anomaly(True):
        output = ia.equilibrium_attention(q, k[:, :count], v[:, :count], mask, max_steps=max_steps)
        first = torch.autograd.grad(output.square().sum(), (q, k, v), create_graph=True)
        sum(t.square().sum() for t in first).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
