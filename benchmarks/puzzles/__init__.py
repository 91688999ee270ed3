"""Puzzles that a block solves by being repeated until its state settles: what `usefulness` measures of them.

A task (`mazes`) is a `training.Task`; a `contenders.Plan` says who competes at it, on what, and what is claimed.
"""
