"""`mae-vit embed`: its options and its final output."""

from __future__ import annotations

import argparse
import csv
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mae_vit.cli.values import whole
from mae_vit.config.command_line import OneLineParser, add_plugin, as_path, as_path_text
from mae_vit.core.errors import EXIT_REQUEUE, InputError
from mae_vit.core.messages import count_of, error_reason

if TYPE_CHECKING:
    from mae_vit.weights.embed.embed import Outcome, Settings
    from mae_vit.weights.embed.images import Images

_NAMED = 5
_BATCH_SIZE, _BATCH_SIZE_GPU = 64, 256
_DESCRIPTION = """Compute features (N, D) of images with a pretrained encoder, in the order of the data, with the
keys of the images. Features are saved while they are computed. If the command is stopped or
killed, run it again and it resumes."""
_EXAMPLES = """  mae-vit embed runs/mae_base photos/ --out features/photos
  mae-vit embed encoder.safetensors data/cifar10 --split test --out features/test
  mae-vit embed timm:vit_base_patch16_224.mae images.zip --out features/images --device cuda
  mae-vit embed timm:vit_small_patch14_dinov2 photos/ --out dinov2 --img-size 224
"""
_EPILOG = """The largest centered box of each image is resized, and normalized as in the encoder's training.
Unreadable images are left out and listed in broken.csv.

  import numpy as np
  features = np.load("features/photos/features.npy", mmap_mode="r")
  keys = open("features/photos/keys.txt").read().splitlines()
meta.json describes encoder and images. Images that are not prepared have paths.txt. Where the
data have them, there are labels.npy (-1 for none; meta.json names the classes) and splits.txt."""


