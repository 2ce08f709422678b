"""The command line of pretraining; checks the config before it imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mae_vit.config.command_line import parse_arguments
from mae_vit.config.load import load_config
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.failures import run_to_exit_code
from mae_vit.runtime.imports import slow_imports

EXAMPLES = """  mae-vit pretrain mae_digits
  mae-vit pretrain mae_photos_64 data.path=photos/
  deepspeed --num_accelerators 2 --module mae_vit.cli pretrain mae_cifar_tiny \\
      data.path=data/mine data.augment.crop=random_resized
  mae-vit pretrain mae_cifar_tiny --dry-run
"""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs the command line; returns the exit code. `prog` is the command in the help; None for a checkout's script."""

    def job() -> int:
        arguments = parse_arguments(
            argv,
            prog=prog,
            description="Pretrain a Vision Transformer with MAE, masked patch prediction or another "
            "objective.\nCtrl-C, SIGTERM or SIGUSR1 save after at most two more steps, and exit 75; the same "
            "command resumes.",
            sections=PretrainConfig.model_fields,
            examples=EXAMPLES,
        )
        # Report config errors before the slow imports. A pipe can be read only once, so it is checked later.
        if isinstance(arguments.config, Path) and not arguments.config.is_fifo():
            load_config(PretrainConfig, arguments.config, arguments.overrides)
        with slow_imports():
            from mae_vit.pretraining.job import pretrain, read_config

        if arguments.dry_run:
            # Has imports that only checks need.
            from mae_vit.pretraining.doctor import check_all

            return check_all(*read_config(arguments), arguments)
        pretrain(arguments)
        return 0

    return run_to_exit_code(job)
