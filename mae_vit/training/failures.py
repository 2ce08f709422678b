"""How a run fails: on all ranks together."""

from __future__ import annotations

# What PyTorch's backends say when another rank is gone.
_LOST = (
    *("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe"),
    *("timed out waiting", "remote process exited"),
)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST)


class LostRank(RuntimeError):
    """Another rank is gone (exit code 75): the run is to be started again, from what it has saved.

    Of a node's failure the other ranks may know before Slurm does.
    """


class TrainingFailed(RuntimeError):
    """The run cannot go on (exit code 1); what it has saved is good. All ranks raise it together."""
