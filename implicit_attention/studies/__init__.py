"""Studies that train, measure or make data: what commands, benchmarks and pages of the documentation ask."""
