"""The operations as Triton kernels. Only `solve`, `adjoint`, `keys` and `kernels` import Triton."""
