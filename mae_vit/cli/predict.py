"""`mae-vit predict`: classifies images by a fine-tuned network."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TextIO

from mae_vit.cli.embed import add_images, add_speed, open_named, read_settings, report_broken
from mae_vit.config.command_line import OneLineParser, add_plugin, as_path, as_path_text
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, error_reason, plain_text
from mae_vit.core.user_files import expand_path

if TYPE_CHECKING:
    from mae_vit.finetuning.models.classifier_file import ImageClassifier
    from mae_vit.weights.embed.embed import Settings
    from mae_vit.weights.embed.images import Images

_SHOWN, _NAMED = 12, 3
_DESCRIPTION = """Classify images with the network of a finished fine-tuning run. FILE.csv has a line for each
image: its most probable class and the probability. If class folders are named after the run's
classes, it prints the accuracy."""
_EXAMPLES = """  mae-vit predict runs/finetune_mine photos/
  mae-vit predict runs/finetune_mine data/mine --split test --out test.csv --top 3
"""
_EPILOG = """The largest centered box of each image is resized, and normalized as in the run. Unreadable
images are left out and listed in FILE.broken.csv."""


def add_predict(commands: argparse._SubParsersAction[OneLineParser]) -> None:
    """Adds the command `predict`."""
    parser = commands.add_parser(
        "predict",
        help="classify images with a fine-tuned network",
        usage="%(prog)s [options] RUN DATA",
        examples=_EXAMPLES,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_folder",
        type=as_path_text,
        metavar="RUN",
        help="a finished fine-tuning run, or its model.safetensors",
    )
    add_images(parser)
    parser.add_argument(
        "--out", type=as_path, metavar="FILE.csv", help="new file to write (predicted.csv in RUN's folder)"
    )
    parser.add_argument(
        "--top", type=int, default=1, metavar="N", help="the N most probable classes of each image (1)"
    )
    add_speed(parser.add_argument_group("how fast"))
    add_plugin(parser)
    parser.set_defaults(run=run_predict, parser=parser)


def run_predict(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code, or raises InputError for errors that the user can fix."""
    run = expand_path(arguments.run_folder)
    out: Path = arguments.out or (run if run.is_dir() else run.parent) / "predicted.csv"
    if out.suffix != ".csv" or out.is_dir():
        raise InputError(f"--out {out}: must end in .csv; give --out new_pictures.csv")
    try:
        _predict(arguments, out)
    except OSError as error:
        raise InputError(f"{error.filename or out}: {error_reason(error)}") from None
    return 0


def _predict(arguments: argparse.Namespace, out: Path) -> None:
    # Imported here, so that --help is fast.
    from mae_vit.core.files import replacing
    from mae_vit.finetuning.models.classifier_file import load_classifier

    classifier = load_classifier(arguments.run_folder)
    if not 1 <= arguments.top <= len(classifier.classes):
        raise InputError(f"--top {arguments.top}: must be 1 to {len(classifier.classes)}, the run's classes")
    with TemporaryDirectory() as temporary:
        images = open_named(arguments, out=Path(temporary))
        if out.exists():
            raise InputError(f"{out} exists; give another file, such as --out new_pictures.csv")
        if images.dataset is not None:
            classifier.fit_bands(images.dataset.bands, images.name)
        settings = read_settings(arguments)
        classifier.place(settings.device)
        out.parent.mkdir(parents=True, exist_ok=True)
        broken = out.with_suffix(".broken.csv")
        with replacing(out) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            done = _write(file, classifier, images, settings, arguments.top)
        images.write_broken(broken, done.broken)
    if done.broken:
        report_broken(len(done.broken), broken)
    _report(classifier, images, done)
    print(f"{out}: predictions of {count_of(done.predicted.total(), 'image')}")


@dataclass
class _Done:
    """Unreadable images with reasons, counts by predicted class, hits among known labels, counts of other labels."""

    broken: list[tuple[int, str]] = field(default_factory=list)
    predicted: Counter[str] = field(default_factory=Counter)
    right: list[bool] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)


def _write(file: TextIO, classifier: ImageClassifier, images: Images, settings: Settings, top: int) -> _Done:
    """Classifies the images, and writes a line for each."""
    import torch

    from mae_vit.core.progress import progress
    from mae_vit.runtime.signals import StopRequest
    from mae_vit.weights.embed.embed import compute_features

    writer, done, first = csv.writer(file, lineterminator="\n"), _Done(), 0
    known = frozenset(classifier.classes)
    labeled = bool((images.labels >= 0).any())
    more = [name for rank in range(2, top + 1) for name in (f"prediction_{rank}", f"probability_{rank}")]
    facts = ["path", "key", *(["split"] if images.splits else []), *(["label"] if labeled else [])]
    writer.writerow([*facts, "prediction", "probability", *more])
    bar = progress(total=len(images), unit=" images", desc="classifying")
    requested = StopRequest()
    with closing(compute_features(classifier, images, settings)) as batches, bar:
        for stop, logits, failed in batches:
            if requested:
                raise KeyboardInterrupt
            done.broken += failed
            lost = {number for number, _ in failed}
            numbers = [number for number in range(first, stop) if number not in lost]
            probabilities, order = torch.from_numpy(logits).softmax(dim=-1).topk(top, dim=-1)
            for number, chances, places in zip(numbers, probabilities.tolist(), order.tolist(), strict=True):
                entry, names = images.entries[number], [classifier.classes[place] for place in places]
                label = images.classes[images.labels[number]] if images.labels[number] >= 0 else ""
                values = {"path": entry.path, "key": entry.key, "split": entry.split, "label": label}
                pairs = zip(names, (f"{chance:.6f}" for chance in chances), strict=True)
                writer.writerow([*(plain_text(values[fact]) for fact in facts), *chain.from_iterable(pairs)])
                done.predicted[names[0]] += 1
                if label in known:
                    done.right.append(label == names[0])
                elif label:
                    done.others[label] += 1
            bar.update(stop - first)
            first = stop
    if not done.predicted:
        why = f"; the first: {done.broken[0][1]}" if done.broken else ""
        raise InputError(f"no image of {images.name} can be read{why}")
    return done


def _report(classifier: ImageClassifier, images: Images, done: _Done) -> None:
    from mae_vit.data.shards.index_files import fingerprint_of  # imports pydantic: not for --help

    for name, number in done.predicted.most_common(_SHOWN):
        print(f"  {number:>7,}  {name}")
    if len(done.predicted) > _SHOWN:
        print(f"  and {len(done.predicted) - _SHOWN} more classes")
    if done.right:
        share, count = sum(done.right) / len(done.right), count_of(len(done.right), "image")
        print(f"accuracy {share:.2%} on {count} whose label is a class of the run")
        every = images.dataset.splits if images.dataset else {}
        trained_on = [name for name in every if fingerprint_of(every[name]) in classifier.trained_on]
        seen = [split for split in images.splits if split in trained_on]
        if not trained_on:
            note = "the accuracy is too high if the network was trained on some of these images"
            print(f"note: {note}, which only its own prepared data can tell", file=sys.stderr)
        elif seen and images.dataset:
            other = images.dataset.test_split(*seen)
            without = f"; --split {other} leaves them out" if other else ""
            print(
                f"note: the accuracy includes images that the network was trained on{without}",
                file=sys.stderr,
            )
    if done.others:
        names = ", ".join(
            [*map(plain_text, list(done.others)[:_NAMED]), *["..."] * (len(done.others) > _NAMED)]
        )
        print(
            f"note: {count_of(done.others.total(), 'image')} with other labels ({names}), which are not classes of "
            "the run, were not compared",
            file=sys.stderr,
        )
