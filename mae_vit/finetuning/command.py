"""The command line of fine-tuning. Without pretrained weights, it is checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mae_vit.config.command_line import Arguments, parse_arguments
from mae_vit.finetuning.config.pretrained import read_config
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.runtime.failures import run_to_exit_code
from mae_vit.runtime.imports import slow_imports

EXAMPLES = """  mae-vit finetune --ckpt runs/mae_cifar_tiny             its data, the recipe for its size
  mae-vit finetune finetune_cifar_tiny         from scratch
  mae-vit finetune finetune_photos_64 --ckpt runs/mae_photos_64
  mae-vit finetune --ckpt mae_pretrain_vit_base.pth --config finetune_base data.path=data/mine
  mae-vit finetune --ckpt runs/mae_cifar_tiny data.labels_per_class=500 finetune.mode=few_shot
  mae-vit finetune --ckpt runs/mae_cifar_tiny finetune.mode=linear_probe
  mae-vit finetune simple_cnn_cifar model.name=timm:resnet18
"""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs the command line of the command `prog`, or of a script; returns the exit code."""

    def job() -> int:
        arguments = parse_arguments(
            argv,
            prog=prog,
            description="Fine-tune an encoder or train a network from scratch, on labeled images.\n"
            "Or score a frozen encoder (finetune.mode=linear_probe, few_shot or knn).\n"
            "With masks for labels, the modes are segment and segment_probe.\n"
            "Ctrl-C, SIGTERM or SIGUSR1 save after at most two more steps, and exit 75; the same command resumes.",
            sections=FinetuneConfig.model_fields,
            examples=EXAMPLES,
            takes_ckpt=True,
        )
        finetune(arguments)
        return 0

    return run_to_exit_code(job)


def finetune(arguments: Arguments) -> Path:
    """Checks everything, then trains and tests, or with `dry_run` prints the plan; returns the run folder.

    Raises:
        InputError: before anything is written, for every error that the user can fix.
        TrainingFailed: if the run cannot continue.
        RunInterrupted: if it was stopped, after saving.
    """
    config, pretrained, notes = read_config(arguments)
    # Takes seconds to import: report mistakes in the config first.
    with slow_imports():
        from mae_vit.finetuning.job import run_job

    return run_job(arguments, config, pretrained, notes)
