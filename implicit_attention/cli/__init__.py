"""The command line: `implicit-attention ...` and `python -m implicit_attention ...`."""
