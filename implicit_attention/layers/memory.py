"""Associative memories: stored patterns that are recalled or looked up."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from .. import _validate
from .._torch import HALF, at_least_single, in_own_precision
from ..attention.function import PotentialFactory, attend, made_by
from ..energies import AnchoredEnergy
from ..kernels.problem import Attention
from ..options import SolveKeywords, SolveOptions
from ..potentials import DistanceLogSumExp, LogSumExp
from ..potentials._clamped import Clamped, filled
from .calls import plain
from .projections import LearnedAnchor, LearnedBeta, Scalar, anchor_or_beta
from .remembering import Remembering
from .temperature import separating_beta


class MemoryLookup(Remembering):
    """A memory of patterns k_j with targets t_j: recalls the pattern that a query belongs to, and looks up its target.

    retrieve: z = anchor query + (1 - anchor) softmax(beta s(z, k)) K; lookup: softmax(beta s(z, k)) T, with
    s(z, k) = -|z - k|^2/2 ("distance") or <z, k> ("dot"). There is no projection: queries live where patterns live.

    `store(patterns)` and `retrieve(queries)` work without training. With `learned=True` patterns and targets are
    parameters. With max_steps=0 nothing is solved: retrieve takes one step,
    z = anchor query + (1 - anchor) softmax(beta s(query, k)) K, and lookup is taken at the query.

    Args:
        dim: width of patterns and queries.
        size: number of learned patterns; a memory that is not learned grows with what is stored.
        target_dim: width of learned targets, default `dim`; stored ones have any width.
        learned: whether patterns and targets are parameters.
        similarity: "distance" makes every stored pattern an attractor whatever its norm; "dot" is the classical energy.
        beta: inverse temperature: "auto" (from the similarities of the stored patterns, so that nine out of ten recall
            themselves, with "dot" nine out of ten of those that any temperature makes attractors), "learned" (from
            1/sqrt(dim)), or a number > 0. Default "auto", with learned patterns "learned".
        anchor: in [0, 1] or "learned" (from .5, inside (0, 1)). Default 0, pure recall: the query is only where a solve
            starts, and gets no gradient from it; with learned patterns "learned".
        potential: makes the potential of the patterns in place of the similarity's, (patterns, beta) -> Potential; it
            needs a `beta`. For patterns that are spread over processes each process stores its own, or none, in a
            memory with `functools.partial(ShardedLogSumExp, group=group)`, and all call it together.
        device: of patterns and targets.
        dtype: of patterns and targets.
        **options: how equilibria are found and differentiated, see `SolveOptions`.

    Attributes:
        patterns: (M, dim).
        targets: (M, target_dim), or None: then a lookup gives the patterns' mean.
        found_beta: with beta="auto", the temperature for the stored patterns; float32 also in half precision.
        options: the `SolveOptions` of the memory, which a call may override.
        last_solve: the `SolveReport` of the last `retrieve` or lookup. Not part of the state dict, of copies and of
            pickles.

    Gradients: with respect to learned patterns, targets, beta and anchor, and to queries with anchor > 0, to any order.

    Reference: Ramsauer et al. (2020), their layer with stored patterns; the distance is in Saha et al. (2023).

    Examples:
        >>> import torch
        >>> from implicit_attention import MemoryLookup
        >>> patterns, memory = torch.eye(4), MemoryLookup(4)
        >>> memory.store(patterns, targets=torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        >>> memory.retrieve(patterns[:2] + 0.1).round(decimals=1)
        tensor([[1., 0., 0., 0.],
                [0., 1., 0., 0.]])
        >>> memory(patterns[2:] + 0.1).round(decimals=1)
        tensor([[3.],
                [4.]])

    Not for nearest-neighbour search among many patterns: each evaluation of a solve reads all of them.
    """

    patterns: Tensor
    targets: Tensor | None
    found_beta: Tensor

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
        potential: PotentialFactory | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[SolveKeywords],
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.dim = _validate.check_integer("dim", dim, low=1)
        _validate.check_choice("similarity", similarity, ("distance", "dot"))
        beta = ("learned" if learned else "auto") if beta is None else beta
        anchor = ("learned" if learned else 0.0) if anchor is None else anchor
        self.learned, self.similarity, self.auto = learned, similarity, beta == "auto"
        self.potential = potential
        fits, required = potential is None or not self.auto, "be a number or 'learned' with potential="
        remedy = "'auto' reads the similarities of the patterns, which say nothing of a potential of your own"
        _validate.require(fits, "beta", required, "'auto'", remedy)
        self.options = SolveOptions().override(**options)
        if learned:
            if size is None:
                raise ValueError(_validate.message("size", "be given with learned=True", None, "say how many patterns"))
            size = _validate.check_integer("size", size, low=1)
            remedy = "patterns that move have no fixed distances"
            _validate.require(not self.auto, "beta", "be 'learned' or a number with learned=True", "'auto'", remedy)
            width = dim if target_dim is None else target_dim
            self.patterns = nn.Parameter(torch.randn(size, dim, **place))
            self.targets = nn.Parameter(torch.randn(size, width, **place) / math.sqrt(size))
        else:
            for name, number in (("size", size), ("target_dim", target_dim)):
                remedy = "store(patterns, targets) brings them, or pass learned=True"
                _validate.require(number is None, name, "be None for a memory that is not learned", number, remedy)
            self.register_buffer("patterns", torch.zeros(0, dim, **place))
            self.register_buffer("targets", None)
        self.anchor = anchor_or_beta("anchor", anchor, LearnedAnchor((), **place))
        self.beta = None
        if beta == "auto":
            self.register_buffer("found_beta", at_least_single(torch.ones((), **place)))
        else:
            self.beta = anchor_or_beta("beta", beta, LearnedBeta((), dim**-0.5, **place))

    # Normal tensors are stored in inference mode, too, as later gradients may pass through them.
    @torch.inference_mode(False)
    @torch.no_grad()
    @in_own_precision
    def store(self, patterns: Tensor, targets: Tensor | None = None) -> None:
        """Add patterns (M, dim) with their targets (M, target_dim); learned ones are set to them instead.

        Copies are stored: no gradient reaches the arguments. Learned patterns and targets get their own gradients,
        others are constants.

        Args:
            patterns: (M, dim); of a learned memory all of them, M = size.
            targets: (M, target_dim), for all patterns of a memory or for none. Learned targets that are as wide as the
                patterns are set to the patterns by default.
        """
        _validate.check_float_tensor("patterns", patterns, min_ndim=2)
        rows = len(self.patterns) if self.learned else max(len(patterns), 1)
        required = f"have shape ({rows}, {self.dim})" if self.learned else f"have shape (M, {self.dim}) with M > 0"
        _validate.require(patterns.shape == (rows, self.dim), "patterns", required, f"shape {tuple(patterns.shape)}")
        if self.auto:
            _validate.check_numbers("patterns", patterns, "beta='auto' reads them; pass a number for beta")
        targets = self._checked_targets(patterns, targets)
        if self.learned:
            assert self.targets is not None
            assert targets is not None
            self.patterns.copy_(patterns)
            self.targets.copy_(targets)
            return
        if targets is not None:
            targets = targets.to(self.patterns)
            self.targets = torch.cat([targets] if self.targets is None else [self.targets, targets])
        self.patterns = torch.cat([self.patterns, patterns.to(self.patterns)])
        if self.auto:
            self.found_beta = separating_beta(self.patterns, self.similarity)

    def _checked_targets(self, patterns: Tensor, targets: Tensor | None) -> Tensor | None:
        """The targets to store with `patterns`: learned ones are the patterns by default."""
        width = None if self.targets is None else self.targets.shape[1]
        if targets is None and self.learned:
            required = f"be given: they have width {width}, so that patterns of width {self.dim} cannot be their own"
            remedy = "pass them, or make the memory without target_dim to look up the patterns themselves"
            _validate.require(width == self.dim, "targets", required, None, remedy)
            return patterns
        if not self.learned:
            alike = len(self.patterns) == 0 or (targets is None) == (width is None)
            received = "none" if targets is None else "targets beside patterns without any"
            _validate.require(alike, "targets", "be given for all patterns or for none", received, "call clear() first")
        if targets is None:
            return None
        _validate.check_float_tensor("targets", targets, min_ndim=2)
        received = f"shape {tuple(targets.shape)}"
        required = f"have one row for each of the {len(patterns)} patterns, shape ({len(patterns)}, target_dim)"
        remedy = "use torch.nn.functional.one_hot(labels).float() for classes"
        fits = targets.ndim == 2 and len(targets) == len(patterns)
        _validate.require(fits, "targets", required, received, remedy)
        remedy = f"make the memory with target_dim={targets.shape[1]}" if self.learned else "call clear() first"
        fits = width in (None, targets.shape[1])
        _validate.require(fits, "targets", f"have the width {width} of those held", received, remedy)
        return targets

    def clear(self) -> None:
        """Forget all stored patterns and targets, and their temperature."""
        _validate.require(not self.learned, "learned", "be False to clear a memory", True)
        self.patterns, self.targets = self.patterns.new_zeros(0, self.dim), None
        if self.auto:
            self.found_beta = torch.ones_like(self.found_beta)

    def retrieve(
        self,
        queries: Tensor,
        *,
        known: Tensor | None = None,
        clamp: bool = True,
        return_solution: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """The patterns that the queries (*batch, N, dim) belong to: the equilibria z, of that shape.

        For queries with unknown entries the solve starts at the known ones and at a mean of the patterns that are near
        there, sum_j p_j k_j with p = softmax(-beta |P (query - k_j)|^2/2), where P projects on the known entries. Then
        z is `query` on known entries and softmax(beta s(z, k)) K on the others, whatever the anchor. With clamp=False
        that start takes the place of the query: known entries that are noisy settle, too.

        Args:
            queries: (*batch, N, dim).
            known: boolean, broadcasts to the queries; True = the entry is known. Others are not read, and may be NaN.
                A query without known entries starts at the mean of the patterns.
            clamp: whether known entries stay as they are.
            return_solution: return (z, Solution).
            **options: replace the memory's for this call, see `SolveOptions`.

        Raises:
            TypeError, ValueError: queries or a mask that do not fit; `known` in a memory with `potential=`, whose
                distance is not known.

        Gradients: with `known`, to known entries (with clamp=False those that pass by the anchor alone), patterns and
            beta, to any order.

        Examples:
            >>> import torch
            >>> from implicit_attention import MemoryLookup
            >>> memory, nan = MemoryLookup(4), torch.nan
            >>> memory.store(torch.tensor([[1.0, 2, 3, 4], [4.0, 3, 2, 1], [1.0, 0, 0, 4]]))
            >>> half = torch.tensor([[nan, nan, 3.0, 4.0], [nan, nan, 0.0, 4.0]])
            >>> memory.retrieve(half, known=half.isfinite()).round(decimals=1) + 0.0
            tensor([[1., 2., 3., 4.],
                    [1., 0., 0., 4.]])
        """
        return self._ask(queries, None, return_solution, options, known, clamp)

    def forward(
        self,
        queries: Tensor,
        *,
        known: Tensor | None = None,
        clamp: bool = True,
        return_solution: bool = False,
        **options: Unpack[SolveKeywords],
    ) -> Any:
        """Look up the targets, (*batch, N, target_dim), of queries (*batch, N, dim). Arguments as in `retrieve`."""
        values = self.patterns if self.targets is None else self.targets
        return self._ask(queries, values, return_solution, options, known, clamp)

    if TYPE_CHECKING:
        _call = plain(forward)
        __call__ = _call

    @in_own_precision
    def energy(self, queries: Tensor) -> Tensor:
        """E of every query (*batch, N, dim), (*batch, N): low near stored patterns, up to a constant.

        In float32 for half precision, as in solves.
        """
        self._check_queries(queries)
        queries, keys = at_least_single(queries), at_least_single(self.patterns)
        beta, anchor = (t.to(queries.dtype) if isinstance(t, Tensor) else t for t in (self._beta(), self.anchor()))
        return AnchoredEnergy(made_by(self._factory(), keys, beta), queries, anchor).energy(queries)

    def _ask(
        self,
        queries: Tensor,
        values: Tensor | None,
        return_solution: bool,
        options: SolveKeywords,
        known: Tensor | None,
        clamp: bool,
    ) -> Any:
        self._check_queries(queries)
        start, anchor, make = queries, self.anchor(), self._factory()
        if known is not None:
            self._check_known(known, queries)
            start = filled(queries, known, self.patterns, self._beta())
            if clamp:
                # Other patterns must not pull the known entries, and the query must not pull the unknown ones.
                make, anchor = functools.partial(_clamped, make, known.expand(start.shape), start), 0.0
        call = Attention(start, self.patterns, self._beta(), anchor, values=values)
        chosen, site = self.options.override(**options), self._site
        answer = attend(call, chosen, potential=make, return_solution=return_solution, site=site)
        self._remember(answer.report)
        output, unread = answer.output, self.anchor()
        if isinstance(unread, Tensor) and anchor is not unread and unread.requires_grad:
            # A parameter without any gradient stops distributed training.
            output = output + 0 * unread.sum().to(output.dtype)
        return (output, answer.solution) if return_solution else output

    def _check_queries(self, queries: Tensor) -> None:
        _validate.check_float_tensor("queries", queries, min_ndim=2)
        fits, received = queries.shape[-1] == self.dim, f"shape {tuple(queries.shape)}"
        _validate.require(fits, "queries", f"have width {self.dim}", received)
        # Patterns that are spread over processes may all be elsewhere.
        fits = len(self.patterns) > 0 or self.potential is not None
        _validate.require(fits, "store", "be called before a memory is asked", "an empty memory")

    def _check_known(self, known: Tensor, queries: Tensor) -> None:
        _validate.check_boolean("known", known, "be a boolean tensor", "True says that an entry is known")
        _validate.check_same_kind([("queries", queries), ("known", known)])
        _validate.check_broadcast("known", known.shape, queries.shape, "the shape of `queries`")
        remedy = "fill the unknown entries yourself"
        required = "be None with potential=, whose distances over known entries are not known"
        _validate.require(self.potential is None, "known", required, f"shape {tuple(known.shape)}", remedy)

    def _beta(self) -> float | Tensor:
        beta: float | Tensor = self.found_beta if self.beta is None else self.beta()
        return beta

    def _factory(self) -> PotentialFactory:
        if self.potential is not None:
            return self.potential
        return LogSumExp if self.similarity == "dot" else DistanceLogSumExp

    @torch.inference_mode(False)
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A memory that is not learned takes the size that it loads; for another `dim` torch raises its own error.
        patterns, targets = (state_dict.get(f"{prefix}{name}") for name in ("patterns", "targets"))
        if not self.learned and patterns is not None and patterns.shape[1:] == self.patterns.shape[1:]:
            self.patterns = self.patterns.new_empty(patterns.shape)
            self.targets = None if targets is None else self.patterns.new_empty(targets.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # A temperature may be too small for half precision.
        before = self.found_beta if self.auto else None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.found_beta.dtype in HALF:
            self.found_beta = before.to(self.found_beta.device)
        return self

    def extra_repr(self) -> str:
        parts = [f"{self.dim}", f"stored={len(self.patterns)}", f"similarity={self.similarity!r}"]
        parts += ["learned"] if self.learned else []
        return ", ".join(parts + ([f"beta=auto ({float(self.found_beta):.3g})"] if self.auto else []))


def _clamped(make: PotentialFactory, known: Tensor, at: Tensor, keys: Tensor, beta: float | Tensor) -> Clamped:
    """The potential that `make` makes, with known entries fixed at those of `at`."""
    return Clamped(make(keys, beta), known, at.to(keys.dtype))
