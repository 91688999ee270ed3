"""Equilibrium attention inside models of other libraries: one module for each host, loaded when it is asked for.

`integrations.transformers` (Hugging Face), `integrations.multihead` (torch.nn), `integrations.xtransformers`,
`integrations.timm`.
"""
