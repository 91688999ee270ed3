"""Divergence, conjugate, Fisher information and bounds, against printed numbers and second routes."""

import functools
import math

import mpmath
import pytest
import torch

from implicit_attention import ConvergenceError, LogSumExp
from implicit_attention.potentials import (
    BernoulliUnits,
    Entmax,
    GaussianMixture,
    HiddenUnits,
    Polynomial,
    SelfAttention,
    Softmax1,
    bregman,
    conjugate,
    contrastive_loss,
    fisher,
    jensen_bound,
    natural_parameter,
)
from implicit_attention.solvers import NewtonKrylov
from implicit_attention.testing.numerics import check_derivatives, random, relative_error

tensor = functools.partial(torch.tensor, dtype=torch.float64)
close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
printed = functools.partial(torch.testing.assert_close, rtol=0, atol=5.1e-13)

POINTS = tensor([[0.5, -0.2], [1.0, 0.3], [-0.4, 0.8]])
ETA = tensor([[0.4, -0.3]])
PI = tensor([0.2, 0.5, 0.3])
EACH = tensor([[[1.2, 0.3], [0.3, 0.8]], [[0.5, 0.0], [0.0, 0.9]], [[1.5, -0.4], [-0.4, 1.1]]])
PHI = LogSumExp(POINTS, 1.0)


def weighted(log_weights):
    return GaussianMixture(POINTS, torch.zeros(2, 2, dtype=torch.float64), log_weights)


def entropy(p):
    return -torch.special.xlogy(p, p).sum(-1)


# Ground truth of three points.


def test_points():
    mean = PHI.mean(ETA)
    printed(PHI.value(ETA), tensor([1.203175060263]))
    printed(mean, tensor([[0.523546130986, 0.205933482824]]))
    printed(fisher(PHI, ETA)[0], tensor([[0.264801836427, -0.088350522900], [-0.088350522900, 0.138812999418]]))
    printed(conjugate(PHI, mean), tensor([-1.055536652715]))
    close(conjugate(PHI, mean), -entropy(PHI.probabilities(ETA)))
    close(natural_parameter(PHI, mean), ETA)
    own = weighted(PI.log())
    printed(own.value(ETA), tensor([0.132951489197]))
    printed(own.mean(ETA), tensor([[0.639967276814, 0.274483330544]]))
    loss = contrastive_loss(own, ETA, POINTS[:1]) - PI[0].log()
    printed(loss, tensor([1.482389401631]))
    close(loss, -own.responsibilities(ETA)[:, 0].log())


# Bregman divergence.


def precise(phi, a, b):
    """Of LogSumExp without bias, in 60 digits."""
    with mpmath.workdps(60):
        beta, keys = mpmath.mpf(float(phi.beta)), mpmath.matrix(phi.keys.tolist())
        a, b = (mpmath.matrix(z.tolist()) for z in (a, b))
        raised = [[mpmath.exp(beta * s) for s in keys * z] for z in (a, b)]
        value_a, value_b = (mpmath.log(sum(r)) / beta for r in raised)
        mean = [mpmath.fdot(raised[1], keys[:, i]) / sum(raised[1]) for i in range(keys.cols)]
        return float(value_a - value_b - sum(m * (x - y) for m, x, y in zip(mean, a, b, strict=True)))


def test_bregman_is_a_relative_entropy():
    other = tensor([[-0.2, 0.6]])
    printed(bregman(PHI, other, ETA), tensor([0.187870225797]))
    keys, beta = random(2, 7, 5), 1.7
    phi, a, b = LogSumExp(keys, beta), random(2, 3, 5, seed=1), random(2, 3, 5, seed=2)
    p_a, p_b = phi.probabilities(a), phi.probabilities(b)
    close(beta * bregman(phi, a, b), (p_b * (p_b / p_a).log()).sum(-1))


