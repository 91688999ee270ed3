"""The parts of `implicit-attention demo`, and the page that shows them."""
