"""`sweep`: the answers of methods for one system at many temperatures, by one solve of every method."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..linear import Eigenvalue, extreme_eigenvalues
from ..solution import SolveReport, Status
from ._curvature import flattened
from .approximation import Approximation
from .dynamics import DynamicalMethod, StationaryState, stationary_state
from .system import SpinSystem
from .thermodynamics import Thermodynamics, thermodynamics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Numbers of an equilibrium, as `Thermodynamics` calls them.
SCALARS = ("free_energy", "internal_energy", "entropy", "heat_capacity")
#: Rows of a susceptibility that is computed as a matrix; a larger one makes LANCZOS_STEPS products.
DENSE, LANCZOS_STEPS = 64, 30
#: The quantities of the figure, with the labels of their axes.
PANELS = {
    "mean_length": "mean of |m_i|/R",
    "largest_susceptibility": "largest eigenvalue of chi",
    "heat_capacity": "heat capacity C",
    "entropy_production": "entropy production per step",
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The results of every method for a system at K inverse temperatures.

    Attributes:
        beta: (K,).
        curves: by method, then by quantity, (K, *batch): "mean_length" (the mean over sites of |m_i|/R); of an
            equilibrium also "free_energy", "internal_energy", "entropy", "heat_capacity", "largest_susceptibility" and
            "largest_susceptibility_error" (of its estimate); of synchronous dynamics "entropy_production". NaN where
            `failed`.
        failed: by method, (K, *batch): where a solve failed, or ended at an unstable point.
        reports: by method, of its solve.
        refused: by method, why it cannot treat the system.

    Not for one temperature: `thermodynamics` also has magnetizations and correlations.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Enumeration, MeanField, SpinSystem, sweep
        >>> system = SpinSystem(torch.tensor([[0.0, 0.5], [0.5, 0.0]]), field=torch.tensor([[0.3], [0.0]]))
        >>> found = sweep(system, [MeanField(), Enumeration()], beta=torch.linspace(0.2, 1.0, 5))
        >>> [axes.get_ylabel() for axes in found.plot().axes]
        ['mean of |m_i|/R', 'largest eigenvalue of chi', 'heat capacity C']
    """

    beta: Tensor
    curves: dict[str, dict[str, Tensor]]
    failed: dict[str, Tensor]
    reports: dict[str, SolveReport] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    exact: Collection[str] = ()

    def plot(self, *, exact: Collection[str] | None = None, title: str = "Against inverse temperature") -> Figure:
        """`plotting.phase_figure` of the sweep; of several samples the mean, where all have an answer.

        Args:
            exact: methods that are drawn as broad black lines; default those that are exact, such as `Enumeration`.
            title: above the panels.
        """
        from ..plotting.spins import phase_figure

        count = len(self.beta)
        means = {
            name: {quantity: values.reshape(count, -1).mean(-1) for quantity, values in curves.items()}
            for name, curves in self.curves.items()
        }
        drawn = {name: label for name, label in PANELS.items() if any(name in curves for curves in means.values())}
        return phase_figure(
            self.beta,
            means,
            panels=drawn or {"mean_length": PANELS["mean_length"]},
            failed={name: lost.reshape(count, -1).any(-1) for name, lost in self.failed.items()},
            exact=self.exact if exact is None else exact,
            title=title,
        )


def sweep(
    system: SpinSystem,
    methods: Mapping[str, Approximation] | Sequence[Approximation],
    *,
    beta: Float[Tensor, "K"],
) -> Sweep:
    """Ask methods for a system at many temperatures: magnetizations, derivatives of F, or entropy production.

    Every method solves all temperatures as one batch (K, *batch). A solve that fails, or that ends on a saddle of the
    free energy, is a gap in the curves; a method that cannot treat the system is in `refused`, with the reason.

    Args:
        system: the spins; its own beta is not used.
        methods: such as `[MeanField(), Bethe()]`, or by name. Methods for synchronous dynamics give the
            stationary state, all others thermodynamics.
        beta: inverse temperatures > 0, (K,).

    Returns:
        A `Sweep`, without graph.

    Raises:
        TypeError, ValueError: arguments that do not fit.

    Examples:
        >>> import torch
        >>> from implicit_attention.spins import Bethe, MeanField, SpinSystem, sweep
        >>> system = SpinSystem(torch.tensor([[0.0, 0.5], [0.5, 0.0]]), field=torch.tensor([[0.3], [0.0]]))
        >>> found = sweep(system, {"naive": MeanField(), "Bethe": Bethe()}, beta=torch.tensor([0.5, 1.0]))
        >>> {name: curves["mean_length"].tolist() for name, curves in found.curves.items()}["Bethe"][0] > 0
        True

    Not for gradients with respect to beta: put the temperatures into a batch of `thermodynamics`.
    """
    _validate.check_instance("system", system, SpinSystem, "be a SpinSystem")
    _validate.check_float_tensor("beta", beta, min_ndim=1)
    fits = beta.ndim == 1 and len(beta) > 0
    _validate.require(fits, "beta", "have shape (K,) with K > 0", f"shape {tuple(beta.shape)}", "use torch.linspace")
    remedy = "a temperature is positive and finite"
    good = torch.isfinite(beta) & (beta > 0)
    if not bool(good.all()):
        _validate.refuse("beta", "be > 0 everywhere", float(beta[~good][0]), remedy)
    beta = beta.detach().to(system.field)
    many = at_all(system, beta)
    results = Sweep(beta, {}, {})
    for name, method in (chosen := _named(methods)).items():
        try:
            method.check(many)
            if isinstance(method, DynamicalMethod) and many.graph is None:
                many.check_dense("for entropy production", "magnetization(system, method)")
        except ValueError as error:
            results.refused[name] = str(error)
            continue
        results.curves[name], results.failed[name], results.reports[name] = _curves(method, many)
    return dataclasses.replace(results, exact=[name for name in results.curves if chosen[name].exact])


