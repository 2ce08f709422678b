"""What `python -m benchmarks.gpu` measures: a file for each part."""
