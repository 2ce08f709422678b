"""`mae-vit predict`: classifies images by a fine-tuned network."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from mae_vit.cli.embed import add_speed, check_numbers, report_broken, settings_of
from mae_vit.config.command_line import OneLineParser
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason

if TYPE_CHECKING:
    from mae_vit.finetuning.models.image_classifier import ImageClassifier
    from mae_vit.weights.embed.features import Settings
    from mae_vit.weights.embed.images import Images

_SHOWN = 12
_DESCRIPTION = """Classify images by the network of a finished fine-tuning run. FILE.csv has a line for each image: its
most probable class and the probability. Labels of class folders are compared, if their names are the run's classes."""
_EPILOG = """examples:
  mae-vit predict runs/finetune_mine photos/ --out predictions.csv
  mae-vit predict runs/finetune_mine data/mine --split test --out test.csv --top 3

The largest centered box of each image is resized, and normalized as in the run. Unreadable images are left out and
listed in FILE.broken.csv."""


def add_predict(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `predict`."""
    parser = commands.add_parser(
        "predict",
        help="classify images by a fine-tuned network",
        usage="%(prog)s [options] RUN DATA --out FILE.csv",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="folder of a finished fine-tuning run, or its model.safetensors"
    )
    parser.add_argument(
        "data",
        metavar="DATA",
        help="prepared shards, a folder of images, or an archive of such a folder (.tar, .tar.gz, .zip)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.csv", help="file to write")
    parser.add_argument(
        "--top", type=int, default=1, metavar="N", help="the N most probable classes of each image (1)"
    )
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        metavar="NAME",
        help="only this split; may be given several times (all)",
    )
    parser.add_argument("--no-labels", action="store_true", help="do not take folders as classes")
    add_speed(parser.add_argument_group("how fast"))
    parser.set_defaults(run=run_predict, parser=parser)


def run_predict(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        InputError: for every error that the user can fix.
    """
    check_numbers(arguments)
    out: Path = arguments.out
    if out.suffix != ".csv":
        raise InputError(f"--out {out}: the predictions are a .csv file")
    try:
        _predict(arguments, out)
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error_reason(error)}") from None
    return 0


def _predict(arguments: argparse.Namespace, out: Path) -> None:
    # Slow to import, so that --help is not.
    from mae_vit.core.files import replacing
    from mae_vit.finetuning.models.image_classifier import load_classifier
    from mae_vit.weights.embed.images import open_images
    from mae_vit.weights.embed.output import write_broken

    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give a file, such as {out / 'predictions.csv'}")
    classifier = load_classifier(arguments.run_folder)
    if not 1 <= arguments.top <= len(classifier.classes):
        raise InputError(f"--top {arguments.top}: 1 to {len(classifier.classes)}, the run's classes")
    out.parent.mkdir(parents=True, exist_ok=True)
    images = open_images(
        arguments.data, out=out.parent, splits=arguments.split, labels=not arguments.no_labels
    )
    if images.dataset is not None:
        classifier.fit_bands(images.dataset.bands, images.name)
    settings = settings_of(arguments)
    classifier.place(settings.device)
    with replacing(out) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        broken, counts, right = _write(file, classifier, images, settings, arguments.top)
    write_broken(out, broken, images)
    if broken:
        report_broken(len(broken), out)
    _report(classifier, images, counts, right)
    print(f"{out}: predictions of {count_of(counts.total(), 'image')}")


def _write(
    file: TextIO, classifier: ImageClassifier, images: Images, settings: Settings, top: int
) -> tuple[list[tuple[int, str]], Counter[str], list[bool]]:
    """Writes a line for each image.

    Returns:
        Number and reason of each broken image; images by predicted class; whether each image with one of the
        classifier's classes as label is predicted right.
    """
    import torch

    from mae_vit.core.messages import plain_text
    from mae_vit.core.progress import progress
    from mae_vit.weights.embed.features import compute_features

    writer = csv.writer(file, lineterminator="\n")
    labeled = bool((images.labels >= 0).any())
    more = [name for rank in range(2, top + 1) for name in (f"prediction_{rank}", f"probability_{rank}")]
    labels = ["label"] if labeled else []
    writer.writerow(["path", "key", *labels, "prediction", "probability", *more])
    broken: list[tuple[int, str]] = []
    counts, right, first = Counter[str](), list[bool](), 0
    bar = progress(total=len(images), unit=" images", desc="classifying")
    with closing(compute_features(classifier, images, settings)) as batches, bar:
        for stop, logits, failed in batches:
            broken += failed
            lost = {number for number, _ in failed}
            numbers = [number for number in range(first, stop) if number not in lost]
            probabilities, order = torch.from_numpy(logits).softmax(dim=-1).topk(top, dim=-1)
            for number, chances, places in zip(numbers, probabilities.tolist(), order.tolist(), strict=True):
                entry, names = images.entries[number], [classifier.classes[place] for place in places]
                label = images.classes[images.labels[number]] if images.labels[number] >= 0 else ""
                cells = [
                    cell
                    for name, chance in zip(names, chances, strict=True)
                    for cell in (name, f"{chance:.6f}")
                ]
                writer.writerow([plain_text(entry.path), entry.key, *([label] if labeled else []), *cells])
                counts[names[0]] += 1
                if label in classifier.classes:
                    right.append(label == names[0])
            bar.update(stop - first)
            first = stop
    if not counts:
        raise InputError(f"{images.name} has no image that can be read; the first: {broken[0][1]}")
    return broken, counts, right


def _report(classifier: ImageClassifier, images: Images, counts: Counter[str], right: list[bool]) -> None:
    for name, number in counts.most_common(_SHOWN):
        print(f"  {number:>7,}  {name}")
    if len(counts) > _SHOWN:
        print(f"  and {len(counts) - _SHOWN} more classes")
    if right:
        print(f"accuracy {sum(right) / len(right):.2%} of {count_of(len(right), 'image')} with a label")
    elif (images.labels >= 0).any():
        print(
            f"note: no folder is named as a class of the run ({', '.join(classifier.classes[:4])}, ...), so nothing "
            "is compared",
            file=sys.stderr,
        )
