"""Numbers of the safeguard, for solvers and every fused operation; setup.py hands them to the compiler of C++."""

# An accelerated step must lower E by this part of |r|^2; a plain one of a convex potential lowers it by 1/2.
DESCENT = 0.25
# E is known to this many units of rounding.
ENERGY_SLACK = 4.0
# Where the last step met negative curvature, extrapolation would climb to a saddle: go this many plain steps at once.
STRETCH = 4.0
# An accelerated step s is not evaluated unless <r, s> >= SLOPE |r|^2, and it is cut to LONGEST |r|. (Near a fold the
# true step is that long; refusing it there would leave hundreds of plain steps.)
SLOPE = 0.5
LONGEST = 30.0