@pytest.mark.parametrize("shift", [0.0, 1e3], ids=["centred", "far_keys"])
@pytest.mark.parametrize("beta", [0.3, 10.0])
def test_bregman_is_right_near_and_far(beta, shift):
    phi, b, direction = LogSumExp(random(6, 4) + shift, beta), random(1, 4, seed=1), random(1, 4, seed=2)
    # Terms of size `shift` take that much precision from what the integral does not reach.
    for exponent in range(-12, 2):
        a = b + 10.0**exponent * direction
        exact = precise(phi, a[0], b[0])
        error = abs(bregman(phi, a, b).item() - exact)
        rounding = 2e-15 * (abs(phi.value(a).item()) + abs(phi.value(b).item()))
        assert error <= 1e-9 * exact + rounding, exponent
        if beta == 0.3 and shift == 0:
            assert error <= 1e-11 * exact, exponent


def test_bregman_is_never_negative_near_and_keeps_to_rounding_across_kinks():
    b = random(200, 5, seed=1)
    for phi in (LogSumExp(random(7, 5), 2.0), HiddenUnits(random(5, 4), BernoulliUnits(0.3))):
        for size in (0.0, 1e-12, 1e-9, 1e-6, 1e-3):
            assert (bregman(phi, b + size * random(200, 5, seed=2), b) >= 0).all()
    kinked = Polynomial(tensor([[1.0]]), 1.0, degree=2)  # relu(z)^2/2
    a, b = tensor([[1e-3], [0.2], [-1.0]]), tensor([[-1e-3], [-0.7], [0.5]])
    close(bregman(kinked, a, b), tensor([5e-7, 0.02, 0.625]))


def test_bregman_in_single_precision_and_for_coupled_rows():
    phi, b, step = LogSumExp(random(6, 4), 1.0), random(3, 4, seed=1), random(3, 4, seed=2)
    for size in (1e-4, 1e-2, 1.0):
        a32, b32 = (b + size * step).float(), b.float()
        exact = bregman(phi, a32.double(), b32.double())
        got = bregman(LogSumExp(phi.keys.float(), 1.0), a32, b32)
        assert relative_error(got.double(), exact) < 1e-4
    tokens = SelfAttention(1.0)
    a, b = random(2, 3, 4), random(2, 3, 4, seed=1)
    plain = tokens.value(a) - tokens.value(b) - (tokens.mean(b) * (a - b)).sum((-1, -2))
    close(bregman(tokens, a, b), plain)


@pytest.mark.parametrize("size", [1e-2, 1.0], ids=["near", "far"])
def test_bregman_gradients(size):
    b, keys = random(2, 3, seed=1), random(4, 3)
    inputs = tuple(t.requires_grad_() for t in (b + size * random(2, 3, seed=2), b, keys))
    check_derivatives(lambda a, b, k: bregman(LogSumExp(k, 1.3), a, b), inputs)


# Conjugate and its gradient.


@pytest.mark.slow
def test_conjugate_is_minus_the_entropy_near_and_on_the_boundary():
    for gap in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12, 0.0):
        p = tensor([[gap, 0.5 - gap / 2, 0.5 - gap / 2]])
        close(conjugate(PHI, p @ POINTS), -entropy(p), atol=2e-12)
        if gap >= 1e-8:
            eta = natural_parameter(PHI, p @ POINTS)
            close(PHI.probabilities(eta), p, rtol=1e-4 if gap < 1e-4 else 1e-8)
    # The corners themselves, and edges, in sixteen dimensions too.
    keys = random(200, 16)
    corners = keys[keys.norm(dim=-1).topk(5).indices]
    for phi, ends in ((PHI, POINTS), (LogSumExp(keys, 0.25), corners)):
        nothing = torch.zeros(len(ends), dtype=torch.float64)
        close(conjugate(phi, ends), nothing, atol=1e-10)
        close(conjugate(phi, (ends + ends.roll(1, 0)) / 2), nothing - math.log(2) / phi.beta, atol=1e-10)


def test_conjugate_of_one_gaussian():
    mixture, m = GaussianMixture(POINTS[:1], EACH[0], torch.zeros(1, dtype=torch.float64)), random(4, 2)
    eta = (m - POINTS[0]) @ torch.linalg.inv(EACH[0])
    close(natural_parameter(mixture, m), eta, rtol=1e-10)
    close(conjugate(mixture, m), (eta * (m - POINTS[0])).sum(-1) / 2, rtol=1e-10)


