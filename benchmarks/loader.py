"""Loading, for one core: images of shards as training takes them, against the usual pipelines.

Both sides run on the same core, worker and trainer together, and take turns. A turn begins when the first batch has
come and ends when the last one has. Files are read once before the first turn, so they come from memory. Ours is the
path of training (index, source, order, `load_batches`). All but the official pipeline of MAE end in a uint8 batch in
the trainer's process. Peers of files run without and with a worker; the ratio is against the fastest, which the JSON
names. Peers whose packages are missing take no part: `pip install -e .[bench]`.

    full       full-size photographs, random resized crop (0.2 to 1) to 224 px, flip
    repeats4   full-size, four views of each image that is decoded, of all uint8 peers too; views per second
    short256   as `full`, of shards prepared with --resize 256 --quality 90; peers read the same images as files
    small_pad  small images in memory: shifted crop and flip
    small_rrc  small images in memory: random resized crop and flip
    raw_small  bytes of small files in random order; the peer reads the same in theirs
    raw_large  bytes of photographs, more than a processor's cache holds

Beside each speed stands its fidelity: the mean absolute difference (of 255) from PIL's crop and bicubic resize on the
same boxes; of `short256` from the full-size photographs. Bytes must be equal; beside them stands what `os.pread` alone
takes. With 300 photographs all rows take a quarter of an hour on a quiet core.

    python benchmarks/loader.py --photos SRC [--small SRC] [--rows ROW ...] [--core N] [--out FILE]
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import make_parser, measured_on, parse, run
from benchmarks.harness.turns import ratios, summarize, take_turns, verdict
from benchmarks.loading.contenders import PEER, Turn, contenders, stream
from benchmarks.loading.peers import OFFICIAL, PACKAGES, PLAIN, is_there, version_of
from benchmarks.loading.rows import ROWS, Row, augment_of, prepare_data
from mae_vit.core.files import to_json, write_json
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.training.outputs.environment import versions_of

FIDELITY_IMAGES = 200


def life(make: Callable[[], Turn], core: int, pipe: Connection) -> None:
    """A contender's, on one core with its workers: its step is an image."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    turn = make()
    while pipe.recv():
        pipe.send({"wall": turn() * 1e3})


def measure(row: Row, folder: Path, *, rounds: int, core: int) -> dict[str, list[float]]:
    """Times all contenders in turn, round after round: microseconds for an image."""
    # So that nobody waits for a disk.
    for path in (path for name in {row.ours, row.peer} for path in (folder / name).rglob("*")):
        if path.is_file():
            path.read_bytes()
    lives = {name: partial(life, make, core) for name, make in contenders(row, folder).items()}
    times = take_turns(lives, rounds=rounds, steps=1)
    return {name: [round(value * 1e3, 3) for value in values] for name, values in times.items()}


def compare(times: dict[str, list[float]], row: Row) -> dict[str, Any]:
    """Medians, and how many times the speed of each kind of peer, round by round; goals by the range of rounds.

    The fastest peer, the fastest of those with a worker, the official pipeline, and the libraries of ours in one
    process without a loader.
    """
    medians = {name: float(np.median(values)) for name, values in times.items()}
    peers = [name for name in times if name.startswith(PEER)]
    with_a_worker = [name for name in peers if name.endswith(", 1 workers")]
    official = [name for name in peers if OFFICIAL in name]
    plain = [name for name in peers if name == f"{PEER}{PLAIN}, 0 workers"]

    def over(some: Sequence[str], goal: float | None = None) -> dict[str, Any]:
        best = min(some, key=medians.__getitem__)
        found = {"peer": best.removeprefix(PEER), **summarize(ratios(times[best], times["ours"]))}
        return found if goal is None else {**found, **verdict(found["range"], at_least=goal)}

    return {
        "over_fastest": over(peers, None if official else row.goal),
        **({"over_fastest_with_a_worker": over(with_a_worker)} if plain else {}),
        **({"over_official": over(official, row.goal)} if official else {}),
        **({"over_plain": over(plain, row.plain_goal)} if plain else {}),
        "images_per_s": {name: round(1e6 / median, 1) for name, median in medians.items()},
        "us_per_image": times,
    }


