"""Ranks, devices, signals and exit codes of a process."""
