"""`python -m implicit_attention ...`, the same as the command `implicit-attention ...`."""

from .cli.main import app

if __name__ == "__main__":
    app()
