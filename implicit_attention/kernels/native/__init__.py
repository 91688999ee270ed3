"""The operations in C++, for CPUs: compiled when the package is installed, called through a plain C interface."""
