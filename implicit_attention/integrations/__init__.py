"""Equilibrium attention inside models of other libraries, the hosts: one module for each, loaded when it is imported.

`integrations.transformers` (Hugging Face), `integrations.multihead` (torch.nn), `integrations.xtransformers`,
`integrations.timm`. `_hosts.py` lists them.
"""
