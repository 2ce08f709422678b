"""The command `mae-vit`: prepare and check data, look into runs, hand encoders on."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mae_vit import __version__
from mae_vit.commandline import (
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    OneLineParser,
    add_allow_pipe,
    add_local_rank,
)
from mae_vit.curve_command import add_curve
from mae_vit.embed_command import add_embed
from mae_vit.errors import DamagedSample, InputError, Unreachable, counted
from mae_vit.export_command import add_export
from mae_vit.inspect_command import add_inspect
from mae_vit.prepare_command import add_prepare
from mae_vit.urls import allow_pipe, is_url, shown

EXAMPLES = """examples:
  mae-vit prepare digits data/digits                     handwritten digits, embedded: no network
  mae-vit prepare cifar10 data/cifar10                   torchvision's download; also cifar100
  mae-vit prepare photos/ data/photos                    photos/CLASS/*.jpg, photos/train/CLASS/*.jpg or photos/*.jpg
  mae-vit prepare train.tar.gz test.zip data/mine        archives of such folders
  mae-vit prepare photos/ data/small --resize 384 --holdout 1/10
  mae-vit prepare --in-place laion/                      others' webdataset shards, used where they are
  mae-vit check data/mine                                verify every shard
  mae-vit doctor --config configs/mae_base.yaml          will it run here? config, data, memory, disk, ranks
  mae-vit replay runs/mae_base --step 1200               the images, crops and masks of that step, with their keys
  mae-vit inspect --ckpt runs/mae_base                   what it has learned: a page of pictures
  mae-vit curve runs/mae_cifar_tiny                      is it normal? against the preset's curves
  mae-vit embed runs/mae_base photos/ --out photos.npz   features of images, with their keys; killed, it goes on
  mae-vit export runs/mae_base --to hf                   hand on: timm, hf (transformers), official, onnx, torch
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (`mae_vit.commandline`)."""
    try:
        parser = _parser()
        arguments, rest = parser.parse_known_args(argv)
        # Options may stand between the paths, which argparse cannot take in one go.
        if rest and hasattr(arguments, "paths") and not any(word.startswith("-") for word in rest):
            arguments.paths += rest
        elif rest:
            getattr(arguments, "parser", parser).unrecognized(rest)
        code: int = arguments.run(arguments)
        return code
    except InputError as error:
        print(f"mae-vit: error: {error}", file=sys.stderr)
        return EXIT_INPUT
    except DamagedSample as error:
        print(f"mae-vit: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Unreachable as error:
        print(f"mae-vit: error: {error}", file=sys.stderr)
        return EXIT_REQUEUE
    except KeyboardInterrupt:
        print("mae-vit: interrupted; nothing half-written was left", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="mae-vit",
        description="Prepare and check image data for self-supervised pretraining; look into runs, hand encoders on.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mae-vit {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    add_prepare(commands)
    _add_check(commands)
    _add_replay(commands)
    _add_doctor(commands)
    add_inspect(commands)
    add_curve(commands)
    add_embed(commands)
    add_export(commands)
    return parser


def _add_check(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "check",
        help="verify every shard",
        description="Verify every shard against dataset.json; exit 1 and name what is damaged.",
    )
    parser.add_argument("path", metavar="DIR", help="the data folder")
    parser.add_argument("--decode", action="store_true", help="decode every image too")
    parser.set_defaults(run=_check, parser=parser)


def _check(arguments: argparse.Namespace) -> int:
    from mae_vit.data.check import check

    if is_url(arguments.path):
        raise InputError(
            f"{shown(arguments.path)}: shards elsewhere are verified as runs fetch them; give a folder"
        )
    problems = check(Path(arguments.path), decode_all=arguments.decode)
    for problem in problems:
        print(f"damaged: {problem}")
    print(
        f"{arguments.path}: {counted(len(problems), 'problem') if problems else 'all shards are as described'}"
    )
    return EXIT_FAILED if problems else 0


def _add_replay(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "replay",
        help="show what a run saw at a step",
        description="Rebuild the images, crops and masks of any step of a pretraining run, as a picture and the "
        "names of its samples.",
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="the run's folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="from 1, as in metrics.jsonl")
    which.add_argument("--data-step", type=int, help="of the data order, from 0, as in incidents/*.json")
    parser.add_argument("--rank", type=int, default=0, help="whose part of the batch (default: 0)")
    parser.add_argument("--images", type=int, default=32, help="how many are drawn (default: 32)")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: RUN/replay/...")
    add_allow_pipe(parser)
    parser.set_defaults(run=_replay, parser=parser)


def _replay(arguments: argparse.Namespace) -> int:
    if arguments.images < 1 or (arguments.data_step or 0) < 0:
        raise InputError("--images needs 1 or more, --data-step 0 or more")
    if arguments.allow_pipe:
        allow_pipe()
    told_by = _beside("pretrain.replay")
    told = told_by.replay(
        arguments.path, step=arguments.step, of_data=arguments.data_step, rank=arguments.rank
    )
    name = f"step-{arguments.step:08d}" if arguments.step else f"data-step-{arguments.data_step:08d}"
    path = arguments.out or arguments.path / "replay" / f"{name}-rank-{arguments.rank}.png"
    picture, names = told_by.write_replay(told, path, images=arguments.images)
    drawn = min(arguments.images, len(told.samples))
    weights = "fresh weights" if told.weights_step is None else f"the weights of step {told.weights_step}"
    print(f"{arguments.path}: epoch {told.epoch}, step {told.data_step} of the data order")
    print(f"  picture   {picture} ({counted(drawn, 'image')}; what is predicted is by {weights})")
    print(f"  names     {names} ({counted(len(told.samples), 'sample')})")
    return 0


def _add_doctor(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check config, data and machine before a run",
        description="Check what a pretraining run needs: software, devices, memory, disk, data, and whether the ranks "
        "find each other; exit 1 if something will fail. Under a launcher, all ranks check: "
        "torchrun --nproc-per-node 8 -m mae_vit.cli doctor --config FILE.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the run, as YAML; without: what all need"
    )
    parser.add_argument(
        "paths", nargs="*", metavar="KEY.PATH=VALUE", help="change one value, as in pretraining"
    )
    parser.add_argument(
        "--find-batch",
        action="store_true",
        help="train a few steps with micro-batches of growing size, in this process alone",
    )
    add_allow_pipe(parser)
    add_local_rank(parser)
    parser.set_defaults(run=_doctor, parser=parser)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.allow_pipe:
        allow_pipe()
    code: int = _beside("pretrain.doctor").doctor(
        arguments.config, arguments.paths, tries_batches=arguments.find_batch
    )
    return code


def _beside(name: str) -> Any:
    """Imports a module of the jobs, which lie beside the library in the repository."""
    root = Path(__file__).resolve().parents[1]
    if not (root / name.split(".")[0]).is_dir():
        raise InputError(f"this command needs the repository, of which {root} has the library alone")
    sys.path.insert(0, str(root))
    return importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
