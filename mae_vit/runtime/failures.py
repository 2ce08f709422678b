"""How a run fails: on all ranks together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from mae_vit.core.errors import DamagedSample, InputError, Unreachable
from mae_vit.runtime.exit_codes import EXIT_FAILED, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_REQUEUE
from mae_vit.runtime.process_group import leave
from mae_vit.runtime.signals import INTERRUPTED, first_of_node


def run_to_exit_code(job: Callable[[], int]) -> int:
    """Runs a job; what the user can mend, and how a run fails, becomes one line and an exit code."""
    try:
        code = job()
        leave()
        return code
    except InputError as error:
        code, message = EXIT_INPUT, str(error)
    except (TrainingFailed, DamagedSample) as error:
        code, message = EXIT_FAILED, str(error)
    except LostRank as error:
        code, message = EXIT_REQUEUE, str(error)
    except KeyboardInterrupt:
        code, message = EXIT_INTERRUPTED, INTERRUPTED
    except Unreachable as error:
        # Each rank reads for itself: nobody else says it.
        print(f"error: rank {os.environ.get('RANK', '0')}: {error}", file=sys.stderr, flush=True)
        return EXIT_REQUEUE
    # Ranks fail alike: one line for each node is enough.
    if first_of_node():
        print(f"error: {message}", file=sys.stderr, flush=True)
    return code


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


@dataclass
class BadStep(RuntimeError):
    """A step after which the run cannot go on as it is; all ranks raise it together.

    Attributes:
        step: its number, from 1; of a spike, where it began.
        reason: for people.
        loss: of the step that was judged.
        grad_norm: of the same.
        losses: of the good steps before it.
    """

    step: int
    reason: str
    loss: float | None = None
    grad_norm: float | None = None
    losses: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"step {self.step} {self.reason}"
