"""Loading, for one core: images of shards as training takes them, against the usual pipelines.

Both sides run on the same core, worker and trainer together, and take turns, so that
ratios hold where absolute times drift. A turn begins when the first batch has come and
ends when the last one has: nothing is fetched ahead of it and nothing is left behind.
Ours is the path of training (index, source, order, `load_batches`), up to the uint8
batch in the trainer process. The peer of the images is the official MAE pipeline on the
same bytes as files: ImageFolder, PIL, crop, flip, ToTensor, Normalize, DataLoader. It
reads PNG and JPEG alike. The peer of the bytes is webdataset's stream.

    full       full-size photographs, random resized crop (0.2 to 1) to 224 px, flip
    short256   the same of shards prepared with --resize 256 --quality 90; the peer as in `full`
    small_pad  small images in memory: shifted crop and flip
    small_rrc  small images in memory: random resized crop and flip
    raw_small  bytes of small files in random order; the peer reads the same in theirs
    raw_large  bytes of photographs

Beside each speed stands its fidelity: the mean absolute difference (of 255) from PIL's
crop and bicubic resize on the same boxes; of `short256` from the full-size photographs.
Bytes must be equal. Prints a table and JSON.

    python benchmarks/loader.py --photos SRC [--small SRC] [--rows ROW ...] [--repeats 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mae_vit.data.augment import Augment
from mae_vit.data.convert import Conversion
from mae_vit.data.index import ShardIndex, open_index
from mae_vit.data.loader import load_batches, start_worker_server
from mae_vit.data.order import GlobalOrder, Share
from mae_vit.data.prepare import prepare
from mae_vit.data.reading import open_source
from mae_vit.data.selection import Selection
from mae_vit.data.sources import open_source as open_images
from mae_vit.errors import InputError
from mae_vit.training.run_folder import describe_environment

Turn = Callable[[], float]  # seconds for one image
# MAE Sec. A.1, and the normalization of its code.
BOX: dict[str, Any] = {"scale": (0.2, 1.0), "ratio": (3 / 4, 4 / 3)}
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PHOTO_PX, PHOTO_BATCH, PAD_PX = 224, 64, 4
SMALL_BATCH, SMALL_PER_CLASS = 128, 1000
FIDELITY_IMAGES = 200
MIB_READ = 96  # in a turn of reading


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        ours: folder of the shards.
        peer: folder of the files, or of the shards, that the peer reads.
        crop: of `Augment`; None where bytes are read.
        bar: how many times the peer's speed is asked for.
        batches: of a turn.
    """

    ours: str
    peer: str
    crop: str | None
    bar: float
    batches: int = 0

    @property
    def small(self) -> bool:
        """Whether images are small, and lie in memory."""
        return self.ours == "small"


ROWS = {
    "full": Row("full", "full-files", "random_resized", 2.5, batches=9),
    "short256": Row("short256", "full-files", "random_resized", 5.5, batches=9),
    "small_pad": Row("small", "small-files", "pad", 15.0, batches=40),
    "small_rrc": Row("small", "small-files", "random_resized", 7.0, batches=40),
    "raw_small": Row("small", "small", None, 20.0),
    "raw_large": Row("full", "full", None, 8.0),
}


def augment_of(row: Row, index: ShardIndex) -> Augment:
    """The row's views, as a config would make them."""
    size = index.split_info.height[0] if row.small else PHOTO_PX
    options = {"pad_px": PAD_PX} if row.crop == "pad" else BOX
    return Augment(img_size=(size, size), crop=row.crop, flip=True, **options)  # type: ignore[arg-type]


def time_batches(batches: Iterable[Any], images_of: Callable[[Any], int]) -> float:
    """Seconds for one image, from the first batch on; that one is not counted."""
    iterator = iter(batches)
    next(iterator)
    begun, images = time.perf_counter(), 0
    for batch in iterator:
        images += images_of(batch)
    return (time.perf_counter() - begun) / images


