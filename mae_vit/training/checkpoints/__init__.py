"""Checkpoints: format, writing, reading, resume."""
