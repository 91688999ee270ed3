"""How much is computed, as a user can count it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Work(TorchDispatchMode):
    """Counts operations, among them products with matrices, and the numbers that they return, `largest` the most."""

    def __init__(self):
        super().__init__()
        self.operations = self.products = self.numbers = self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        found = function(*arguments, **(options or {}))
        self.operations += 1
        self.products += function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.mv)
        several = found if isinstance(found, tuple | list) else (found,)
        sizes = [tensor.numel() for tensor in several if isinstance(tensor, torch.Tensor)]
        self.numbers += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return found