def our_images(row: Row, folder: Path) -> Turn:
    """Ours: through index, source and loader; small images need no worker."""
    start_worker_server()
    index = open_index(folder / row.ours, "train")
    source = open_source(index, "auto", channels=3, augment=augment_of(row, index), memory_limit_gib=4)
    order = GlobalOrder(len(index), SMALL_BATCH if row.small else PHOTO_BATCH, seed=0)
    starts = count(step=row.batches + 1)

    def turn() -> float:
        start = next(starts)
        batches = load_batches(
            source,
            order,
            Share(),
            start_step=start,
            stop_step=start + row.batches + 1,
            workers=0 if row.small else 1,
        )
        return time_batches(batches, lambda batch: len(batch.images))

    return turn


def their_images(row: Row, folder: Path, workers: int) -> Turn:
    """The official MAE pipeline (its main_pretrain.py), a crop by torchvision's own name for each of ours."""
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    size = PHOTO_PX
    if row.small:
        size = open_index(folder / row.ours, "train").split_info.height[0]
    crop = transforms.RandomResizedCrop(
        size, scale=BOX["scale"], interpolation=transforms.InterpolationMode.BICUBIC
    )
    if row.crop == "pad":
        crop = transforms.RandomCrop(size, padding=PAD_PX)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    dataset = ImageFolder(str(folder / row.peer), transform=transforms.Compose(steps))
    batch_size = SMALL_BATCH if row.small else PHOTO_BATCH
    sampler = RandomSampler(dataset, num_samples=(row.batches + 1) * batch_size)
    loader = DataLoader(dataset, batch_size, sampler=sampler, num_workers=workers)
    return lambda: time_batches(loader, lambda batch: len(batch[0]))


def our_bytes(row: Row, folder: Path) -> Turn:
    """Ours: the encoded images in the order of training."""
    index = open_index(folder / row.ours, "train")
    number = samples_to_read(index)
    order = GlobalOrder(len(index), 1, seed=0)
    epochs = count()

    def turn() -> float:
        begun, epoch = time.perf_counter(), next(epochs)
        read = 0
        # So much faster that clocks ask for more.
        while read < 8 * number:
            for sample in order.samples(epoch, 0, len(index)).tolist():
                index.read(sample)
            read += len(index)
        return (time.perf_counter() - begun) / read

    return turn


def their_bytes(row: Row, folder: Path) -> Turn:
    """Webdataset's stream over the same members, undecoded and unshuffled, its fastest."""
    index = open_index(folder / row.ours, "train")
    number = samples_to_read(index)

    def turn() -> float:
        begun, read = time.perf_counter(), 0
        while read < number:
            read += sum(1 for _ in stream(folder / row.peer))
        return (time.perf_counter() - begun) / read

    return turn


def stream(folder: Path) -> Iterator[dict[str, Any]]:
    """Webdataset's samples, of images alone."""
    import webdataset

    urls = sorted(str(path) for path in folder.glob("train-*.tar"))
    return iter(
        webdataset.WebDataset(urls, shardshuffle=False, select_files=lambda name: not name.endswith(".cls"))
    )


def samples_to_read(index: ShardIndex) -> int:
    """Of the peer's turn."""
    size = sum(shard.bytes for shard in index.split_info.shards) / len(index)
    return int(MIB_READ * 2**20 / size)


def contenders(row: Row, folder: Path) -> dict[str, Callable[[], Turn]]:
    """Who takes turns; the peer of small images without a worker too, which may be faster on one core."""
    if row.crop is None:
        return {"ours": partial(our_bytes, row, folder), "peer": partial(their_bytes, row, folder)}
    makers: dict[str, Callable[[], Turn]] = {
        "ours": partial(our_images, row, folder),
        "peer": partial(their_images, row, folder, 1),
    }
    if row.small:
        makers["peer without worker"] = partial(their_images, row, folder, 0)
    return makers


