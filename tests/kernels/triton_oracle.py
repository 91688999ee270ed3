"""What the Triton kernels are compared with: every matrix written out, in float64 or in the precision of a kernel."""

import dataclasses

import torch

EPS = torch.finfo(torch.float32).eps
#: In half precision a query is evaluated finely from where its residual is its tolerance or this part of |f(z)|, or
#: would be its tolerance at the next step if it shrank as at this one; and after so many steps.
ROUNDING, PATIENCE = 1e-3, 24
#: What residuals in half precision are known to, in units of |f(z)|.
FLOOR = 2e-6


@dataclasses.dataclass
class Dense:
    """A problem with all its batch axes, its (N, M) mask and bias written out, in float64."""

    field: torch.Tensor
    keys: torch.Tensor
    beta: torch.Tensor
    anchor: torch.Tensor
    bias: torch.Tensor  # 0 or what is added, -inf where the query does not attend

    @classmethod
    def of(cls, problem):
        *lead, n, dim = problem.query.shape
        m = problem.keys.shape[-2]
        bias = torch.zeros(*lead, n, m, dtype=torch.float64, device=problem.query.device)
        if problem.pairs is not None and problem.pairs.dtype == torch.bool:
            bias = bias.masked_fill(~problem.pairs, -torch.inf)
        elif problem.pairs is not None:
            bias = bias + problem.pairs.double()
        if problem.first is not None:
            later = torch.ones(n, m, dtype=torch.bool, device=bias.device).triu(problem.first + 1)
            bias = bias.masked_fill(later, -torch.inf)
        beta, anchor = (
            torch.as_tensor(number, dtype=torch.float64, device=bias.device)[..., None, None].expand(*lead, 1, 1)
            for number in (problem.beta, problem.anchor)
        )
        return cls(
            field=problem.query.double().masked_fill(anchor == 0, 0.0),
            keys=problem.keys.double().expand(*lead, m, dim),
            beta=beta,
            anchor=anchor,
            bias=bias,
        )

    def probabilities(self, z, keys=None, beta=None):
        keys, beta = self.keys if keys is None else keys, self.beta if beta is None else beta
        scores = beta * (z @ keys.mT) + self.bias
        empty = (self.bias == -torch.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        return (scores - logsumexp).exp().masked_fill(empty, 0.0), logsumexp.masked_fill(empty, 0.0)[..., 0]

    def attend(self, z):
        """Mean and log-sum-exp at z, exactly."""
        p, logsumexp = self.probabilities(z)
        return p @ self.keys, logsumexp

    def attend_in(self, dtype):
        """The same as plain torch computes it: operands of `dtype`, sums in float32."""

        def attend(z):
            keys, bias = self.keys.float(), self.bias.float()
            scores = self.beta.float() * (z.to(dtype).float() @ keys.mT) + bias
            peak = scores.amax(-1, keepdim=True)
            p = (scores - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
            total = p.sum(-1, keepdim=True)
            empty = total == 0
            mean = p.to(dtype).float() @ keys / total.masked_fill(empty, 1.0)
            return mean, (peak + total.log()).masked_fill(empty, 0.0)[..., 0]

        return attend

    def mapped(self, mean):
        anchor = self.anchor.to(mean.dtype)
        return anchor * self.field.to(mean.dtype) + (1 - anchor) * mean

    def energy(self, z, logsumexp):
        anchor, beta, field = (t.to(z.dtype) for t in (self.anchor, self.beta, self.field))
        return (z * (z / 2 - anchor * field)).sum(-1) - ((1 - anchor) / beta)[..., 0] * logsumexp

    def hessian(self, z):
        """I - (1 - anchor) beta Cov(z), (*batch, N, D, D)."""
        p, _ = self.probabilities(z)
        mean = p @ self.keys
        second = torch.einsum("...nm,...md,...me->...nde", p, self.keys, self.keys)
        covariance = second - mean[..., :, None] * mean[..., None, :]
        return (
            torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
            - ((1 - self.anchor) * self.beta)[..., None] * covariance
        )


@dataclasses.dataclass
class Path:
    """Where the rule led every query; how many steps in all were accelerated, rejected, cut, and led down a hill."""

    state: torch.Tensor
    mean: torch.Tensor
    logsumexp: torch.Tensor
    residual: torch.Tensor
    tolerance: torch.Tensor
    status: torch.Tensor
    num_steps: torch.Tensor
    num_evals: torch.Tensor
    accelerated: int = 0
    rejected: int = 0
    cut: int = 0
    downhill: int = 0


def chosen(rows, new, old):
    """The new tensors where `rows` says so, the old ones elsewhere."""
    return tuple(
        torch.where(rows[..., None] if one.ndim > rows.ndim else rows, one, other)
        for one, other in zip(new, old, strict=True)
    )


def follow(dense, initial, stop, attend=None, half=False):
    """The rule, written a second time: plain steps, then an accelerated one wherever it promises and keeps descent.

    half: `attend(z, fine)` takes which queries are evaluated finely: those that have been near, all in the end.
    """
    attend = attend or dense.attend
    z = initial
    rows = z.shape[:-1]
    device = z.device
    held, status = None, torch.full(rows, -1, device=device)
    steps, evals = (
        torch.zeros(rows, dtype=torch.int64, device=device),
        torch.zeros(rows, dtype=torch.int64, device=device),
    )
    running = torch.ones(rows, dtype=torch.bool, device=device)
    tried, near = torch.zeros_like(running), torch.full_like(running, not half)
    base, counts = None, dict.fromkeys(("accelerated", "rejected", "cut", "downhill"), 0)
    for step in range(stop.max_steps + 1):
        fine = near | (step == stop.max_steps)
        mean, logsumexp = attend(z, fine) if half else attend(z)
        f = dense.mapped(mean)
        r, length = f - z, f.norm(dim=-1)
        size, energy = r.norm(dim=-1), dense.energy(z, logsumexp)
        goal = stop.atol + stop.rtol * length
        finite = size.isfinite() & goal.isfinite()
        good = torch.ones_like(running)
        if base is not None:
            need, noise = base[2] ** 2 / 4, EPS * torch.maximum(energy.abs(), base[3].abs())
            by_slope = ((base[1] + r) * (z - base[0])).sum(-1) / 2 >= need
            good = ~tried | (finite & torch.where(need > 4 * noise, base[3] - energy >= need - noise, by_slope))
        counts["rejected"] += int((running & ~good).sum())
        now = running & good
        kept = now & (finite | (step == 0))
        here = (torch.where(finite[..., None], z, torch.nan), mean, logsumexp, size, goal)
        held = here if held is None else chosen(kept, here, held)
        steps = torch.where(kept, step, steps)
        evals = evals + running
        soon = size <= torch.maximum(goal, ROUNDING * length)
        if base is not None:
            soon = soon | (size * (size / base[2]) <= goal)
        near = near | (good & soon) | (step >= PATIENCE)
        known = FLOOR * length if half else 0.0
        met = now & finite & fine & (size <= goal - known) & (not stop.fixed_budget)
        status = torch.where(met, 0, status)
        status = torch.where(now & ~finite, 7 if step == 0 else 6, status)
        running = running & ~met & ~(now & ~finite)
        if step >= stop.plain_steps and base is not None:
            dz, dr = z - base[0], r - base[1]
            mix = r - ((dr * r).sum(-1) / (dr * dr).sum(-1))[..., None] * (dz + dr)
            long = mix.norm(dim=-1) > 30 * size
            mix = mix * (30 * size / mix.norm(dim=-1)).clamp(max=1)[..., None]
            down = (dz * dr).sum(-1) >= 0
            promises = mix.isfinite().all(-1) & ((r * mix).sum(-1) >= size**2 / 2)
            tried = good & (down | promises) & (step + 1 < stop.max_steps)
            move = torch.where(tried[..., None], torch.where(down[..., None], 4 * r, mix), r)
            counts["accelerated"] += int((running & tried).sum())
            counts["cut"] += int((running & tried & long & ~down).sum())
            counts["downhill"] += int((running & tried & down).sum())
        else:
            tried, move = torch.zeros_like(running), r
        fresh = (z, r, size, energy)
        base = fresh if base is None else chosen(good, fresh, base)
        z = base[0] + torch.where(good[..., None], move, base[1])
    return Path(*held, torch.where(running, int(stop.exhausted), status), steps, evals, **counts)


def adjoint(dense, problem, state, cotangent):
    """Exact u with A u = cotangent; u -> (by_keys of the keys' shape, by_beta per query) by autograd."""
    value = torch.linalg.solve(dense.hessian(state), cotangent[..., None])[..., 0]

    def gradients(value):
        keys = problem.keys.double().requires_grad_()
        beta = dense.beta.expand(*state.shape[:-1], 1).clone().requires_grad_()
        p, _ = dense.probabilities(state, keys.expand_as(dense.keys), beta)
        mapped = (1 - dense.anchor) * (p @ keys)
        by_keys, by_beta = torch.autograd.grad(mapped, (keys, beta), value)
        return by_keys, by_beta[..., 0]

    return value, gradients
