"""Errors, messages, keyed randomness, files: used by every package, and imports none."""

__version__ = "0.1.0"
