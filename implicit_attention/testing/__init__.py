"""Contract suites and test problems, public so that a new method can be put through them."""
