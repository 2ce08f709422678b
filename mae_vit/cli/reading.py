"""The commands that look at data and runs: `mae-vit check`, `recommend`, `replay` and `report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mae_vit.cli.values import whole
from mae_vit.config.command_line import OneLineParser, add_plugin, as_path, as_path_text
from mae_vit.core.errors import EXIT_FAILED, InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, error_reason
from mae_vit.core.urls import is_url, redact_url

_REPORT = """Write one HTML page about a run: a verdict in words (pretraining: did it learn, was it long enough,
what to do next; fine-tuning: its score), curves, pictures over time, plan, environment, damaged images,
incidents. The page is one file without dependencies. The run may be finished, running, interrupted or failed."""

_RECOMMEND = """Look at the number and size of the images, their labels, the cores and the GPU. Print which preset,
batch and length fit, how long the run takes here (timed on a few steps, as by --dry-run), whether a gain is to be
expected from the lengths that were measured, and the commands to type. Nothing is written."""


def add_check(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `check`."""
    parser = commands.add_parser(
        "check",
        help="verify every shard",
        examples="  mae-vit check data/mine\n  mae-vit check data/mine --decode",
        description="Compare every shard with its checksum in dataset.json. List damaged shards; exit 1 if any.",
    )
    parser.add_argument("path", type=as_path_text, metavar="DIR", help="the data folder")
    parser.add_argument("--decode", action="store_true", help="also decode every image")
    parser.set_defaults(run=_check, parser=parser)


def _check(arguments: argparse.Namespace) -> int:
    from mae_vit.data.data_path import resolve_data_path
    from mae_vit.data.shards.verify import check

    if is_url(arguments.path):
        raise InputError(
            f"{redact_url(arguments.path)} is remote, and runs verify what they fetch; give a local folder"
        )
    problems = check(resolve_data_path(arguments.path).folder, decode_all=arguments.decode)
    for problem in problems:
        print(f"damaged: {problem}")
    print(
        f"{arguments.path}: {count_of(len(problems), 'problem') if problems else 'all shards are as described'}"
    )
    return EXIT_FAILED if problems else 0


def add_recommend(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `recommend`."""
    parser = commands.add_parser(
        "recommend",
        help="say which preset fits your images and machine",
        examples="  mae-vit recommend data/photos        prepared data\n"
        "  mae-vit recommend photos/            a folder of images, which stays as it is",
        description=_RECOMMEND,
    )
    parser.add_argument(
        "path",
        type=as_path_text,
        metavar="DATA",
        help="prepared data, or a folder, archive or table of images",
    )
    parser.set_defaults(run=_recommend, parser=parser)


def _recommend(arguments: argparse.Namespace) -> int:
    # Imports torch: not for --help.
    from mae_vit.pretraining.recommend import recommend

    print("\n".join(recommend(arguments.path)))
    return 0


def add_replay(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `replay`."""
    parser = commands.add_parser(
        "replay",
        help="show the images and masks of a step",
        examples="  mae-vit replay runs/mae_base --step 1200\n"
        "  mae-vit replay runs/mae_base --data-step 1199 --rank 1 --out step.png",
        description="Compute again the images, crops and masks of any step of a pretraining run. Write them as a "
        "picture, and print the names of the images.",
    )
    parser.add_argument("path", type=as_path, metavar="RUN", help="the run's folder")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="training step, counted from 1 as in metrics.jsonl")
    which.add_argument(
        "--data-step", type=whole(0), help="step of the data order, counted from 0 as in incidents/*.json"
    )
    parser.add_argument("--rank", type=int, default=0, help="rank whose part of the batch is shown (0)")
    parser.add_argument("--out", type=as_path, metavar="FILE.png", help="file to write (RUN/replay/...)")
    add_plugin(parser)
    parser.set_defaults(run=_replay, parser=parser)


def _replay(arguments: argparse.Namespace) -> int:
    # Imports torch: not for --help.
    from mae_vit.pretraining.replay import SHOWN, replay, write_replay

    if arguments.out and arguments.out.suffix != ".png":
        raise InputError(f"--out {arguments.out} must end in .png; give --out {arguments.out}.png")
    record = replay(arguments.path, step=arguments.step, of_data=arguments.data_step, rank=arguments.rank)
    name = f"step-{arguments.step:08d}" if arguments.step else f"data-step-{arguments.data_step:08d}"
    path = arguments.out or arguments.path / "replay" / f"{name}-rank-{arguments.rank}.png"
    try:
        names = write_replay(record, path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error_reason(error)}; give --out FILE.png") from None
    drawn = count_of(min(SHOWN, len(record.samples)), "image")
    weights = "random ones" if record.weights_step is None else f"those of step {record.weights_step}"
    step = f"step {arguments.step}, which is " if arguments.step else ""
    print(
        f"{arguments.path}: {step}data step {record.data_step}, in epoch {record.epoch} (both counted from 0)"
    )
    print(f"  picture   {path} ({drawn}; weights: {weights})")
    print(f"  names     {names} ({count_of(len(record.samples), 'sample')})")
    return 0


def add_report(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `report`."""
    parser = commands.add_parser(
        "report",
        help="write a page about a run: verdict, curves, pictures",
        examples="  mae-vit report runs/mae_base\n  mae-vit report runs/mae_base --out page.html",
        description=_REPORT,
    )
    parser.add_argument("path", type=as_path, metavar="RUN", help="the run's folder")
    parser.add_argument("--out", type=as_path, metavar="FILE.html", help="file to write (RUN/report.html)")
    parser.set_defaults(run=_report, parser=parser)


def _report(arguments: argparse.Namespace) -> int:
    # Imports matplotlib: not for --help.
    from mae_vit.pretraining.report.page import write_page
    from mae_vit.pretraining.report.run_record import read_run
    from mae_vit.pretraining.report.verdict import verdict

    record = read_run(arguments.path)
    out: Path = arguments.out or arguments.path / "report.html"
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; give a file, such as {out / 'report.html'}")
    page = write_page(record)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{out} cannot be written: {error_reason(error)}; give --out FILE") from None
    print("verdict   " + str(verdict(record)).replace("\n", "\n          ").replace("`", ""))
    print(f"page      {out} (open in a browser)")
    return 0
