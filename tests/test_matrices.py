"""Dense solves of batches: right, differentiable, and never by the factorization of torch that may not return."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import implicit_attention
from implicit_attention import _matrices
from implicit_attention.testing.numerics import random

PACKAGE = Path(implicit_attention.__file__).parent
#: All that factorizes by LU, or whose derivative does.
BY_LU = {
    "solve",
    "solve_ex",
    "inv",
    "inv_ex",
    "inverse",
    "lu",
    "lu_factor",
    "lu_factor_ex",
    "lu_solve",
    "det",
    "slogdet",
}
BY_LU |= {"logdet", "tensorsolve", "tensorinv"}


def matrices(*shape, seed=0):
    return random(*shape, seed=seed) / shape[-1] ** 0.5 + torch.eye(shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("largest", [_matrices.LARGEST_LU, 0], ids=["lu", "qr"])
def test_solves_and_inverses_are_right_and_so_are_their_derivatives(largest, monkeypatch):
    monkeypatch.setattr(_matrices, "LARGEST_LU", largest)
    a, b = matrices(2, 4, 4), random(2, 4, 3, seed=1)
    torch.testing.assert_close(a @ _matrices.solve(a, b), b)
    torch.testing.assert_close(a @ _matrices.inverse(a), torch.eye(4, dtype=torch.float64).expand(2, 4, 4))
    torch.testing.assert_close(torch.vmap(_matrices.solve)(a, b), _matrices.solve(a, b))
    a.requires_grad_(), b.requires_grad_()
    for check in (gradcheck, gradgradcheck):
        check(_matrices.solve, (a, b))
        check(_matrices.inverse, (a,))


@pytest.mark.parametrize("n", [3, 200])
def test_what_is_singular_or_not_finite_stays_in_its_sample(n):
    a, b = matrices(3, n, n), random(3, n, 1, seed=1)
    clean = _matrices.solve(a, b)
    a[0] = 0
    a[1, 0, 0] = torch.nan
    found = _matrices.solve(a, b)
    assert torch.equal(found[2], clean[2])
    assert not found[:2].isfinite().all(-1).all(-1).any()


def test_no_other_file_factorizes_by_lu():
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_matrices.py" or "testing" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in BY_LU and ast.unparse(node.value).startswith("torch"):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node)}")
    assert found == []


LARGE = """
import sys, torch, warnings
from implicit_attention import _matrices
from implicit_attention.spins import *
from implicit_attention.spins import adaptive_tap
torch.set_num_threads(2)
warnings.simplefilter("ignore")
generator = torch.Generator().manual_seed(0)
B, N, DIM = 8, 300, int(sys.argv[2])
couplings = torch.randn(B, N, N, dtype=torch.float64, generator=generator) * 0.2 / N**0.5
couplings = (couplings + couplings.mT).requires_grad_()
field = (0.5 * torch.randn(B, N, DIM, dtype=torch.float64, generator=generator)).requires_grad_()
system = SpinSystem(couplings, field, beta=1.0)
name = sys.argv[1]
if name == "matrices":
    a = torch.randn(B, N, N) + 30 * torch.eye(N)
    a.requires_grad_()
    gradient, = torch.autograd.grad(_matrices.inverse(a).sum(), a, create_graph=True)
    gradient.square().sum().backward()
elif name == "fit_ising":
    samples = torch.randn(B, 4 * N, N, dtype=torch.float64, generator=generator).sign()
    for method in ("mean_field", "adaptive_tap"):
        fit_ising(samples, method=method, shrinkage=0.5)
elif name == "stability":
    print(stability(system, TAP(), starts=2, steps=16, on_failure="ignore"))
elif name in ("KineticPlefka", "GaussianClosure"):
    method = {"KineticPlefka": KineticPlefka, "GaussianClosure": GaussianClosure}[name]()
    magnetization(system, method, on_failure="ignore").square().sum().backward()
else:
    method = {"MeanField": MeanField, "TAP": TAP, "AdaTAP": AdaTAP, "SaddlePoint": SaddlePoint, "Bethe": Bethe}[name]()
    found = thermodynamics(system, method, on_failure="ignore")
    assert found.free_energy.isfinite().all(), found
    found.magnetization.square().sum().backward()
    assert couplings.grad.isfinite().all()
"""
METHODS = [
    ("matrices", 1),
    ("SaddlePoint", 1),
    ("SaddlePoint", 2),
    ("fit_ising", 1),
    pytest.param("AdaTAP", 1, marks=pytest.mark.nightly),
    pytest.param("AdaTAP", 2, marks=pytest.mark.nightly),
    ("MeanField", 1),
    ("TAP", 1),
    pytest.param("Bethe", 1, marks=pytest.mark.nightly),
    ("KineticPlefka", 2),
    ("GaussianClosure", 1),
    pytest.param("stability", 1, marks=pytest.mark.nightly),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dim"), METHODS)
def test_batches_of_large_systems_are_answered_on_two_threads(name, dim):
    """In a process of its own: what hangs there cannot be interrupted."""
    found = subprocess.run([sys.executable, "-c", LARGE, name, str(dim)], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
