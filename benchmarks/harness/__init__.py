"""What benchmarks share: command line and report, turns taken in one run, models and batches."""
