"""A layer, its evidence, its gradients, and a memory: `python docs/examples/quickstart.py`."""

import torch

from implicit_attention import ImplicitAttention, MemoryLookup

torch.manual_seed(0)
x = torch.randn(2, 32, 64)
layer = ImplicitAttention(dim=64, heads=4)

y = layer(x)  # every query of every head has settled into its equilibrium
print(layer.last_solve)

y.square().sum().backward()  # through the equilibria, not through the iterations
print(f"gradient {layer.q_proj.weight.grad.norm():.2f}, residual <= {layer.last_solve.adjoint.residual.max():.0e}")

memory = MemoryLookup(dim=64)
memory.store(x[0])
recalled = memory.retrieve(x[0] + torch.randn(32, 64) / 2)
print(f"recalled from noise, up to {(recalled - x[0]).norm(dim=-1).max():.0e}")
