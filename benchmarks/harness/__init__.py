"""What benchmarks share: turns taken in one run, models and batches, reports."""
