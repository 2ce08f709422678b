"""Exit codes of rank processes."""

from __future__ import annotations

# A run failed, or a check found a problem.
EXIT_FAILED = 1
# Bad config, command line or input.
EXIT_INPUT = 2
# EX_TEMPFAIL of sysexits.h: run again. A signal stopped the run after a save, another rank is gone, or
# remote data are unavailable.
EXIT_REQUEUE = 75
# Ctrl-C before there was anything to save, or a second Ctrl-C; the code that shells report.
EXIT_INTERRUPTED = 130
