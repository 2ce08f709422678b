"""What all jobs share: the command line, and how they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mae_vit.commandline import (
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    OneLineParser,
    add_allow_pipe,
    add_local_rank,
)
from mae_vit.errors import DamagedSample, InputError, Unreachable
from mae_vit.signals import INTERRUPTED, first_of_node
from mae_vit.training.failures import LostRank, TrainingFailed
from mae_vit.training.resume import ResumeMode
from mae_vit.urls import allow_pipe


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        config: the YAML file; None where the job can do without.
        overrides: `key.path=value`.
        resume: "auto", "never" or a path.
        extend: go on to another length than was begun with.
        dry_run: print the plan and stop.
        ckpt: weights to begin from, of fine-tuning.
    """

    config: Path | None
    overrides: list[str]
    resume: ResumeMode
    extend: bool
    dry_run: bool
    ckpt: str | None = None


def parse_arguments(
    argv: Sequence[str] | None, *, description: str, keys: str, examples: str, takes_ckpt: bool = False
) -> Arguments:
    """Parses the command line of a training job.

    Args:
        argv: the words; None for this process's.
        description: of the job, a sentence.
        keys: the config's sections and keys, as `--help` is to list them.
        examples: of command lines, for the end of `--help`.
        takes_ckpt: whether there is --ckpt, with which --config may be left out.

    Raises:
        InputError: for anything that does not fit.
    """
    parser = OneLineParser(
        description=description,
        epilog=f"sections and their keys (train.epochs=10):\n{keys}\n\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=not takes_ckpt,
        metavar="FILE",
        help="the run, as YAML (see configs/)",
    )
    if takes_ckpt:
        parser.add_argument(
            "--ckpt",
            metavar="START",
            help='weights to begin from: a run folder, an encoder.safetensors, an official MAE file or "timm:NAME"; '
            "without it the network begins from scratch",
        )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY.PATH=VALUE",
        help="change one value, in place of the file's: train.epochs=10 run.name=try; null unsets a key "
        "(monitor.evaluate_images=null is its default again)",
    )
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto (default): go on with this run if it was begun; never: begin again, moving a run of "
        "this name aside; PATH: begin from that checkpoint or run folder, unless this run was begun itself",
    )
    parser.add_argument(
        "--extend",
        action="store_true",
        help="go on with this run, a finished one too, to another train.epochs, steps or samples: the schedule of "
        "the rate is that of the new length from here on",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the plan and its cost, train nothing"
    )
    add_allow_pipe(parser)
    add_local_rank(parser)
    parsed = parser.parse_intermixed_args(argv)
    if parsed.allow_pipe:
        # For data workers too. No config file can say it: those run no code.
        allow_pipe()
    resume: ResumeMode = parsed.resume if parsed.resume in ("auto", "never") else Path(parsed.resume)
    return Arguments(
        parsed.config,
        parsed.overrides,
        resume,
        parsed.extend,
        parsed.dry_run,
        parsed.ckpt if takes_ckpt else None,
    )


def run_to_exit_code(job: Callable[[], int]) -> int:
    """Runs a job; what the user can mend, and how a run fails, becomes one line and an exit code."""
    try:
        return job()
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
