"""Self-attention whose patterns move together: its energy, and attention repeated on its own output, which has none."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from .. import _validate
from ..potentials import LogSumExp
from ..potentials._shapes import Bias, Mask, PerBatch, States
from ..potentials.self_attention import SelfAttention
from .anchored import Anchored, AnchoredEnergy


class SelfAttentionEnergy(AnchoredEnergy):
    r"""The energy of attention whose keys move with its queries; with a the anchor and w the weight:

    ```math
    E(X) = \tfrac12 |X|^2 - a\,\langle X_0, X\rangle - (1 - a)\, w\, \Phi(X), \qquad
    \Phi(X) = \frac1\beta \sum_i \log \sum_j e^{\beta \langle x_i, x_j \rangle + \text{bias}_{ij}}
    ```

    Short for `AnchoredEnergy(weight * SelfAttention(beta), field, anchor)`. Phi has the gradient P X + P^T X with
    P = softmax(beta X X^T + bias), so f(X) = anchor X0 + (1 - anchor) weight (P X + P^T X), and with weight 1 and
    anchor 0 the gradient of E is X - P X - P^T X.

    Every pair enters Phi twice, as query and key. weight = 1/2 counts it once: tokens that agree are then a fixed point
    of f, which weight 1 would double. With c = (1 - anchor) weight and N tokens, E has a minimum if c < 1/(1 + sqrt N);
    without mask it has no lower bound if c > 1/(1 + sqrt N), though it may have local minima. Phi is not convex: steps
    of size below 2/(1 + c sqrt(N + 2)) descend from everywhere, so plain ones do where the minimum is certain;
    elsewhere solvers with an energy guard halve theirs.

    Args:
        field: the tokens X0 of every sample, (*batch, N, D); also their number and dimension.
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch. At 0 the field is not read.
        weight: > 0, of Phi.
        mask: boolean, broadcasts to (*batch, N, N); True = token i attends to token j.
        bias: added to the scaled scores, broadcasts to (*batch, N, N); -inf masks.

    A token that attends to none adds nothing to Phi. A sample is one problem (`event_ndim` 2): a NaN in it makes it
    NONFINITE, and touches no other.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0, an anchor outside [0, 1].

    Gradients: with respect to field, beta, anchor and bias, to any order.

    Not for causal attention: P^T X moves a token by those after it. Keep the keys fixed (`AnchoredEnergy` over
    `LogSumExp`), or use `RepeatedSelfAttention`.

    Examples:
        >>> import torch
        >>> from implicit_attention import SelfAttentionEnergy, solve
        >>> tokens = torch.linspace(-1, 1, 24).view(2, 4, 3)
        >>> energy = SelfAttentionEnergy(tokens, beta=0.5, anchor=0.5, weight=0.5)
        >>> solve(energy, tokens).converged
        tensor([True, True])
    """

    declares_all = True

    def __init__(
        self,
        field: States,
        beta: PerBatch,
        anchor: PerBatch = 0.0,
        *,
        weight: float = 1.0,
        mask: Mask = None,
        bias: Bias = None,
    ) -> None:
        weight = _validate.check_number("weight", weight, low=0.0, open_low=True)
        phi = SelfAttention(beta, mask=mask, bias=bias)
        super().__init__(phi if weight == 1 else weight * phi, field, anchor)

    def probabilities(self, x: States) -> Float[Tensor, "*batch N N"]:
        """P(X): row i says how token i attends to all tokens; zeros where it may attend to none."""
        phi: Any = (self.potential.parts or (self.potential,))[0]
        return phi.probabilities(x)  # type: ignore[no-any-return]


class RepeatedSelfAttention(Anchored):
    r"""Attention on its own output, the context reset to it after every step; with a the anchor:

    ```math
    X = a\,X_0 + (1 - a)\, P(X)\, X, \qquad P(X) = \operatorname{softmax}(\beta X X^\top + \text{bias})
    ```

    At a frozen context C a step is one of the energy `frozen_energy(C)`; resetting C to X moves that energy with it,
    and X - P(X) X is the gradient of no function of X: its Jacobian is not symmetric. What is missing is the key side
    P^T X, for which `SelfAttentionEnergy` stands.

    At anchor 0 without mask the solutions are the states of full consensus, each of them: which one is reached depends
    on where the iteration starts, I - df/dX is singular there, and `Implicit()` has no gradient (use `Unrolled()`).
    Take `Picard()` there: its steps stay in the convex hull of the tokens, while accelerated ones may lead to tokens so
    far apart that each attends to itself alone, which rounding makes a solution, too.

    A causal mask is respected: no token is moved by later ones.

    Args:
        field: the tokens X0 of every sample, (*batch, N, D); also their number and dimension.
        beta: inverse temperature > 0, a float or a tensor that broadcasts to *batch.
        anchor: in [0, 1], a float or a tensor that broadcasts to *batch. At 0 the field is not read.
        mask: boolean, broadcasts to (*batch, N, N); True = token i attends to token j.
        bias: added to the scaled scores, broadcasts to (*batch, N, N); -inf masks.

    For a token that attends to none P X is 0. A sample is one problem (`event_ndim` 2): a NaN in it makes it NONFINITE,
    and touches no other.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices that do not fit, beta <= 0, an anchor outside [0, 1].

    Gradients: with respect to field, beta, anchor and bias, to any order.

    Not for solvers or adjoints that need an energy (`GradientDescent`, conjugate gradients): use `SelfAttentionEnergy`.

    Examples:
        >>> import torch
        >>> from implicit_attention import RepeatedSelfAttention, solve
        >>> tokens, causal = torch.linspace(-1, 1, 24).view(2, 4, 3), torch.ones(4, 4, dtype=torch.bool).tril()
        >>> problem = RepeatedSelfAttention(tokens, beta=0.5, anchor=0.5, mask=causal)
        >>> solve(problem, tokens).converged
        tensor([True, True])
    """

    event_ndim = 2
    declares_all = True

    def __init__(
        self, field: States, beta: PerBatch, anchor: PerBatch = 0.0, *, mask: Mask = None, bias: Bias = None
    ) -> None:
        self.attention = SelfAttention(beta, mask=mask, bias=bias)
        self.attention.check_state("field", field)
        super().__init__(field, anchor)

    def probabilities(self, x: States) -> Float[Tensor, "*batch N N"]:
        """P(X): row i says how token i attends to all tokens; zeros where it may attend to none."""
        return self.attention.probabilities(x)

    def fixed_point_map(self, z: States) -> States:
        """f(X) = anchor X0 + (1 - anchor) P(X) X."""
        return self._anchored(self.probabilities(z) @ z)

    def frozen_energy(self, context: States) -> AnchoredEnergy:
        """The energy of every token while the context stays; at X = context its gradient is X - f(X)."""
        phi = self.attention
        return AnchoredEnergy(LogSumExp(context, phi.beta, mask=phi.mask, bias=phi.bias), self.field, self.anchor)
