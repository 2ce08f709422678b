"""The parts of benchmarks/scale.py: starts, synthetic shards."""
