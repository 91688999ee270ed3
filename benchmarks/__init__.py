"""Ratios of one run against targets, beside other implementations; see README.md."""
