"""What only a GPU can show: parts of minutes, each figure a JSON line as soon as it is known.

`python -m benchmarks.gpu` lists the parts, `--help` teaches the rest.
"""
