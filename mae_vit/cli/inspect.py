"""`mae-vit inspect`: its options and its final output."""

from __future__ import annotations

import argparse
from pathlib import Path

from mae_vit.cli.values import whole
from mae_vit.config.command_line import OneLineParser, add_plugin, as_path, as_path_text
from mae_vit.core.errors import InputError

_DESCRIPTION = """Draw what an encoder has learned: reconstructions, attention, rollout, attention distance,
positions, and principal components of patch features. Write one page, OUT/index.html, and next to
it the pictures as PNG and numbers as CSV."""
_EXAMPLES = """  mae-vit inspect runs/mae_base            its held-out images; writes runs/mae_base/inspect
  mae-vit inspect runs/mae_base --data photos/ --out look
  mae-vit inspect runs/scratch --against runs/mae_base --data data/mine --out both
  mae-vit inspect mae_visualize_vit_large.pth --data photos/ --out look
  mae-vit inspect timm:vit_base_patch16_224.dino --data photos/ --out look
"""


def add_inspect(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `inspect`."""
    parser = commands.add_parser(
        "inspect",
        help="see what an encoder has learned",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "weights",
        type=as_path_text,
        metavar="WEIGHTS",
        help='a run folder, an encoder.safetensors, an official MAE file (.pth), "timm:NAME" or '
        '"hf:USER/NAME[@REVISION]"',
    )
    parser.add_argument(
        "--against", type=as_path_text, metavar="WEIGHTS", help="a second encoder, shown side by side"
    )
    parser.add_argument(
        "--data",
        type=as_path_text,
        metavar="DIR",
        help="images: prepared shards, a folder or an archive (default for a run folder: its training data)",
    )
    parser.add_argument("--split", help="split of prepared data (the first of val, test, train that exists)")
    parser.add_argument(
        "--out", type=as_path, metavar="DIR", help="folder to write (default for a run folder: RUN/inspect)"
    )
    parser.add_argument(
        "--images", type=whole(2), default=256, metavar="N", help="number of images (256); fewer is faster"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    add_plugin(parser)
    parser.set_defaults(run=run_inspect, parser=parser)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code, or raises InputError for errors that the user can fix."""
    # Imports torch, timm and matplotlib: not for --help.
    from mae_vit.inspection.inspect import inspect
    from mae_vit.runtime.device import choose_device
    from mae_vit.weights.names import check_exists

    run = Path(arguments.weights)
    is_run = (run / "config.yaml").is_file()
    check_exists(arguments.weights)
    if (run / "dataset.json").is_file():
        raise InputError(
            f"{run} is prepared data, not weights; use `mae-vit inspect WEIGHTS --data {run}`, or `mae-vit check "
            f"{run}` to verify the data"
        )
    if arguments.out is None and not is_run:
        raise InputError(f"{arguments.weights} is not a run folder; give --out DIR for the page")
    data = arguments.data or (_own_data(run) if is_run else None)
    if data is None:
        raise InputError(f"{run} does not say which images it was trained on; give --data DIR")
    page = inspect(
        [arguments.weights, *([arguments.against] if arguments.against else [])],
        data,
        arguments.out or run / "inspect",
        images=arguments.images,
        split=arguments.split,
        device=choose_device(arguments.device),
    )
    print(f"page      {page} (open in a browser)")
    print(f"pictures  {page.parent}, with numbers as CSV")
    return 0


def _own_data(run: Path) -> str | None:
    """Returns the `data.path` of a run; None if its config has none."""
    # Imports NumPy: not for --help.
    from mae_vit.config.load import read_run_config
    from mae_vit.data.data_path import check_recorded

    data = read_run_config(run).get("data")
    path = data.get("path") if isinstance(data, dict) else None
    if path:
        check_recorded(str(path), run, "give --data DIR")
    return path
