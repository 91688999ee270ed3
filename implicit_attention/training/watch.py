"""`watch`: counts how the solves of a model's layers go, on their device, until someone looks."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import Self

from .. import _validate
from .._torch import exact_precision
from ..diagnostics import spectral_radius
from ..failure import FailureSite
from ..layers.remembering import Remembering
from ..problem import Problem
from .observed import Observation, Observed, mean
from .tally import Tally

# The number of states of the last axis at which a spectral radius is computed, and of its Krylov vectors.
STATES, KRYLOV = 16, 20


def watch(model: nn.Module, *, group: Any = None, spectral: bool = False) -> Watch:
    """Count how the solves of every layer of a model go, forward and backward, from now on.

    Counts stay on the device of the solves, and the host waits for nothing before `Watch.take`. What checkpointing
    computes again is counted once, accumulated batches all; evaluation counts like training. A solve that raises is not
    seen, nor are calls inside torch.vmap, except for a backward pass outside of it. In a compiled model the counting is
    an operation of its graph: call `watch` before the first call, with the model on its device.

    Args:
        model: a module with layers of this library, or a model of transformers that was given its attention.
        group: processes over which `take` sums, a group of torch.distributed (`torch.distributed.group.WORLD` for all);
            then all of them call it. None looks at this process alone.
        spectral: keep the last problem of each layer, so that `take` can compute the spectral radius of its map. That
            keeps the tensors of one call in memory, solves without the fastest path, and costs about 20 evaluations at
            16 states of each head per look. It works for layers that call `solve`, not for those of spin systems, and
            in a compiled graph for models of transformers only.

    Returns:
        A `Watch`, whose `take()` returns the counts; `close()`, or leaving its `with` block, ends it.

    Raises:
        TypeError, ValueError: `model` is no module, has no layer that solves, or is watched already.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import watch
        >>> layer = ImplicitAttention(8, heads=2, anchor=0.75)
        >>> with watch(layer) as seen:
        ...     for step in range(3):
        ...         layer(torch.randn(3, 5, 8)).sum().backward()
        ...     observed = seen.take(step)
        >>> observed.total.forward.problems, observed.total.backward.problems, observed.total.forward.failed
        (90, 90, 0)

    Not for one call: `last_solve` of a layer has the status of every problem.
    """
    _validate.check_instance("model", model, nn.Module, "be a torch.nn.Module")
    sites = _sites(model)
    remedy = "give it one first, for example by implicit_attention.integrations.transformers.attach(model)"
    _validate.require(bool(sites), "model", "have a layer that solves", type(model).__name__, remedy)
    watched = [name for name, (_, site) in sites.items() if site.tally is not None]
    received = f"a watched layer {watched[:1]}"
    _validate.require(not watched, "model", "not be watched already", received, "close() that watch")
    for module, site in sites.values():
        site.tally = Tally(_device(module, model), spectral)
    return Watch(sites, group)


class Watch:
    """The layers of a model that are watched; made by `watch`.

    Not for use after `close`, which ends it.

    Examples:
        >>> import torch
        >>> from implicit_attention import ImplicitAttention
        >>> from implicit_attention.training import watch
        >>> layer = ImplicitAttention(8, heads=2)
        >>> seen = watch(layer)
        >>> output = layer(torch.randn(3, 5, 8))
        >>> print(seen.take(step=1).line()[:22])
        step 1: evaluations ...
    """

    def __init__(self, sites: dict[str, tuple[nn.Module, FailureSite]], group: Any) -> None:
        self._sites, self._group = sites, group
        self._used: set[str] = set()

    @torch.no_grad()
    def take(self, step: int | None = None) -> Observed:
        """Summarise the layers' solves since the last look, and reset the counts. The host waits for the device.

        Args:
            step: a number to be kept with what is returned, such as that of the training step.

        Returns:
            An `Observed`. Layers that have never solved are left out. With a group, sums over its processes (maxima of
            the worst); anchors, temperatures and radii are those of this process.

        Raises:
            ValueError: the watch was closed, or the processes of the group watch other layers.
        """
        _validate.require(bool(self._sites), "take", "be called before close()", "a closed watch")
        sums = [site.tally.taken() for _, site in self._sites.values()]
        device = sums[0][0].device
        counts, peaks = (torch.stack([pair[i].to(device) for pair in sums]) for i in (0, 1))
        # Before sums and maxima, which may pass over NaN.
        peaks = peaks.nan_to_num(math.inf, math.inf)
        if self._group is not None:
            counts, peaks = self._summed(counts, peaks)
        counts, peaks = counts.cpu(), peaks.cpu()
        named = list(self._sites.items())
        self._used |= {name for (name, _), row in zip(named, counts, strict=True) if row.any()}
        radii = self._radii()
        seen = [
            Observation.of(name, counts[i], peaks[i], **_settings(module), spectral_radius=radii[i])
            for i, (name, (module, _)) in enumerate(named)
            if name in self._used
        ]
        whole = {name: mean(getattr(each, name) for each in seen) for name in ("anchor", "beta")}
        largest = max((each.spectral_radius for each in seen if not math.isnan(each.spectral_radius)), default=math.nan)
        total = Observation.of("all", counts.sum(0), peaks.amax(0), **whole, spectral_radius=largest)
        return Observed(tuple(seen), total, step)

    def _radii(self) -> list[float]:
        """The spectral radius of each layer; solves of inner layers that this takes are not counted."""
        watched = [(module, site, site.tally) for module, site in self._sites.values()]
        try:
            for _, site, _ in watched:
                site.tally = None
            return [_radius(module, tally) for module, _, tally in watched]
        finally:
            for _, site, tally in watched:
                site.tally = tally

    def _summed(self, counts: Tensor, peaks: Tensor) -> tuple[Tensor, Tensor]:
        names: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(names, list(self._sites), group=self._group)
        if other := next((rank for rank, each in enumerate(names) if each != names[0]), None):
            required = f"watch the layers of process 0, {names[0][:3]} ..."
            raise ValueError(_validate.message("group", required, f"others in process {other}: {names[other][:3]} ..."))
        dist.all_reduce(counts, op=dist.ReduceOp.SUM, group=self._group)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=self._group)
        return counts, peaks

    def close(self) -> None:
        """End the watch: the layers count no more."""
        for _, site in self._sites.values():
            site.tally = None
        self._sites = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sites(model: nn.Module) -> dict[str, tuple[nn.Module, FailureSite]]:
    """The layers of a model that solve, by name, with their sites."""
    sites = {name: module._site for name, module in model.named_modules() if isinstance(module, Remembering)}
    # Transformers are not imported to find out that the model is none of theirs.
    watching = sys.modules.get(f"{__package__.rpartition('.')[0]}.integrations.transformers.watching")
    sites |= {} if watching is None else watching.sites(model)
    return {name: (model.get_submodule(name), site) for name, site in sites.items()}


def _device(module: nn.Module, model: nn.Module) -> torch.device:
    first = next((t for each in (module, model) for t in (*each.parameters(), *each.buffers())), None)
    # The tally of a layer on the device "meta" moves when the layer solves first.
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def _settings(module: nn.Module) -> dict[str, float]:
    """Anchor and inverse temperature of a layer, the mean over its heads."""
    sources: dict[str, Any] = {"anchor": module, "beta": module}
    if not isinstance(module, Remembering):
        last = getattr(module, "_equilibrium_last", None)
        sources = {"anchor": last, "beta": getattr(last, "sample", None)}
    values = {name: getattr(source, name, None) for name, source in sources.items()}
    return {name: _mean(value() if callable(value) else value) for name, value in values.items()}


def _mean(value: Any) -> float:
    if isinstance(value, Tensor):
        # The local part of a parameter that is spread over processes.
        value = value.to_local() if hasattr(value, "to_local") else value
        return float(value.double().mean()) if value.numel() else math.nan
    return float(value) if isinstance(value, float | int) else math.nan


def _radius(module: nn.Module, tally: Tally) -> float:
    if not tally.spectral:
        return math.nan
    last, sample = getattr(module, "_equilibrium_last", None), tally.sample
    if sample is None and last is not None and last.sample is not None:
        sample = last.sample.problem(last.anchor), last.sample.state
    if sample is None or sample[1].numel() == 0:
        return math.nan
    problem, value = _some_states(*sample)
    # Torch's faster attention, which a block may use, has no derivative of its derivative.
    with exact_precision(value), sdpa_kernel(SDPBackend.MATH):
        return float(spectral_radius(problem, value, steps=KRYLOV).max())


def _some_states(problem: Problem, value: Tensor) -> tuple[Problem, Tensor]:
    """Evenly spaced problems of the last leading axis, where the problem can be restricted to them."""
    lead = value.shape[: value.ndim - problem.event_ndim]
    if not lead or lead[-1] <= STATES:
        return problem, value
    rows = torch.linspace(0, lead[-1] - 1, STATES, device=value.device).round().long()
    part = problem.select(rows.expand(*lead[:-1], -1))
    return (problem, value) if part is None else (part, value.index_select(len(lead) - 1, rows))
