"""LOOPED of the suite `usefulness`: a language model whose two layers are repeated, beside stacks and counts."""
