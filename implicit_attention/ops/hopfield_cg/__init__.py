"""Linear systems with the Hessian of the anchored log-sum-exp energy."""
