"""What only a GPU can show, in parts of minutes: `python -m benchmarks.gpu --help`."""
