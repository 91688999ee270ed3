"""`impl="triton"` through the function and the layer, under Triton's interpreter in a process of its own."""

import os
import subprocess
import sys

import pytest

CODE = """
import torch
from implicit_attention import Anderson, Broyden, ImplicitAttention, UnsupportedImplementation, equilibrium_attention

torch.manual_seed(0)
made = [torch.randn(*shape) for shape in ((1, 4, 5, 16), (1, 2, 20, 16), (1, 2, 20, 16))]
mask = torch.rand(20) < 0.8
found = []
for impl in ("triton", "reference"):
    inputs = [t.clone().requires_grad_() for t in made]
    options = dict(attn_mask=mask, enable_gqa=True, anchor=0.4, solver=Anderson(rtol=1e-5), return_solution=True)
    output, solution = equilibrium_attention(*inputs, **options, impl=impl)
    output.square().sum().backward()
    found.append([output.detach(), solution.status, *(t.grad for t in inputs)])
for one, other in zip(*found):
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)

layer = ImplicitAttention(dim=16, heads=1, causal=True)
x = torch.randn(2, 9, 16)
torch.testing.assert_close(layer(x, impl="triton"), layer(x, impl="reference"), rtol=1e-3, atol=1e-4)
for words, options in (
    ("no kernel for Broyden", {"solver": Broyden()}),
    ("no step is kept, for a trace", {"return_trajectory": True}),
    ("solves nothing", {"max_steps": 0}),
):
    try:
        layer(x, impl="triton", **options)
    except UnsupportedImplementation as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print("done")
"""


@pytest.mark.slow
def test_the_function_and_the_layer_equal_the_products_written_out():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
