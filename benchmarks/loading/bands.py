"""Loading of bands, for one core: 13 x uint16 TIFF tiles as training takes them, against what a user writes.

Ours is the path of training from shards: index, source, order, `load_batches`, up to the uint16 batch. `ours_unit` also
maps it to float32 with zero mean and unit variance, which training does on the device. The peer reads the same files by
tifffile in a torch Dataset, as float32, crops and resizes (bicubic, antialiased), flips, normalizes, collates.
All use random resized crops (0.2 to 1) and no worker processes, so that the CPU time of a process is all that it takes.
They take turns.

    python benchmarks/loading/bands.py [--out FILE]
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.command import make_parser, parse, publish, run
from benchmarks.harness.turns import Life, ratios, serve, summarize, take_turns
from benchmarks.loading.peers import Views
from benchmarks.loading.rows import BOX
from mae_vit.data.batches.augmented import open_source
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.order.order import GlobalOrder, RankSlice
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.data.views import normalization

PEER = "tifffile"
BANDS, BATCH = 13, 32
SIZES, TILES = (64, 224), 256
STEPS_OF_ALL = 1 << 20


def write_tiles(folder: Path, size: int) -> None:
    """Writes tiles with the noise and the smooth parts that reflectances have."""
    import tifffile

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows, columns = np.mgrid[:size, :size]
    for number in range(TILES):
        waves = [np.sin(rows / (9 + n)) * np.cos((columns + number) / (7 + n)) for n in range(BANDS)]
        values = 1500 + 1000 * np.stack(waves) + rng.normal(0, 30, (BANDS, size, size))
        tile = {"photometric": "minisblack", "planarconfig": "separate"}
        tifffile.imwrite(folder / f"{number:05d}.tif", values.astype(np.uint16), **tile)


def ours(folder: Path, size: int, unit: bool, pipe: Connection) -> None:
    """Lives as our loader."""
    torch.set_num_threads(1)
    index = open_index(folder / "shards", "train")
    augment = Augment(img_size=(size, size), crop="random_resized", flip=True, **BOX)
    source = open_source(index, "tar", channels=BANDS, augment=augment, memory_limit_gib=1)
    order = GlobalOrder(len(index), BATCH, seed=0)
    batches = load_batches(source, order, RankSlice(), start_step=0, stop_step=STEPS_OF_ALL)
    bands = index.dataset.bands
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in normalization("dataset", index.dataset, BANDS))

    def step(_: int) -> None:
        images = next(batches).images
        assert images.dtype == torch.uint16
        if unit:
            bands.unit(images).sub_(mean).div_(std)

    serve(step, pipe, torch.device("cpu"))


def theirs(folder: Path, size: int, pipe: Connection) -> None:
    """Lives as a Dataset that reads files by tifffile."""
    import tifffile
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    description = open_index(folder / "shards", "train").dataset
    limits = (description.bands.low, description.bands.high, description.mean, description.std)
    low, high, mean, std = (torch.tensor(values).view(-1, 1, 1) for values in limits)
    crop = v2.RandomResizedCrop(size, interpolation=v2.InterpolationMode.BICUBIC, **BOX)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip()])
    paths = sorted((folder / "src").glob("*.tif"))

    def read(number: int) -> np.ndarray:
        return np.asarray(tifffile.imread(paths[number]))

    def view(image: np.ndarray) -> torch.Tensor:
        return ((transform(torch.from_numpy(image.astype(np.float32))) - low) / (high - low) - mean) / std

    tiles = Views(paths, view, read=read)
    sampler = RandomSampler(tiles, replacement=True, num_samples=STEPS_OF_ALL * BATCH)
    batches = iter(DataLoader(tiles, BATCH, sampler=sampler))
    serve(lambda _: next(batches), pipe, torch.device("cpu"))


def measure(size: int, *, rounds: int, steps: int) -> dict[str, Any]:
    """Measures tiles of one size."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiles(folder / "src", size)
        with contextlib.redirect_stderr(io.StringIO()):
            prepare([find_images(str(folder / "src"), out=folder)], folder / "shards")
        lives: dict[str, Life] = {
            "ours": partial(ours, folder, size, False),
            "ours_unit": partial(ours, folder, size, True),
            PEER: partial(theirs, folder, size),
        }
        times = take_turns(lives, rounds=rounds, steps=steps, clock="cpu")
    rates = {name: [BATCH * 1e3 / taken for taken in turns] for name, turns in times.items()}
    return {
        "tiles_per_core_s": {name: summarize(values, 1) for name, values in rates.items()},
        "times_of_peer": {
            f"{mine} / {PEER}": summarize(ratios(times[PEER], times[mine]), 2)
            for mine in ("ours", "ours_unit")
        },
    }


def main() -> None:
    """Measures both sizes and prints their ratios."""
    arguments = parse(make_parser(__doc__, rounds=7, steps=4))
    counts = {"rounds": arguments.rounds, "steps": arguments.steps}
    report = {
        "benchmark": "loading of bands",
        "bands": f"{BANDS} x uint16",
        "compression": "none",
        "results": {f"{size} px": measure(size, **counts) for size in SIZES},
        "versions": {name: metadata.version(name) for name in ("tifffile", "torchvision")},
    }
    publish(report, arguments, threads=1)


if __name__ == "__main__":
    run(main)
