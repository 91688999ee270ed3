"""A tiny recursive model, written from its paper, whose tensors have several dtypes: a solve answers as its loop does.

Jolicoeur-Martineau (2025), "Less is More: Recursive Reasoning with Tiny Networks": one network refines a latent state z
n times from x + y + z, and then the answer y from y + z; the weights and tables are float32, and are cast by their
layers; states are bfloat16.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from implicit_attention import Anderson, Equilibrium, Phantom, Picard, Reversible, Unrolled
from implicit_attention.models.reasoners import TwoStreamReasoner

WIDTH, HEADS, TOKENS, PUZZLES = 16, 2, 9, 5
#: What rounds once to bfloat16 is off by at most 2^-9 of its size. Solves in float32 round x, the answers and the
#: cotangents, which (I - J)^-1 makes larger; loops, and blocks that take bfloat16 alone, the states at every step.
ONCE, OFTEN = 12 * 2.0**-9, 24 * 2.0**-9


class CastLinear(nn.Linear):
    """float32 weights in the dtype of what they multiply."""

    def forward(self, h):
        return F.linear(h, self.weight.to(h.dtype))


class FixedLinear(nn.Linear):
    """float32 weights in bfloat16, whatever they multiply; in `dtype` where the model is made for comparison."""

    dtype = torch.bfloat16

    def forward(self, h):
        return F.linear(h.to(self.dtype), self.weight.to(self.dtype))


#: How the weights of the network multiply.
LINEAR = {"cast": CastLinear, "bfloat16": nn.Linear, "fixed": FixedLinear}
BOUNDS = {"cast": ONCE, "bfloat16": ONCE, "fixed": OFTEN}


def normed(h):
    wide = h.float() if h.dtype == torch.bfloat16 else h
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(h.dtype)


class Layer(nn.Module):
    """Attention or a mixer over tokens, and SwiGLU, each with its norm behind the sum."""

    def __init__(self, linear, mixer):
        super().__init__()
        self.mixer = linear(TOKENS, TOKENS, bias=False) if mixer else None
        if not mixer:
            self.qkv, self.out = linear(WIDTH, 3 * WIDTH, bias=False), linear(WIDTH, WIDTH, bias=False)
        self.gate_up, self.down = linear(WIDTH, 4 * WIDTH, bias=False), linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, h):
        if self.mixer is None:
            parts = self.qkv(h).unflatten(-1, (3 * HEADS, -1)).transpose(-2, -3).chunk(3, -3)
            mixed = self.out(F.scaled_dot_product_attention(*parts).transpose(-2, -3).flatten(-2))
        else:
            mixed = self.mixer(h.mT).mT
        h = normed(h + mixed)
        gate, up = self.gate_up(h).chunk(2, -1)
        return normed(h + self.down(F.silu(gate) * up))


class Embedded(nn.Module):
    """float32 tables, cast to the dtype of the states."""

    def __init__(self):
        super().__init__()
        self.tokens, self.puzzles = nn.Embedding(10, WIDTH), nn.Embedding(PUZZLES, WIDTH)

    def forward(self, ids, puzzle, dtype):
        of_tokens, of_puzzles = (table.weight.to(dtype) for table in (self.tokens, self.puzzles))
        return 4 * (F.embedding(ids, of_tokens) + F.embedding(puzzle, of_puzzles)[:, None])


class Recursion(nn.Module):
    """A step of (y, z) for integers: the tables are read inside."""

    def __init__(self, net, cycles=3):
        super().__init__()
        self.net, self.cycles, self.embedded = net, cycles, Embedded()

    def forward(self, state, ids, puzzle):
        y, z = state
        x = self.embedded(ids, puzzle, y.dtype)
        for _ in range(self.cycles):
            z = self.net(x + y + z)
        return self.net(y + z), z


class Model(nn.Module):
    """Tables, a recursion and a head; `inside` is a block of our own, else x goes to a TwoStreamReasoner."""

    def __init__(self, kind, mixer=False, inside=False, **options):
        super().__init__()
        torch.manual_seed(0)
        linear, solver = LINEAR[kind], Picard(rtol=1e-2 if kind == "fixed" else 1e-3)
        options = {"solver": solver, **options}
        net = nn.Sequential(Layer(linear, mixer), Layer(linear, mixer))
        self.head = CastLinear(WIDTH, 10, bias=False)
        self.embedded = None if inside else Embedded()
        self.solved = Equilibrium(Recursion(net), **options) if inside else TwoStreamReasoner(net, cycles=3, **options)
        with torch.no_grad():
            for parameter in net.parameters():
                # So that the recursion settles, as a trained one does.
                parameter.mul_(0.5)
        if linear is nn.Linear:
            net.bfloat16()

    def forward(self, ids, puzzle, dtype=torch.bfloat16, **options):
        start = (torch.zeros(*ids.shape, WIDTH, dtype=dtype), torch.ones(*ids.shape, WIDTH, dtype=dtype))
        x = (ids, puzzle) if self.embedded is None else (self.embedded(ids, puzzle, dtype),)
        y, z = self.solved(*x, start=start, **options)
        assert y.dtype == z.dtype == dtype
        return self.head(y)


def puzzles():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(10, (4, TOKENS), generator=generator), torch.arange(4)


def loss_of(logits, ids):
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), (ids + 1).flatten() % 10)


def gradients(model, **options):
    ids, puzzle = puzzles()
    logits = model(ids, puzzle, **options)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss_of(logits, ids), parameters)
    assert all(g.dtype == p.dtype for g, p in zip(found, parameters, strict=True))
    return logits.detach(), dict(zip(names, found, strict=True))


def far(found, truth):
    """The distance relative to the size of the truth."""
    return float((found.detach().double() - truth).norm() / truth.norm())


def truly(model):
    """The model in float64, solved to its end."""
    wide = copy.deepcopy(model).double()
    for part in wide.modules():
        if isinstance(part, FixedLinear):
            part.dtype = torch.float64
    wide.solved.options = wide.solved.options.override(solver=Picard(rtol=1e-11, atol=1e-11, max_steps=2000))
    return wide


def truth_of(model):
    return gradients(truly(model), dtype=torch.float64)


@pytest.mark.parametrize("kind", LINEAR)
@pytest.mark.parametrize("inside", [False, True])
def test_a_solve_and_its_loop_are_those_of_the_truth(kind, inside):
    model = Model(kind, mixer=inside, inside=inside)
    logits, exact = truth_of(model)
    found, of_solve = gradients(model)
    assert model.solved.last_solve.converged.all()
    looped, of_loop = gradients(model, steps=40, adjoint=Unrolled())
    for got, grads, most in ((found, of_solve, BOUNDS[kind]), (looped, of_loop, OFTEN)):
        assert got.dtype == torch.bfloat16
        assert far(got, logits) < most
        assert max(far(grads[name], exact[name]) for name in exact) < most


#: Other ways to solve, and how far off the gradient of five steps is by itself.
WAYS = {
    "phantom": ({"adjoint": Phantom(5)}, 0.2),
    "unrolled": ({"adjoint": Unrolled()}, OFTEN),
    "Anderson": ({"solver": Anderson(history=1, rtol=1e-3)}, ONCE),
    "reversible": ({"adjoint": Reversible(), "steps": 40}, ONCE),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_solve_takes_the_model(way):
    options, most = WAYS[way]
    model = Model("cast", mixer=True, inside=True, **options)
    logits, exact = truth_of(Model("cast", mixer=True, inside=True))
    found, grads = gradients(model)
    assert far(found, logits) < ONCE
    assert max(far(grads[name], exact[name]) for name in exact) < most


@pytest.mark.parametrize("kind", ["cast", "bfloat16"])
def test_checkpoints_second_derivatives_and_modes_take_the_model(kind):
    model, (ids, puzzle) = Model(kind, mixer=True), puzzles()
    parameters = [parameter for name, parameter in model.named_parameters() if "solved" in name]
    logits = model(ids, puzzle)
    grads = torch.autograd.grad(loss_of(logits, ids), parameters, create_graph=True)
    again = torch.autograd.grad(loss_of(checkpoint(model, ids, puzzle, use_reentrant=False), ids), parameters)
    torch.testing.assert_close(again, tuple(g.detach() for g in grads), rtol=1e-2, atol=1e-3)
    second = torch.autograd.grad(sum(g.float().square().sum() for g in grads), parameters)
    wide = truly(model)
    exact = torch.autograd.grad(loss_of(wide(ids, puzzle, torch.float64), ids), wide.parameters(), create_graph=True)
    exact = [g for g, (name, _) in zip(exact, wide.named_parameters(), strict=True) if "solved" in name]
    own = [parameter for name, parameter in wide.named_parameters() if "solved" in name]
    expected = torch.autograd.grad(sum(g.square().sum() for g in exact), own)
    assert max(map(far, second, expected)) < 4 * OFTEN
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(model(ids, puzzle), logits)
    with torch.autocast("cpu", torch.bfloat16):
        answer, _ = model.solved(model.embedded(ids, puzzle, torch.bfloat16))
    assert answer.dtype == torch.float32
    assert far(model.head(answer), logits.detach().double()) < 2 * OFTEN
