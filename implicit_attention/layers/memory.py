"""Associative memories: stored patterns that are recalled, looked up, or asked by learned queries."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _validate
from .._types import OnFailure
from ..adjoints import Adjoint
from ..energies import AnchoredEnergy
from ..equilibrium import SolveOptions, attend
from ..potentials import LogSumExp
from ..problem import HALF
from ..solution import Evidence
from ..solvers import Solver
from .attention import ImplicitAttention
from .projections import LearnedAnchor, LearnedBeta, Scalar, anchor_or_beta

# With beta="auto" all other patterns together get this weight at a pattern that is closer to its neighbour than nine
# out of ten are.
LEAK = 1e-2
CLOSE = 0.1
# Patterns whose similarities are held at a time.
BLOCK = 512


class MemoryLookup(nn.Module):
    """A memory of patterns k_j with targets t_j: recalls the pattern that a query belongs to, and looks up its target.

    retrieve: z = anchor query + (1 - anchor) softmax(beta s(z, k)) K; lookup: softmax(beta s(z, k)) T, with
    s(z, k) = -|z - k|^2/2 ("distance") or <z, k> ("dot"). There is no projection: queries live where patterns live.

    `store(patterns)` and `retrieve(queries)` work at once. With `learned=True` patterns and targets are parameters.

    `solver`, `adjoint`, `max_steps` and `on_failure` are those of `equilibrium_attention`; max_steps=0 is one step of
    softmax.

    Args:
        dim: width of patterns and queries.
        size: number of learned patterns; memories that are not learned take what they are given.
        target_dim: width of learned targets, default `dim`.
        learned: whether patterns and targets are parameters.
        similarity: "distance" makes every stored pattern an attractor whatever its norm; "dot" is the classical energy.
        beta: inverse temperature: "auto" (from the distances between the stored patterns, so that a stored pattern
            recalls itself), "learned", or a number > 0. Default "auto", with learned patterns "learned".
        anchor: in [0, 1] or "learned". Default 0, pure recall: the query is only where it starts, and gets no
            gradient; with learned patterns "learned".

    Attributes:
        patterns: (M, dim); targets: (M, target_dim), or None: then a lookup gives the patterns' mean.
        last_solve: the `Evidence` of the last call.

    Gradients: with respect to patterns, targets, beta and anchor, and to queries with anchor > 0, to any order.

    Reference: Ramsauer et al. (2020), their layer with stored patterns; the distance is in Saha et al. (2023).
    """

    patterns: Tensor
    targets: Tensor | None
    last_solve: Evidence | None

    def __init__(
        self,
        dim: int,
        *,
        size: int | None = None,
        target_dim: int | None = None,
        learned: bool = False,
        similarity: Literal["distance", "dot"] = "distance",
        beta: Scalar | Literal["auto"] | None = None,
        anchor: Scalar | None = None,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        max_steps: int | None = None,
        on_failure: OnFailure = "warn",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        _validate.check_integer("dim", dim, low=1)
        _validate.check_choice("similarity", similarity, ("distance", "dot"))
        beta = ("learned" if learned else "auto") if beta is None else beta
        anchor = ("learned" if learned else 0.0) if anchor is None else anchor
        self.dim, self.learned, self.similarity, self.auto = dim, learned, similarity, beta == "auto"
        self.options = SolveOptions(solver=solver, adjoint=adjoint, max_steps=max_steps, on_failure=on_failure)
        if learned:
            if size is None:
                raise ValueError(_validate.message("size", "be given with learned=True", None, "say how many patterns"))
            _validate.check_integer("size", size, low=1)
            _validate.require(
                not self.auto,
                "beta",
                "be 'learned' or a number with learned=True",
                "'auto'",
                "patterns that move have no fixed distances",
            )
            width = dim if target_dim is None else target_dim
            self.patterns = nn.Parameter(torch.randn(size, dim, **made))
            self.targets = nn.Parameter(torch.randn(size, width, **made) / math.sqrt(size))
        else:
            for name, given in (("size", size), ("target_dim", target_dim)):
                remedy = "store(patterns, targets) brings them, or pass learned=True"
                _validate.require(given is None, name, "be None for a memory that is not learned", given, remedy)
            self.register_buffer("patterns", torch.zeros(0, dim, **made))
            self.register_buffer("targets", None)
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((), **made))
        self.beta = None
        if beta == "auto":
            self.register_buffer("found_beta", torch.ones((), **made))
        else:
            self.beta = anchor_or_beta("beta", beta, LearnedBeta((), dim**-0.5, **made))
        self.last_solve = None

    @torch.no_grad()
    def store(self, patterns: Tensor, targets: Tensor | None = None) -> None:
        """Add patterns (M, dim) with their targets (M, target_dim); learned ones are set to them instead."""
        _validate.check_float_tensor("patterns", patterns, min_ndim=2)
        _validate.require(
            patterns.ndim == 2 and patterns.shape[1] == self.dim and len(patterns) > 0,
            "patterns",
            f"have shape (M, {self.dim}) with M > 0",
            f"shape {tuple(patterns.shape)}",
        )
        if targets is not None:
            _validate.check_float_tensor("targets", targets, min_ndim=2)
            _validate.require(
                len(targets) == len(patterns),
                "targets",
                f"have one row for each of the {len(patterns)} patterns",
                f"shape {tuple(targets.shape)}",
                "use torch.nn.functional.one_hot(labels).float() for classes",
            )
        if self.learned:
            self._set("patterns", patterns)
            if targets is not None:
                self._set("targets", targets)
            return
        held = len(self.patterns)
        _validate.require(
            held == 0 or (targets is None) == (self.targets is None),
            "targets",
            "be given for all patterns or for none",
            "none" if targets is None else "targets beside patterns without any",
            "call clear() first",
        )
        self.patterns = torch.cat([self.patterns, patterns.to(self.patterns)])
        if targets is not None:
            old = [] if self.targets is None else [self.targets]
            self.targets = torch.cat([*old, targets.to(self.patterns)])
        if self.auto:
            self.found_beta = _separating_beta(self.patterns, self.similarity)

    def clear(self) -> None:
        """Forget all patterns and targets that were stored."""
        _validate.require(not self.learned, "learned", "be False to clear a memory", True)
        self.patterns, self.targets = self.patterns[:0], None

    def retrieve(self, queries: Tensor, **overrides: Any) -> Any:
        """The patterns that the queries (*batch, N, dim) belong to: the equilibria z, (*batch, N, dim).

        Overrides: solver, adjoint, max_steps, on_failure, and return_solution=True for (z, Solution).
        """
        return self._ask(queries, None, **overrides)

    def forward(self, queries: Tensor, **overrides: Any) -> Any:
        """The targets of the queries (*batch, N, dim), (*batch, N, target_dim); `overrides` as in `retrieve`."""
        return self._ask(queries, self.patterns if self.targets is None else self.targets, **overrides)

    def energy(self, queries: Tensor) -> Tensor:
        """E of every query (*batch, N, dim), (*batch, N): low near what is stored, up to a constant."""
        self._check_queries(queries)
        potential = LogSumExp(self.patterns, self._beta(), bias=self._bias())
        return AnchoredEnergy(potential, queries, self.anchor()).energy(queries)

    def _ask(
        self,
        queries: Tensor,
        values: Tensor | None,
        *,
        solver: Solver | None = None,
        adjoint: Adjoint | None = None,
        max_steps: int | None = None,
        on_failure: OnFailure | None = None,
        return_solution: bool = False,
    ) -> Any:
        self._check_queries(queries)
        options = self.options.override(solver=solver, adjoint=adjoint, max_steps=max_steps, on_failure=on_failure)
        output, solution, self.last_solve, _ = attend(
            queries,
            self.patterns,
            values,
            beta=self._beta(),
            anchor=self.anchor(),
            bias=self._bias(),
            options=options,
            measure=return_solution,
        )
        return (output, solution) if return_solution else output

    def _check_queries(self, queries: Tensor) -> None:
        _validate.check_float_tensor("queries", queries, min_ndim=2)
        _validate.require(
            queries.shape[-1] == self.dim, "queries", f"have width {self.dim}", f"shape {tuple(queries.shape)}"
        )
        _validate.require(len(self.patterns) > 0, "store", "be called before a memory is asked", "an empty memory")

    def _beta(self) -> float | Tensor:
        found: float | Tensor = self.found_beta if self.beta is None else self.beta()
        return found

    def _bias(self) -> Tensor | None:
        """-beta |k|^2/2, which makes a dot product a distance up to what all patterns share."""
        if self.similarity == "dot":
            return None
        return -self._beta() / 2 * self.patterns.square().sum(-1)

    def _set(self, name: str, given: Tensor) -> None:
        parameter = getattr(self, name)
        _validate.require(
            given.shape == parameter.shape, name, f"have shape {tuple(parameter.shape)}", f"shape {tuple(given.shape)}"
        )
        parameter.copy_(given)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A memory that is not learned takes the size of what it loads.
        if not self.learned and f"{prefix}patterns" in state_dict:
            self.patterns = torch.empty_like(state_dict[f"{prefix}patterns"]).to(self.patterns)
            targets = state_dict.get(f"{prefix}targets")
            self.targets = None if targets is None else torch.empty_like(targets).to(self.patterns)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last_solve": None}

    def extra_repr(self) -> str:
        parts = [f"{self.dim}", f"stored={len(self.patterns)}", f"similarity={self.similarity!r}"]
        parts += ["learned"] if self.learned else []
        return ", ".join(parts + ([f"beta=auto ({float(self.found_beta):.3g})"] if self.auto else []))


class AttentionPooling(nn.Module):
    """A set of any size pooled by learned queries that settle into it: (*batch, M, dim) -> (*batch, queries, dim).

    The head of multiple-instance learning: what makes a bag positive may be one instance among many.

    Args:
        dim: width of the instances and of the output.
        heads: number of heads.
        queries: number of learned queries.
        **attention: every other argument of `ImplicitAttention`.

    Raises:
        ValueError: anchor=0 with a solve, where the learned queries would never get a gradient.
    """

    def __init__(self, dim: int, heads: int, *, queries: int = 1, **attention: Any) -> None:
        super().__init__()
        _validate.check_integer("queries", queries, low=1)
        self.attention = ImplicitAttention(dim, heads, **attention)
        _validate.require(
            attention.get("anchor") != 0 or self.attention.options.explicit,
            "anchor",
            "be > 0 or 'learned' with learned queries, which get no gradient at 0",
            0,
        )
        made = {"device": attention.get("device"), "dtype": attention.get("dtype")}
        self.queries = nn.Parameter(torch.randn(queries, dim, **made))

    def forward(self, x: Tensor, **call: Any) -> Any:
        """Pool the instances x (*batch, M, dim); `key_mask` (*batch, M) says which of them exist.

        Args:
            x: the instances.
            **call: every other argument of `ImplicitAttention.forward`.
        """
        _validate.check_float_tensor("x", x, min_ndim=2)
        return self.attention(self.queries.expand(*x.shape[:-2], -1, -1), x, **call)


def _separating_beta(patterns: Tensor, similarity: str) -> Tensor:
    """The inverse temperature at which stored patterns recall themselves."""
    wide = patterns.float() if patterns.dtype in HALF else patterns
    gaps = torch.cat([_gaps(wide, part, similarity) for part in torch.split(torch.arange(len(wide)), BLOCK)])
    # Of a pattern that was stored twice both copies are the same attractor.
    gaps = gaps[(gaps > 0) & gaps.isfinite()]
    if gaps.numel() == 0:
        return patterns.new_ones(())
    # Not torch.quantile, which takes no more than 16 million numbers.
    close = gaps.sort().values[int(CLOSE * (len(gaps) - 1))]
    return (math.log(len(patterns) / LEAK) / close).to(patterns.dtype)


def _gaps(patterns: Tensor, rows: Tensor, similarity: str) -> Tensor:
    """How much better each of the patterns `rows` fits itself than its best rival does."""
    rows = rows.to(patterns.device)
    own = patterns[rows]
    if similarity == "distance":
        rivals = -torch.cdist(own, patterns).square() / 2
        fit = torch.zeros_like(rivals[:, 0])
    else:
        rivals = own @ patterns.mT
        fit = own.square().sum(-1)
    return fit - rivals.scatter(-1, rows[:, None], -torch.inf).amax(-1)
