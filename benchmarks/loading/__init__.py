"""The parts of benchmarks/loader.py: rows, contenders, fidelity."""
