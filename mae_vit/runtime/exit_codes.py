"""Exit codes of rank processes."""

from __future__ import annotations

# A run failed, or a check found a problem.
EXIT_FAILED = 1
# Bad config, command line or input.
EXIT_INPUT = 2
# EX_TEMPFAIL of sysexits.h, to be run again: stopped by a signal after a save, another rank is
# gone, or data that lie elsewhere cannot be had now.
EXIT_REQUEUE = 75
# What shells say of a program that Ctrl-C ended: before there was anything to save, or by a second one.
EXIT_INTERRUPTED = 130
