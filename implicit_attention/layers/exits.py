"""Rules that end tokens of a causal layer before they settle, in evaluation: adaptive depth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _validate
from .._torch import norm
from ..problem import pick, put
from ..solution import SolveReport
from ..solvers import Iteration

#: The names of the rules, by their code; tokens behind one that a rule ended have settled beside that past alone.
RULES = ("", "tolerance", "evaluations", "mean", "readout", "past")

#: Relative steps are at least this.
TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exit:
    """When the tokens of a causal layer may stop before they have settled; the first rule that holds ends a token.

    A token that a rule ended has the status BUDGET. Its state is the image f(z) of the state z that was evaluated last,
    whose keys later tokens read: e evaluations apply the block e times, as a loop of e steps does.

    Args:
        rtol: end where the last step |f(z) - z| is at most rtol |f(z)|.
        evaluations: end after so many evaluations.
        mean: end so that a token of the call gets so many evaluations in the mean. After each evaluation the tokens go
            on whose relative step is above the level that the rest of the budget would bring all steps to, if they
            went on to shrink as they do.
        readout: a function of states (*batch, n, D), or a module, that returns logits: end where the predicted
            distribution p(f(z)) differs from p(z) by at most `nats`.
        nats: the Kullback-Leibler divergence of the two for `readout`.

    Raises:
        TypeError, ValueError: numbers that are out of range; no rule at all.

    Examples:
        >>> import torch
        >>> from implicit_attention import EquilibriumTransformer
        >>> from implicit_attention.layers import Exit
        >>> model, x = EquilibriumTransformer(16, heads=2, causal=True).eval(), torch.randn(2, 6, 16)
        >>> with torch.no_grad():
        ...     z = model(x, exit=Exit(rtol=0.3, evaluations=4))
        >>> bool((model.last_solve.num_evals <= 4).all()), model.last_solve.rules[2]
        (True, 'evaluations')

    With a cache or `chunk` a token reads earlier ones as they ended, in one call as they are after as many evaluations.
    So other tokens end, at other states (by .3 to .5 at rtol=.3): judge a model that decodes with rules by decoding.

    Not for training, nor where states must be right: a token that a rule ended is no fixed point.
    """

    rtol: float | None = None
    evaluations: int | None = None
    mean: float | None = None
    readout: Callable[[Any], Tensor] | None = None
    nats: float = 0.01

    def __post_init__(self) -> None:
        for name in ("rtol", "nats"):
            if getattr(self, name) is not None:
                _validate.check_number(name, getattr(self, name), low=0.0)
        if self.evaluations is not None:
            _validate.check_integer("evaluations", self.evaluations, low=1)
        if self.mean is not None:
            _validate.check_number("mean", self.mean, low=1.0)
        readout: Any = self.readout
        if readout is not None and not callable(readout):
            received = type(readout).__name__
            raise TypeError(_validate.message("readout", "be a function of states, or a module", received))
        given = (self.rtol, self.evaluations, self.mean, self.readout)
        required, remedy = "name a rule", "for example Exit(rtol=0.3)"
        _validate.require(any(rule is not None for rule in given), "Exit", required, "none", remedy)


def checked_exit(given: Any) -> Exit | None:
    """The rules of an argument `exit`: a number is a tolerance."""
    if given is None or isinstance(given, Exit):
        return given
    if isinstance(given, bool) or not isinstance(given, float | int):
        remedy = "for example exit=0.3, or Exit(evaluations=4)"
        raise TypeError(_validate.message("exit", "be an Exit, or a tolerance", type(given).__name__, remedy))
    return Exit(rtol=float(given))


class Exits:
    """The tokens of one solve that rules have ended.

    Args:
        rules: when tokens end.
        start: the states, (*batch, n, *event).
        event_ndim: the number of axes of one token's state.
        count: the number of tokens that exist.
        unpack: from the tensor of a solver to the state that a read-out takes.
        damping: of a plain step.
    """

    def __init__(
        self,
        rules: Exit,
        start: Tensor,
        event_ndim: int,
        count: int,
        unpack: Callable[[Tensor], Any],
        damping: float,
    ) -> None:
        self.rules, self.unpack, self.damping = rules, unpack, damping
        self.value = start.flatten(start.ndim - event_ndim)
        self.code = torch.zeros(start.shape[: start.ndim - event_ndim], dtype=torch.int8, device=start.device)
        self.step = torch.full_like(self.value[..., 0], torch.nan)
        #: Logarithms of the relative steps at the last evaluation, (*batch, n).
        self.size: Tensor | None = None
        self.left = math.inf if rules.mean is None else rules.mean * count

    def end(
        self, active: Tensor, converged: Tensor | None, point: Iteration, index: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The tokens that a rule ends now, and those whose own residual is within the tolerance, (*lead).

        index: the places of the working tokens, (*batch, K); None for all.
        """
        small = torch.zeros_like(active) if converged is None else converged
        going, code = active & ~small, torch.zeros_like(active, dtype=torch.int8)
        relative = point.residual / norm(point.mapped)
        rules = self.rules
        if rules.rtol is not None:
            code = self._marked(code, going & (relative <= rules.rtol), "tolerance")
        if rules.evaluations is not None and point.step + 1 >= rules.evaluations:
            code = self._marked(code, going, "evaluations")
        if rules.readout is not None:
            code = self._marked(code, going & (self._change(point) <= rules.nats), "readout")
        if rules.mean is not None:
            self.left -= int(active.sum())
            rest = going & (code == 0)
            code = self._marked(code, rest & ~self._worth_more(rest, relative, index), "mean")
        ended = code > 0
        image = point.mapped - self.damping * (point.mapped - point.z) if self.damping else point.mapped
        self._store(ended, code, relative, image, index)
        return ended, small

    def _worth_more(self, rest: Tensor, relative: Tensor, index: Tensor | None) -> Tensor:
        """Which tokens of the `rest` get a further evaluation of the budget that is left, (*lead)."""
        size = relative.nan_to_num(1.0).clamp(TINY, 1 / TINY).log()
        before = None if self.size is None else self.size if index is None else pick(self.size, index)
        self.size = size if index is None or self.size is None else put(self.size, index, size)
        sorted_sizes, count = size[rest].sort(descending=True).values, int(rest.sum())
        most = min(count, int(self.left))
        if most < 1:
            return torch.zeros_like(rest)
        # The logarithm by which an evaluation shrinks a step.
        shrink = math.log(2) if before is None else max(float((before - size)[rest].median()), 0.1)
        # Sizes above the level add up to what the budget takes away.
        numbers = torch.arange(1, count + 1, device=size.device)
        levels = (sorted_sizes.cumsum(0) - self.left * shrink) / numbers
        level = float(levels[max(int((sorted_sizes > levels).sum()), 1) - 1])
        # Half an evaluation or more is one; what is left over goes to the largest.
        chosen = min(int((sorted_sizes >= level + shrink / 2).sum()), most) or most
        # By number, as sizes may be equal: all are 1 where the start is 0.
        kept = torch.zeros_like(rest).flatten()
        kept[size.masked_fill(~rest, -torch.inf).flatten().topk(chosen).indices] = True
        return kept.view_as(rest)

    def mark_behind(self, settled: Tensor, behind: Tensor, index: Tensor | None) -> None:
        """Note tokens that have settled behind others that a rule ended."""
        code = self.code if index is None else pick(self.code, index)
        code = self._marked(code, settled & behind, "past")
        self.code = code if index is None else put(self.code, index, code)

    def ended_at(self, index: Tensor | None) -> Tensor:
        """The working tokens that a rule has ended so far."""
        return (self.code if index is None else pick(self.code, index)) > 0

    @staticmethod
    def _marked(code: Tensor, which: Tensor, rule: str) -> Tensor:
        """The codes in which those of `which` that no rule has ended are ended by this one."""
        return code.masked_fill(which & (code == 0), RULES.index(rule))

    def _change(self, point: Iteration) -> Tensor:
        """The divergence of the distributions that are read out of f(z) and of z, (*lead)."""
        assert self.rules.readout is not None
        shape, scores = (*point.z.shape[:-1], *point.event_shape), []
        for states in (point.mapped, point.z):
            logits: Any = self.rules.readout(self.unpack(states.reshape(shape)))
            fits = isinstance(logits, Tensor) and logits.ndim > 0 and logits.shape[:-1] == states.shape[:-1]
            received = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            required = f"return logits {(*states.shape[:-1], 'C')} for states {shape}"
            _validate.require(fits, "readout", required, received)
            scores.append(logits.log_softmax(-1))
        new, old = scores
        change: Tensor = (new.exp() * (new - old)).sum(-1)
        return change

    def _store(self, ended: Tensor, code: Tensor, relative: Tensor, image: Tensor, index: Tensor | None) -> None:
        parts = []
        for kept, new in ((self.code, code), (self.step, relative), (self.value, image)):
            where = ended if new.ndim == ended.ndim else ended[..., None]
            old = kept if index is None else pick(kept, index)
            joined = torch.where(where, new, old)
            parts.append(joined if index is None else put(kept, index, joined))
        self.code, self.step, self.value = parts


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ExitReport(SolveReport):
    """The report of a solve with rules that end tokens.

    Attributes:
        rule: the code of the rule that ended each token, (*batch, N); 0 where it was solved, or has failed.
        rules: the names of the rules by their code.
        step: the last relative step |f(z) - z|/|f(z)| of tokens that a rule ended, (*batch, N); NaN for others.

    Examples:
        >>> import torch
        >>> from implicit_attention import EquilibriumTransformer
        >>> model, x = EquilibriumTransformer(16, heads=2, causal=True).eval(), torch.randn(1, 3, 16)
        >>> with torch.no_grad():
        ...     z = model(x, exit=0.9)
        >>> [model.last_solve.rules[code] for code in model.last_solve.rule[0].tolist()]
        ['tolerance', 'tolerance', 'tolerance']

    Not for solves without rules, whose `SolveReport` says all.
    """

    rule: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0, dtype=torch.int8))
    step: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    rules: tuple[str, ...] = RULES

    def __repr__(self) -> str:
        counts = torch.bincount(self.rule.flatten().long(), minlength=len(RULES)).tolist()
        ended = ", ".join(f"{count} by {name}" for name, count in zip(RULES, counts, strict=True) if name and count)
        return f"{type(self).__name__}({self._summary()}; ended: {ended or 'none by a rule'})"