def contend(make: Callable[[], Turn], core: int, pipe: Connection) -> None:
    """The life of a contender, on one core with its workers: answers each word with seconds for an image."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    turn = make()
    while pipe.recv():
        pipe.send(turn())


def measure(row: Row, folder: Path, *, repeats: int, core: int) -> dict[str, list[float]]:
    """Times all contenders in turn, round after round: microseconds for an image."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, make in contenders(row, folder).items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=contend, args=(make, core, theirs)))
        processes[-1].start()
        theirs.close()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    try:
        for round_number in range(repeats + 1):
            for name, pipe in pipes.items():
                pipe.send(True)
                microseconds = pipe.recv() * 1e6
                if round_number:  # the first warms up
                    times[name].append(round(microseconds, 3))
        for pipe in pipes.values():
            pipe.send(False)
    finally:
        for pipe in pipes.values():
            pipe.close()  # ends those that still wait
        for process in processes:
            process.join()
    return times


def compare(times: dict[str, list[float]], bar: float) -> dict[str, Any]:
    """Medians, and how many times the speed of the peer in its better setting, round by round."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in times if name != "ours"), key=medians.__getitem__)
    ratios = [theirs / own for theirs, own in zip(times[best], times["ours"], strict=True)]
    return {
        "speedup": {
            "median": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        },
        "bar": bar,
        "best_peer": best,
        "images_per_s": {name: round(1e6 / median, 1) for name, median in medians.items()},
        "us_per_image": times,
    }


def fidelity(row: Row, folder: Path) -> dict[str, Any]:
    """How far pixels are from PIL's on the same boxes, or that all bytes are equal."""
    index = open_index(folder / row.ours, "train")
    if row.crop is None:
        found = {sample["__key__"]: find_image(sample) for sample in stream(folder / row.peer)}
        equal = all(found[key] == index.read(sample) for sample, key in enumerate(index.keys()))
        return {"equal_bytes": equal and len(found) == len(index)}
    whole = open_index(folder / ("small" if row.small else "full"), "train")
    samples = np.arange(min(FIDELITY_IMAGES, len(index)))
    originals = [Image.open(io.BytesIO(whole.read(int(n)))).convert("RGB") for n in samples]
    stored = [Image.open(io.BytesIO(index.read(int(n)))).size[::-1] for n in samples]
    augment = augment_of(row, index)
    source = open_source(index, "auto", channels=3, augment=augment, memory_limit_gib=4)
    view = augment.draw(0, 0, samples, np.array(stored))
    differences = []
    for number, ours in enumerate(source.images(0, 0, samples)):
        box = view.boxes[number] / np.array(stored[number] * 2)
        theirs = pillow_view(originals[number], box, augment, bool(view.flips[number]))
        differences.append(np.abs(ours.transpose(1, 2, 0).astype(int) - theirs))
    means = [float(difference.mean()) for difference in differences]
    return {
        "mean": round(statistics.mean(means), 4),
        "p95_of_images": round(float(np.quantile(means, 0.95)), 4),
        "largest": int(max(difference.max() for difference in differences)),
    }


def find_image(sample: dict[str, Any]) -> bytes:
    """The image of a webdataset sample that holds nothing else."""
    return next(value for name, value in sample.items() if not name.startswith("__"))


def pillow_view(image: Image.Image, box: np.ndarray, augment: Augment, flip: bool) -> np.ndarray:
    """PIL's crop and bicubic resize of a box in shares of height and width: (H, W, 3)."""
    top, left, height, width = box * np.array([image.height, image.width] * 2)
    corners = (left, top, left + width, top + height)
    if all(abs(corner - round(corner)) < 1e-6 for corner in corners):
        cut = image.crop(tuple(round(corner) for corner in corners))  # type: ignore[arg-type]
        if augment.crop != "pad":
            cut = cut.resize(augment.img_size[::-1], Image.Resampling.BICUBIC)
    else:  # between the pixels of the full size
        cut = image.resize(augment.img_size[::-1], Image.Resampling.BICUBIC, box=corners)
    pixels = np.asarray(cut)
    return pixels[:, ::-1] if flip else pixels