def convex_potentials():
    bias, mask = random(2, 3, 7, seed=4), random(2, 3, 7, seed=5) > -1
    keys = random(2, 7, 3)
    return {
        "masked": LogSumExp(keys, tensor([0.5, 1.3]), bias=bias, mask=mask),
        "entmax": Entmax(keys, 0.7),
        "mixture": GaussianMixture(random(3, 3), torch.eye(3, dtype=torch.float64) / 2, random(3, seed=1)),
        "units": HiddenUnits(random(3, 6), BernoulliUnits(0.3)),
        "sum": LogSumExp(keys, 1.0) + 0.5 * LogSumExp(2 * keys, 1.0),
    }


@pytest.mark.parametrize("kind", ["masked", "entmax", "mixture", "units", "sum"])
def test_the_inverse_map_of_every_convex_potential(kind):
    phi, eta, other = convex_potentials()[kind], random(2, 3, 3, seed=6) / 2, random(2, 3, 3, seed=7)
    m = phi.mean(eta)
    found = natural_parameter(phi, m)
    close(phi.mean(found), m, atol=1e-11)
    value = conjugate(phi, m)
    # Fenchel's inequality, an equality at eta; its gap is the divergence.
    close(value + phi.value(eta) - (m * eta).sum(-1), torch.zeros(2, 3, dtype=torch.float64), atol=1e-9)
    gap = value + phi.value(other) - (m * other).sum(-1)
    close(gap, bregman(phi, other, found), rtol=1e-8, atol=1e-9)
    assert (contrastive_loss(phi, other, m) >= -value - 1e-12).all()


def test_conjugate_gradients():
    inputs = (PHI.mean(ETA), POINTS.clone(), tensor([0.1, -0.2, 0.3]), tensor(1.3))
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    for function in (conjugate, natural_parameter):
        of = lambda m, k, bias, beta, f=function: f(LogSumExp(k, beta, bias=bias), m)  # noqa: E731
        check_derivatives(of, inputs, fast_mode=function is natural_parameter)
    (gradient,) = torch.autograd.grad(conjugate(PHI, inputs[0]).sum(), inputs[0])
    close(gradient, ETA, rtol=1e-10)
    # d eta/d m is the inverse Fisher information.
    jacobian = torch.autograd.functional.jacobian(lambda m: natural_parameter(PHI, m), inputs[0])[0, :, 0]
    close(jacobian @ fisher(PHI, ETA)[0], torch.eye(2, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    # Under torch.func as well.
    by_func = torch.func.grad(lambda m: conjugate(PHI, m).sum())(inputs[0].detach())
    close(by_func, ETA, rtol=1e-10)


def test_the_gradient_needs_no_inverse():
    # Three keys in five dimensions: the Fisher information is singular.
    keys = random(3, 5)
    phi, m = LogSumExp(keys, 1.0), (tensor([[0.2, 0.5, 0.3]]) @ keys).requires_grad_()
    value = conjugate(phi, m)
    close(value, (-entropy(PI))[None])
    close(torch.autograd.grad(value.sum(), m)[0], natural_parameter(phi, m).detach())


@pytest.mark.by_name(slow=r"\[1e-09")
@pytest.mark.parametrize("beyond", [1e-9, 0.1])
def test_outside_the_hull_is_an_error_with_a_direction(beyond):
    p = tensor([[1 + beyond, -beyond, 0.0], [0.2, 0.5, 0.3]])
    for phi in (PHI, Entmax(POINTS, 1.0)):
        with pytest.raises(ValueError, match=r"`m` must lie in the convex hull of the keys, got a row \(0,\).*; pass"):
            conjugate(phi, p @ POINTS)


@pytest.mark.slow
def test_the_hull_is_that_of_the_keys_that_are_attended_to():
    # Masked keys are no part of the hull, whatever they hold.
    keys = torch.cat([POINTS, torch.full((1, 2), math.nan, dtype=torch.float64)])
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    masked = LogSumExp(keys, 1.0, mask=mask)
    inside = torch.stack([(POINTS[0] + POINTS[1]) / 2, torch.zeros(2, dtype=torch.float64)])
    close(conjugate(masked, inside), tensor([-math.log(2), 0.0]))
    with pytest.raises(ValueError, match=r"got a row \(1,\)"):
        conjugate(masked, inside + tensor([[0.0], [1e-3]]))
    rows = torch.func.vmap(lambda m: conjugate(PHI, m))(torch.stack([PHI.mean(ETA), tensor([[5.0, 0.0]])]))
    printed(rows, tensor([[-1.055536652715], [math.nan]]), equal_nan=True)
    # Where no direction is known to separate, the residual that is left.
    with pytest.raises(ConvergenceError, match=r"no natural parameter was found for 1 of 2 means.*row \(0,\).*; pass"):
        conjugate(Softmax1(POINTS, 1.0), tensor([[5.0, 0.0], [0.1, 0.1]]))


def test_precisions_and_options():
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2)):
        phi, m = LogSumExp(POINTS.to(dtype), 1.0), PHI.mean(ETA).to(dtype)
        value, eta = conjugate(phi, m), natural_parameter(phi, m)
        assert value.dtype == eta.dtype == dtype
        assert abs(value.item() + 1.055536652715) < error
    with pytest.raises(ConvergenceError, match="no natural parameter"):
        conjugate(PHI, POINTS[:1], solver=NewtonKrylov(rtol=0, atol=1e-12, max_steps=2))
    assert conjugate(PHI, torch.zeros(0, 2, dtype=torch.float64)).shape == (0,)