def fidelity(row: Row, folder: Path) -> dict[str, Any]:
    """How far pixels are from PIL's on the same boxes, or that all bytes are equal."""
    index = open_index(folder / row.ours, "train")
    if row.crop is None:
        images = {
            (Path(sample["__url__"]).name, sample["__key__"]): value
            for sample in stream(folder / row.peer)
            for name, value in sample.items()
            if not name.startswith("__")
        }
        equal = all(
            images[index.shard_of(sample), key] == index.read(sample)
            for sample, key in enumerate(index.keys())
        )
        return {"equal_bytes": equal and len(images) == len(index)}
    whole = open_index(folder / ("small" if row.small else "full"), "train")
    samples = np.arange(min(FIDELITY_IMAGES, len(index)))
    originals = [Image.open(io.BytesIO(whole.read(int(n)))).convert("RGB") for n in samples]
    stored = [Image.open(io.BytesIO(index.read(int(n)))).size[::-1] for n in samples]
    augment = augment_of(row, index)
    source = open_source(index, "auto", channels=3, augment=augment, memory_limit_gib=4)
    view = augment.draw(0, 0, samples)
    boxes, differences = augment.boxes(view, stored) / np.tile(stored, 2), []
    for number, ours in enumerate(source.render(0, 0, samples).images):
        theirs = pillow_view(originals[number], boxes[number], augment, bool(view.flips[number]))
        differences.append(np.abs(ours.transpose(1, 2, 0).astype(int) - theirs))
    means = [float(difference.mean()) for difference in differences]
    return {
        "mean": round(float(np.mean(means)), 4),
        "largest": int(max(difference.max() for difference in differences)),
    }


def pillow_view(image: Image.Image, box: np.ndarray, augment: Augment, flip: bool) -> np.ndarray:
    """PIL's crop and bicubic resize of a box in shares of height and width: (H, W, 3)."""
    top, left, height, width = box * np.array([image.height, image.width] * 2)
    corners = (left, top, left + width, top + height)
    if all(abs(corner - round(corner)) < 1e-6 for corner in corners):
        cut = image.crop(tuple(round(corner) for corner in corners))
        if augment.crop != "pad":
            cut = cut.resize(augment.img_size[::-1], Image.Resampling.BICUBIC)
    else:  # between the pixels of the full size
        cut = image.resize(augment.img_size[::-1], Image.Resampling.BICUBIC, box=corners)
    pixels = np.asarray(cut)
    return pixels[:, ::-1] if flip else pixels


def main() -> None:
    """Measures the chosen rows and prints their ratios."""
    parser = make_parser(__doc__, rounds=7)
    photos = "photographs in class folders: a folder or an archive of it"
    parser.add_argument("--photos", metavar="SRC", help=photos)
    small = "small images of one size in class folders (cifar10)"
    parser.add_argument("--small", default="cifar10", metavar="SRC", help=small)
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="which to measure (all)")
    parser.add_argument("--core", type=int, metavar="N", help="that all runs on (the last of this process)")
    arguments = parse(parser)
    core = max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core
    names = arguments.rows or [name for name, row in ROWS.items() if row.small or arguments.photos]
    if not arguments.rows and not arguments.photos:
        print("without --photos SRC: small images only", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare_data(folder, arguments.photos, arguments.small, [ROWS[name] for name in names])
        samples = {
            path.parent.name: json.loads(path.read_text())["splits"]["train"]["samples"]
            for path in sorted(folder.glob("*/dataset.json"))
        }
        versions = versions_of(("pillow", "simplejpeg", "torchvision", "webdataset"))
        versions |= {name: version_of(name) for name in PACKAGES if is_there(name)}
        report = {
            "benchmark": "loader",
            "core": core,
            "repeats": arguments.rounds,
            "samples": samples,
            "photographs": samples.get("full"),
            "page_cache": "warm",
            "ends_in": "uint8 batches in the trainer's process",
            "rows": {name: asdict(ROWS[name]) for name in names},
            "results": {},
            "versions": versions,
            "not_installed": [name for name in PACKAGES if not is_there(name)],
            "environment": measured_on(threads=1),
        }
        for name in names:
            times = measure(ROWS[name], folder, rounds=arguments.rounds, core=core)
            result = {**compare(times, ROWS[name]), "fidelity": fidelity(ROWS[name], folder)}
            print(f"{name}: {result['over_fastest']}, {result['fidelity']}", file=sys.stderr)
            report["results"][name] = result
            if arguments.out:  # row by row: all of them take minutes
                write_json(arguments.out, report)
    print(to_json(report, indent=2))


if __name__ == "__main__":
    run(main)
