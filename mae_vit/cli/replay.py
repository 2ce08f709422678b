"""`mae-vit replay`: shows the images and masks of a step."""

from __future__ import annotations

import argparse

from mae_vit.config.command_line import OneLineParser, add_plugin, as_path
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason


def add_replay(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `replay`."""
    parser = commands.add_parser(
        "replay",
        help="show the images and masks of a step",
        description="Compute again the images, crops and masks of any step of a pretraining run. Write them as a "
        "picture, and print the names of the images.",
    )
    parser.add_argument("path", type=as_path, metavar="RUN", help="the run's folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="training step, counted from 1 as in metrics.jsonl")
    which.add_argument(
        "--data-step", type=int, help="step of the data order, counted from 0 as in incidents/*.json"
    )
    parser.add_argument("--rank", type=int, default=0, help="rank whose part of the batch is shown (0)")
    parser.add_argument("--images", type=int, default=32, help="number of images in the picture (32)")
    parser.add_argument("--out", type=as_path, metavar="FILE.png", help="file to write (RUN/replay/...)")
    add_plugin(parser)
    parser.set_defaults(run=_replay, parser=parser)


def _replay(arguments: argparse.Namespace) -> int:
    if arguments.images < 1 or (arguments.data_step or 0) < 0:
        raise InputError("--images needs 1 or more, --data-step 0 or more")
    # Imports torch: not for --help.
    from mae_vit.pretraining.replay import replay, write_replay

    record = replay(arguments.path, step=arguments.step, of_data=arguments.data_step, rank=arguments.rank)
    name = f"step-{arguments.step:08d}" if arguments.step else f"data-step-{arguments.data_step:08d}"
    path = arguments.out or arguments.path / "replay" / f"{name}-rank-{arguments.rank}.png"
    try:
        names = write_replay(record, path, images=arguments.images)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error_reason(error)}; give --out FILE.png") from None
    drawn = count_of(min(arguments.images, len(record.samples)), "image")
    weights = "fresh weights" if record.weights_step is None else f"the weights of step {record.weights_step}"
    print(f"{arguments.path}: epoch {record.epoch}, step {record.data_step} of the data order")
    print(f"  picture   {path} ({drawn}; what is predicted is by {weights})")
    print(f"  names     {names} ({count_of(len(record.samples), 'sample')})")
    return 0
