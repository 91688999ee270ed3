"""The operations in torch, over working sets of rows and tiles of keys."""
