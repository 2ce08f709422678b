"""Dry runs of large configs on a small machine."""

from helpers.ample_machine import ample_machine

__all__ = ["ample_machine"]