# Fisher information, loss and bound.


def test_fisher_is_the_centred_covariance_and_the_hessian():
    keys, beta, z = random(2, 7, 3), tensor([0.5, 1.3]), random(2, 4, 3, seed=1)
    phi = LogSumExp(keys, beta)
    p = phi.probabilities(z)
    second = torch.einsum("bnm,bmi,bmj->bnij", p, keys, keys)
    mean = p @ keys
    information = fisher(phi, z)
    close(information, beta[:, None, None, None] * (second - mean[..., :, None] * mean[..., None, :]))
    assert torch.equal(information, information.mT)
    hessian = torch.autograd.functional.hessian(lambda z: phi.value(z).sum(), z)
    for b in range(2):
        for n in range(4):
            close(information[b, n], hessian[b, n, :, b, n])
    inputs = tuple(t.requires_grad_() for t in (z[:, :2].clone(), keys, beta))
    check_derivatives(lambda z, k, b: fisher(LogSumExp(k, b), z), inputs)


def test_the_contrastive_loss_is_cross_entropy_and_pulls_to_the_data():
    keys, eta = random(7, 5), random(4, 5, seed=1).requires_grad_()
    phi, label = LogSumExp(keys, 1.0), torch.tensor([3, 0, 6, 3])
    loss = contrastive_loss(phi, eta, keys[label])
    close(loss, torch.nn.functional.cross_entropy(eta @ keys.mT, label, reduction="none"))
    close(torch.autograd.grad(loss.sum(), eta)[0], phi.mean(eta) - keys[label])


def test_jensen_bound():
    mixture = GaussianMixture(POINTS, EACH, PI.log())
    printed(jensen_bound(mixture, ETA), tensor([0.2117]), atol=1e-12)
    for total in (1.0, 3.0):
        mixture = GaussianMixture(POINTS, EACH, (total * PI).log())
        for seed in range(5):
            eta = 2 * random(10, 2, seed=seed)
            assert (jensen_bound(mixture, eta) <= mixture.value(eta)).all()
        close(jensen_bound(mixture, torch.zeros_like(ETA)), tensor([math.log(total)]))
    one = GaussianMixture(POINTS[:1], EACH[0], tensor([0.7]))
    close(jensen_bound(one, ETA), one.value(ETA))
    left_out = tensor([0.2, 0.0, 0.3]).log().requires_grad_()
    bound = jensen_bound(GaussianMixture(POINTS, EACH, left_out), ETA)
    close(bound, jensen_bound(GaussianMixture(POINTS[[0, 2]], EACH[[0, 2]], tensor([0.2, 0.3]).log()), ETA))