def add_embed(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `embed`."""
    parser = commands.add_parser(
        "embed",
        help="compute features of images with a pretrained encoder",
        usage="%(prog)s [options] WEIGHTS DATA --out DIR",
        examples=_EXAMPLES,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "weights",
        type=as_path_text,
        metavar="WEIGHTS",
        help="the encoder: a run folder, an encoder.safetensors, an official MAE .pth, timm:NAME, "
        "timm:NAME@FILE, or hf:USER/NAME[@REVISION]",
    )
    add_images(parser)
    parser.add_argument("--out", type=as_path, required=True, metavar="DIR", help="folder to write")
    group = parser.add_argument_group("which features")
    group.add_argument(
        "--img-size", type=whole(1), metavar="PX", help="side of the images in pixels (as in training)"
    )
    group.add_argument(
        "--pool",
        choices=("cls", "mean"),
        help="feature: [CLS] or the mean of the patch tokens (default: mean; for a classifier, as it was trained; for "
        "third-party weights mostly cls)",
    )
    group.add_argument(
        "--dtype", choices=("float32", "float16"), default="float32", help="type of the features (float32)"
    )
    add_speed(parser.add_argument_group("how fast"))
    add_plugin(parser)
    parser.set_defaults(run=run_embed, parser=parser)


def add_images(parser: OneLineParser) -> None:
    """Adds the arguments that select images."""
    parser.add_argument(
        "data",
        nargs="+",
        type=as_path_text,
        metavar="DATA",
        help="prepared shards, a folder of images, an archive of one (.tar, .zip), or image files",
    )
    group = parser.add_argument_group("which images")
    group.add_argument(
        "--split", action="append", default=[], metavar="NAME", help="only this split; repeatable (all)"
    )
    group.add_argument("--no-labels", action="store_true", help="do not read folder names as classes")


def open_named(arguments: argparse.Namespace, *, out: Path) -> Images:
    """Opens the images that `add_images` selects, and prints notes; `out` is for temporary files."""
    from mae_vit.weights.embed.images import open_images  # slow to import

    images = open_images(arguments.data, out=out, splits=arguments.split, labels=not arguments.no_labels)
    for note in images.notes:
        print(note)
    return images


def add_speed(group: argparse._ArgumentGroup) -> None:
    """Adds the options of device, precision, batch size and workers."""
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one"
    )
    group.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="precision of the forward pass (fp32)"
    )
    group.add_argument(
        "--batch-size",
        type=whole(1),
        metavar="N",
        help=f"images in a batch ({_BATCH_SIZE}; GPU: {_BATCH_SIZE_GPU})",
    )
    group.add_argument(
        "--workers",
        type=lambda text: None if text == "auto" else whole(0)(text),
        default="auto",
        metavar="N",
        help="decoding threads (auto: free cores)",
    )


def run_embed(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 75 if a signal stopped it; raises InputError for errors that the user can fix."""
    try:
        outcome = _embed(arguments)
    except OSError as error:
        raise InputError(f"{error.filename or arguments.out}: {error_reason(error)}") from None
    if outcome.rows is None:
        done = f"{outcome.done:,} of {count_of(outcome.total, 'image')}"
        print(f"stopped; {done} are saved, the same command resumes", file=sys.stderr)
        return EXIT_REQUEUE
    _report(outcome, arguments.out)
    return 0


def read_settings(
    arguments: argparse.Namespace, *, dtype: Literal["float32", "float16"] = "float32"
) -> Settings:
    """Resolves device, batch size and workers."""
    from mae_vit.data.batches.loader import auto_workers
    from mae_vit.runtime.cores import cores_of_rank
    from mae_vit.runtime.device import choose_device
    from mae_vit.weights.embed.embed import Settings

    device = choose_device(arguments.device)
    on_gpu, workers = device.type == "cuda", arguments.workers
    return Settings(
        device=device,
        batch_size=arguments.batch_size or (_BATCH_SIZE_GPU if on_gpu else _BATCH_SIZE),
        workers=auto_workers(cores_of_rank(), on_gpu=on_gpu) if workers is None else workers,
        precision=arguments.precision,
        dtype=dtype,
    )


def _embed(arguments: argparse.Namespace) -> Outcome:
    # Imported here, so that --help is fast.
    from mae_vit.runtime.signals import StopRequest
    from mae_vit.training.engines.precision import why_slow
    from mae_vit.weights.embed.embed import check_out, embed
    from mae_vit.weights.encoder import load_encoder

    check_out(arguments.out)
    encoder = load_encoder(arguments.weights, img_size=arguments.img_size, pool=arguments.pool)
    images = open_named(arguments, out=arguments.out.parent)
    settings = read_settings(arguments, dtype=arguments.dtype)
    if slow := why_slow(settings.precision, settings.device):
        print(f"warning: {slow}")
    encoder.to(settings.device)
    return embed(encoder, images, arguments.out, settings, stop=StopRequest())


def _report(outcome: Outcome, out: Path) -> None:
    from mae_vit.weights.embed.embed import BROKEN  # slow to import

    if outcome.begun == outcome.total:
        print("all images were already done")
    else:
        before = f", {outcome.begun:,} of them before" if outcome.begun else ""
        rate = (outcome.done - outcome.begun) / outcome.wall_s
        print(f"{count_of(outcome.total, 'image')}{before}: {rate:,.0f} images/s")
    if outcome.broken:
        report_broken(outcome.broken, out / BROKEN)
    print(f"{out}: features of {count_of(outcome.rows or 0, 'image')}, {outcome.width} numbers each")


def report_broken(count: int, path: Path) -> None:
    """Prints the first images that were left out, and the file that lists all."""
    print(f"left out {count_of(count, 'broken image')}; {path} lists all:")
    with path.open(newline="", encoding="utf-8") as file:
        for row in islice(csv.DictReader(file), _NAMED):
            key = f", key {row['key']}" if row["path"].endswith(".tar") else ""
            print(f"  {row['path']}{key}: {row['reason']}")
    if count > _NAMED:
        print(f"  and {count - _NAMED} more")
