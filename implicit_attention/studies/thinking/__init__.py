"""Three puzzles, each solved by one block that repeats until its answer has settled, with weights that are shipped."""