def _named(methods: Any) -> dict[str, Approximation]:
    if not isinstance(methods, Mapping):
        if not isinstance(methods, Sequence) or isinstance(methods, str):
            remedy = "for example [MeanField(), Bethe()]"
            _validate.refuse("methods", "be several, in a list or by name", repr(methods), remedy, TypeError)
        kinds = [type(method).__name__ for method in methods]
        # Options distinguish two methods of one kind.
        methods = {k if kinds.count(k) == 1 else repr(m): m for k, m in zip(kinds, methods, strict=True)}
    _validate.require(len(methods) > 0, "methods", "name one method at least", "none", "for example [MeanField()]")
    required, remedy = "be an instance of Approximation", "such as Bethe()"
    for name, method in methods.items():
        _validate.check_instance(f"methods[{name!r}]", method, Approximation, required, remedy)
    return dict(methods)


def _curves(method: Approximation, many: SpinSystem) -> tuple[dict[str, Tensor], Tensor, SolveReport]:
    """The curves of a method, where it failed, and the report of its solve."""
    answer, numbers = solved(method, many)
    numbers["mean_length"] = mean_length(answer.magnetization, many)
    if isinstance(answer, Thermodynamics):
        largest = largest_susceptibility(answer)
        numbers |= {"largest_susceptibility": largest.value, "largest_susceptibility_error": largest.error_bound}
    # The susceptibility comes first, as its linear solves are evidence as well. An unstable solution is no state of
    # the system.
    failed = failed_of(answer.report) | (answer.report.status == Status.UNSTABLE)
    curves = {name: value.detach().masked_fill(failed, torch.nan) for name, value in numbers.items()}
    return curves, failed, answer.report


def solved(method: Approximation, system: SpinSystem) -> tuple[Thermodynamics | StationaryState, dict[str, Tensor]]:
    """Return an approximation's answer and its numbers (*batch), of an equilibrium or of synchronous dynamics."""
    if isinstance(method, DynamicalMethod):
        state = stationary_state(system, method, check="stability", on_failure="ignore")
        return state, {"entropy_production": state.entropy_production}
    answer = thermodynamics(system, method, on_failure="ignore")
    return answer, {name: getattr(answer, name) for name in SCALARS}


def failed_of(report: SolveReport) -> Tensor:
    """Return where a solve failed, or a linear solve behind one of its derivatives, (*batch)."""
    response = report.adjoint.failed
    return report.failed if response is None else report.failed | response.reshape(report.failed.shape)


def largest_susceptibility(result: Thermodynamics) -> Eigenvalue:
    """The largest eigenvalue of chi, (*batch): of the matrix if it is small, else by Lanczos on its products."""
    shape = result.magnetization.shape
    size = shape[-2] * shape[-1]
    if size <= DENSE:
        chi = result.susceptibility().detach().reshape(*shape[:-2], size, size)
        known = chi.isfinite().all(-1).all(-1)
        values = torch.linalg.eigvalsh(torch.where(known[..., None, None], chi, 0.0))[..., -1]
        return Eigenvalue(values.masked_fill(~known, torch.nan), torch.zeros_like(values))
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(result.magnetization)
    product = flattened(lambda v: result.susceptibility_product(v).detach(), result.magnetization)
    return extreme_eigenvalues(product, start.expand(*shape[:-2], -1), LANCZOS_STEPS)[1]


def at_all(system: SpinSystem, betas: Tensor) -> SpinSystem:
    """The system at every one of K temperatures: a batch (K, *batch)."""
    shape = (len(betas), *system.field.shape)
    beta = betas.reshape(-1, *(1,) * len(system.batch)).expand(len(betas), *system.batch)
    return system.at(system.field.expand(shape), system.couplings, beta)


def mean_length(m: Tensor, system: SpinSystem) -> Tensor:
    """The mean over sites of |m_i|/R, (*batch)."""
    lengths: Tensor = torch.linalg.vector_norm(m.detach(), dim=-1)
    return lengths.mean(-1) / system.radius
