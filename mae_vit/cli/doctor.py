"""`mae-vit doctor`: machine, run and ranks, before a run."""

from __future__ import annotations

import argparse

from mae_vit.config.command_line import OneLineParser, add_local_rank
from mae_vit.config.presets import find_config


def add_doctor(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="check config, data and machine before a run",
        description="Check what a pretraining run needs: software, devices, memory, disk, data, and whether the ranks "
        "find each other; exit 1 if something will fail. With --config, what pretrain/run.py --dry-run does. "
        "Under a launcher, all ranks check: "
        "torchrun --nproc-per-node 8 -m mae_vit.cli doctor --config FILE.",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="the run: a YAML file, or a preset by its name; the first word may give it, too; without: what all need",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="KEY.PATH=VALUE", help="change one value, as in pretraining"
    )
    parser.add_argument(
        "--find-batch",
        action="store_true",
        help="train a few steps with micro-batches of growing size, in this process alone",
    )
    add_local_rank(parser)
    parser.set_defaults(run=_doctor, parser=parser)


def _doctor(arguments: argparse.Namespace) -> int:
    # Imports torch: not for --help.
    from mae_vit.pretraining.doctor.doctor import doctor

    config, overrides = arguments.config, arguments.paths
    if config is None and overrides and "=" not in overrides[0]:
        config, *overrides = overrides
    path = None if config is None else find_config(config)
    return doctor(path, overrides, tries_batches=arguments.find_batch)
