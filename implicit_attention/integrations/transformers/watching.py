"""Training of a model of transformers, watched: which modules solve, and a callback for its Trainer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback, TrainerState

from ... import _validate
from ...failure import FailureSite
from ...training.watch import Watch, watch
from ...training.writers import Writer
from .attach import attention_of, is_ours
from .attention import site_of
from .reach import reach


def sites(model: nn.Module) -> dict[str, FailureSite]:
    """The sites of the attention modules of a model that ask for attention of ours, by name."""
    modules = {name: model.get_submodule(name) for name in reach(model).asks}
    return {name: site_of(module) for name, module in modules.items() if is_ours(attention_of(module))}


class WatchCallback(TrainerCallback):
    """A callback of `Trainer` that watches its model's solves, and looks when the trainer logs its loss and at the end.

    The numbers over all layers join the last entry of `trainer.state.log_history`, as `equilibrium_evaluations`,
    `equilibrium_failed`, `equilibrium_backward_failed` (shares) and `equilibrium_worst`; those of each layer go to the
    writers. With several processes their counts are summed, and the first one writes. Solves of evaluations that ran
    since the last look are counted too.

    Args:
        *writers: what to write to, such as `training.CSVFile(path)`.
        spectral: as of `training.watch`.

    Raises:
        TypeError: a writer without `write`.

    Examples:
        >>> from implicit_attention.integrations.transformers import WatchCallback
        >>> from implicit_attention.training import CSVFile
        >>> callback = WatchCallback(CSVFile("seen.csv"))  # Trainer(model, ..., callbacks=[callback])

    Not for a training loop of one's own: use `training.watch`.
    """

    def __init__(self, *writers: Writer, spectral: bool = False) -> None:
        for writer in writers:
            if isinstance(writer, type) or not callable(getattr(writer, "write", None)):
                required = "be made of objects with write(observed)"
                raise TypeError(_validate.message("writers", required, repr(writer), "for example CSVFile(path)"))
        self.writers, self.spectral = writers, spectral
        self.watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin to watch the trainer's model."""
        # A training that was interrupted did not call `on_train_end`.
        self.on_train_end(args, state, control)
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self.watch = watch(others["model"], group=group, spectral=self.spectral)

    def on_log(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Look, if the logged number is a loss of training."""
        # A training logs "train_loss" at its end, after steps that logged no loss.
        if self.watch is None or not {"loss", "train_loss"} & (others.get("logs") or {}).keys():
            return
        observed = self.watch.take(state.global_step)
        forward, backward = observed.total.forward, observed.total.backward
        if not forward.problems:
            return
        if state.log_history:
            state.log_history[-1] |= {
                "equilibrium_evaluations": forward.mean,
                "equilibrium_failed": forward.failed / max(forward.problems, 1),
                "equilibrium_backward_failed": backward.failed / max(backward.problems, 1),
                "equilibrium_worst": forward.worst,
            }
        if state.is_world_process_zero:
            for writer in self.writers:
                writer.write(observed)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the watch."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
