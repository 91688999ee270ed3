"""The fixed point of the anchored log-sum-exp energy."""
