"""The parts of benchmarks/scale.py: start-up, synthetic shards, saving, ranks."""
