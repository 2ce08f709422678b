"""The command line of fine-tuning, which is checked without importing torch where no weights have a say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mae_vit.config.command_line import parse_arguments
from mae_vit.config.keys import describe_keys
from mae_vit.config.load import ConfigSource, load_config
from mae_vit.config.presets import as_installed
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.schema import HIDDEN_KEYS, FinetuneConfig
from mae_vit.runtime.failures import run_to_exit_code

EXAMPLES = """examples:
  python finetune/run.py --ckpt runs/mae_cifar_tiny                      its data, the recipe for its size
  python finetune/run.py --config configs/finetune/finetune_cifar_tiny.yaml  the same network from scratch
  python finetune/run.py --ckpt mae_pretrain_vit_base.pth --config finetune_base data.path=data/mine
  python finetune/run.py --ckpt runs/mae_cifar_tiny data.labels_per_class=500 finetune.mode=few_shot
  python finetune/run.py --ckpt runs/mae_cifar_tiny finetune.mode=linear_probe
  python finetune/run.py --config configs/finetune/simple_cnn_cifar.yaml model.name=timm:resnet18
Ctrl-C, SIGTERM or SIGUSR1 save after at most two more steps, and exit 75; the same command resumes.
"""


def main(argv: Sequence[str] | None = None, *, prog: str | None = None) -> int:
    """Runs the command line, of the command `prog` or a script; returns the exit code."""

    def job() -> int:
        arguments = parse_arguments(
            argv,
            prog=prog,
            description="Fine-tune an encoder or train a network from scratch, on labeled images.\n"
            "Or score a frozen encoder (finetune.mode=linear_probe, few_shot or knn).",
            keys=describe_keys(FinetuneConfig, without=HIDDEN_KEYS),
            examples=as_installed(EXAMPLES) if prog else EXAMPLES,
            takes_ckpt=True,
        )
        if (
            arguments.ckpt is None
            and isinstance(arguments.config, Path)
            and (arguments.config.is_file() or not arguments.config.exists())
        ):
            # A mistake in it is known at once; what follows takes seconds to import.
            check_without_weights(arguments.config, arguments.overrides, arguments.overrides_from)
        from mae_vit.finetuning.job import finetune

        finetune(arguments)
        return 0

    return run_to_exit_code(job)


def check_without_weights(source: ConfigSource, overrides: Sequence[str], overrides_from: str) -> None:
    """Checks a config that begins from scratch, as far as it does not depend on data. Others are left alone.

    Raises:
        InputError: for whatever does not fit.
    """
    begins_from_weights = False

    def amend(raw: dict[str, Any]) -> None:
        nonlocal begins_from_weights
        section = raw.get("finetune")
        begins_from_weights = isinstance(section, dict) and section.get("start") is not None
        raw.pop("with_start", None)
        if isinstance(run := raw.setdefault("run", {}), dict):
            run.setdefault("name", "finetune")

    try:
        load_config(FinetuneConfig, source, overrides, amend=amend, overrides_from=overrides_from)
    except InputError:
        if not begins_from_weights:
            raise
