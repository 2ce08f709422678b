"""How a run fails: on all ranks together."""

from __future__ import annotations


class TrainingFailed(RuntimeError):
    """The run cannot go on (exit code 1); what it has saved is good. All ranks raise it together."""
