"""Looks inside an encoder without changing its training."""
