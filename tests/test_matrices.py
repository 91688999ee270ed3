"""Dense solves of batches: right, differentiable, and never by the factorization of torch that may not return."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import implicit_attention
from implicit_attention.potentials import renormalise
from implicit_attention.spins import SaddlePoint, SpinSystem, free_energy, magnetization
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


@pytest.mark.parametrize("n", [4, 150], ids=["lu", "qr"])
def test_batches_are_solved_and_what_is_singular_or_not_finite_stays_in_its_sample(n):
    x, root = random(3, 2 * n, n), random(n, n, seed=1)
    mean, covariance = random(n, seed=2), root @ root.mT / n + torch.eye(n, dtype=torch.float64)
    found = renormalise(x, mean, covariance)
    torch.testing.assert_close(found.mean(-2), mean.expand(3, n))
    centred = found - mean
    torch.testing.assert_close(centred.mT @ centred / (2 * n), covariance.expand(3, n, n))
    x[1, 0, 0] = torch.nan
    with_nan = renormalise(x, mean, covariance)
    assert torch.equal(with_nan[::2], found[::2])
    assert with_nan[1].isnan().all()


def test_a_large_inverse_has_its_derivative_in_forward_mode():
    couplings = random(2, 150, 150) / 150
    along = random(2, 150, 1, seed=1)

    def energy(field):
        return free_energy(SpinSystem(couplings + couplings.mT, field, 0.5), SaddlePoint())

    field = along.flip(1)
    forward = torch.func.jvp(energy, (field,), (along,))[1]
    torch.testing.assert_close(
        forward, (-magnetization(SpinSystem(couplings + couplings.mT, field, 0.5), SaddlePoint()) * along).sum((1, 2))
    )


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
from implicit_attention.spins import AdaTAP, Bethe, GaussianClosure, KineticPlefka, MeanField, SaddlePoint, TAP
from implicit_attention.spins import SpinSystem, fit_ising, magnetization, stability, thermodynamics
torch.set_num_threads(2)
warnings.simplefilter("ignore")
generator = torch.Generator().manual_seed(0)
B, N, DIM = 8, 300, int(sys.argv[2])
couplings = torch.randn(B, N, N, dtype=torch.float64, generator=generator) * 0.2 / N**0.5
couplings = (couplings + couplings.mT).requires_grad_()
field = (0.5 * torch.randn(B, N, DIM, dtype=torch.float64, generator=generator)).requires_grad_()
system = SpinSystem(couplings, field, beta=1.0)
name = sys.argv[1]
if name == "fit_ising":
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