def prepare_data(folder: Path, photos: str | None, small: str, rows: Iterable[Row]) -> None:
    """Prepares what the rows read, through `prepare` itself; what is there is taken as it is."""
    needed = {name for row in rows for name in (row.ours, row.peer)}
    kinds = {
        "full": (photos, Selection(), Conversion()),
        "short256": (photos, Selection(), Conversion(resize=256, quality=90)),
        "small": (small, Selection(limit_per_class=SMALL_PER_CLASS), Conversion()),
    }
    for name, (spec, selection, conversion) in kinds.items():
        if not needed & {name, f"{name}-files"}:
            continue
        out = folder / name
        if not (out / "dataset.json").exists():
            if spec is None:
                raise InputError("rows of photographs need --photos SRC")
            prepare([open_images(spec, out=out)], out, selection=selection, conversion=conversion)
        if f"{name}-files" in needed and not (folder / f"{name}-files").exists():
            write_files(open_index(out, "train"), folder / f"{name}-files")


def write_files(index: ShardIndex, folder: Path) -> None:
    """Writes the same bytes as CLASS/NUMBER.EXTENSION for ImageFolder."""
    partial_folder = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial_folder, ignore_errors=True)
    extension = next(iter(index.split_info.formats))
    for sample in range(len(index)):
        path = partial_folder / f"{index.labels[sample]:04}" / f"{sample:06}.{extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(index.read(sample))
    partial_folder.rename(folder)


def describe(result: dict[str, Any]) -> str:
    """A row's line of the table."""
    speedup, far = result["speedup"], result["fidelity"]
    low, high = speedup["range"]
    met = "met" if speedup["median"] >= result["bar"] else "missed"
    pixels = f"MAD {far['mean']:.3f}" if "mean" in far else "equal" if far["equal_bytes"] else "DIFFERENT"
    return (
        f"{speedup['median']:>8.2f} {low:>7.2f}-{high:<7.2f} {result['bar']:>5.1f} {met:<7}"
        f"{result['images_per_s']['ours']:>10,.0f} {result['images_per_s'][result['best_peer']]:>8,.0f}  {pixels}"
    )


def main() -> None:
    """Measures the chosen rows and prints their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--photos", metavar="SRC", help="photographs in class folders: a folder or an archive of it"
    )
    parser.add_argument(
        "--small",
        default="cifar10",
        metavar="SRC",
        help="small images of one size in class folders (cifar10)",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="which to measure (all)")
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="times that each contender's turn comes (7)"
    )
    parser.add_argument("--core", type=int, metavar="N", help="that all runs on (the last of this process)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep what is prepared here (temporary)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here too")
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core
    names = arguments.rows or [name for name, row in ROWS.items() if row.small or arguments.photos]
    if not arguments.rows and not arguments.photos:
        print("without --photos SRC: small images only", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.data or Path(temporary)
        try:
            prepare_data(folder, arguments.photos, arguments.small, [ROWS[name] for name in names])
        except InputError as error:
            parser.exit(2, f"error: {error}\n")
        print("             ratio  lowest-highest    bar         ours/s   peer/s", file=sys.stderr)
        results = {}
        for name in names:
            row = ROWS[name]
            times = measure(row, folder, repeats=arguments.repeats, core=core)
            results[name] = {**compare(times, row.bar), "fidelity": fidelity(row, folder)}
            print(f"{name:<10}{describe(results[name])}", file=sys.stderr)
        samples = {
            path.parent.name: json.loads(path.read_text())["splits"]["train"]["samples"]
            for path in sorted(folder.glob("*/dataset.json"))
        }
    report = {
        "benchmark": "loader",
        "core": core,
        "repeats": arguments.repeats,
        "samples": samples,
        "rows": {name: asdict(ROWS[name]) for name in names},
        "results": results,
        "versions": {name: metadata.version(name) for name in ("pillow", "simplejpeg", "webdataset")},
        "environment": describe_environment(["benchmarks/loader.py", *sys.argv[1:]], 1),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
