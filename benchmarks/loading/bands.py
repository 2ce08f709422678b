"""Loading of bands, for one core: 13 x uint16 TIFF tiles as training takes them, against what a user writes.

Ours is the path of training from shards: index, source, order, `load_batches`, up to the uint16 batch. `ours_unit` also
maps it to float32 with zero mean and unit variance, which training does on the device. The peers read the same files by
tifffile or rasterio in a torch Dataset, as float32, crop and resize (bicubic, antialiased), flip, normalize, collate.
All use random resized crops (0.2 to 1) and no worker processes, so that the CPU time of a process is all that it takes.
They take turns. Prints JSON.

    python benchmarks/loading/bands.py [--sizes 64 224] [--tiles 256] [--rounds 7] [--compression zlib] [--out FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.reports import add_out, publish
from benchmarks.harness.turns import Life, paired, serve, summarize, take_turns
from mae_vit.data.batches.loader import load_batches
from mae_vit.data.batches.sources import open_source
from mae_vit.data.images.augment import Augment
from mae_vit.data.index import open_index
from mae_vit.data.normalization import normalization
from mae_vit.data.order.order import GlobalOrder, RankSlice
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images

BANDS, BATCH = 13, 32
SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
STEPS_OF_ALL = 1 << 20


def write_tiles(folder: Path, tiles: int, size: int, compression: str | None) -> None:
    """Writes tiles with the noise and the smooth parts that reflectances have."""
    import tifffile

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows, columns = np.mgrid[:size, :size]
    for number in range(tiles):
        waves = [np.sin(rows / (9 + n)) * np.cos((columns + number) / (7 + n)) for n in range(BANDS)]
        values = 1500 + 1000 * np.stack(waves) + rng.normal(0, 30, (BANDS, size, size))
        path = folder / f"{number:05d}.tif"
        tifffile.imwrite(
            path,
            values.astype(np.uint16),
            photometric="minisblack",
            planarconfig="separate",
            compression=compression,
        )


def ours(folder: Path, size: int, unit: bool, pipe: Connection) -> None:
    """Lives as our loader."""
    torch.set_num_threads(1)
    index = open_index(folder / "shards", "train")
    augment = Augment(img_size=(size, size), crop="random_resized", scale=SCALE, ratio=RATIO, flip=True)
    source = open_source(index, "tar", channels=BANDS, augment=augment, memory_limit_gib=1)
    order = GlobalOrder(len(index), BATCH, seed=0)
    batches = load_batches(source, order, RankSlice(), start_step=0, stop_step=STEPS_OF_ALL)
    bands = index.dataset.bands
    assert bands is not None
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in normalization("dataset", index.dataset, BANDS))

    def step(_: int) -> None:
        images = next(batches).images
        assert images.dtype == torch.uint16
        if unit:
            bands.unit(images).sub_(mean).div_(std)

    serve(step, pipe, torch.device("cpu"))


def theirs(folder: Path, size: int, library: str, pipe: Connection) -> None:
    """Lives as a Dataset that reads files by tifffile or rasterio."""
    from torch.utils.data import DataLoader, Dataset, RandomSampler
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    description = open_index(folder / "shards", "train").dataset
    low, high = (torch.tensor(v).view(-1, 1, 1) for v in (description.bands.low, description.bands.high))  # type: ignore[union-attr]
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (description.mean, description.std))
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=SCALE, ratio=RATIO, interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
        ]
    )

    def read(path: Path) -> np.ndarray:
        if library == "tifffile":
            import tifffile

            return np.asarray(tifffile.imread(path))
        import rasterio

        with rasterio.open(path) as file:
            return np.asarray(file.read())

    class Tiles(Dataset[torch.Tensor]):
        paths = sorted((folder / "src").glob("*.tif"))

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, number: int) -> torch.Tensor:
            image = torch.from_numpy(read(self.paths[number]).astype(np.float32))
            return ((transform(image) - low) / (high - low) - mean) / std

    tiles = Tiles()
    sampler = RandomSampler(tiles, replacement=True, num_samples=STEPS_OF_ALL * BATCH)
    batches: Iterator[torch.Tensor] = iter(DataLoader(tiles, BATCH, sampler=sampler))

    def step(_: int) -> None:
        next(batches)

    serve(step, pipe, torch.device("cpu"))


def contenders(folder: Path, size: int) -> dict[str, Life]:
    """Names those that are installed here."""
    lives: dict[str, Life] = {
        "ours": partial(ours, folder, size, False),
        "ours_unit": partial(ours, folder, size, True),
        "tifffile": partial(theirs, folder, size, "tifffile"),
    }
    with contextlib.suppress(ImportError):
        import rasterio  # noqa: F401

        lives["rasterio"] = partial(theirs, folder, size, "rasterio")
    return lives


def measure(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures tiles of one size."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tiles(folder / "src", arguments.tiles, size, arguments.compression)
        write: Callable[[], Any] = partial(
            prepare, [find_images(str(folder / "src"), out=folder)], folder / "shards"
        )
        with contextlib.redirect_stderr(io.StringIO()):
            write()
        times = take_turns(
            contenders(folder, size), rounds=arguments.rounds, steps=arguments.steps, clock="cpu"
        )
    peers = [name for name in times if not name.startswith("ours")]
    return {
        "tiles_per_core_s": {
            name: summarize([BATCH * 1e3 / t for t in taken], 1) for name, taken in times.items()
        },
        "times_of_peer": {
            f"{mine} / {peer}": summarize(paired(times[peer], times[mine], lambda a, b: a / b), 2)
            for mine in ("ours", "ours_unit")
            for peer in peers
        },
    }


def main() -> None:
    """Measures the chosen sizes and prints their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[64, 224], metavar="PX", help="of the tiles (64 224)"
    )
    parser.add_argument("--tiles", type=int, default=256, metavar="N", help="of each size (256)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each contender (7)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help=f"batches of {BATCH} in a turn (4)")
    parser.add_argument("--compression", choices=("zlib", "lzw"), help="of the files (none)")
    add_out(parser)
    arguments = parser.parse_args()
    report = {
        "benchmark": "loading of bands",
        "bands": f"{BANDS} x uint16",
        "compression": arguments.compression or "none",
        "results": {f"{size} px": measure(size, arguments) for size in arguments.sizes},
        "versions": {name: metadata.version(name) for name in ("tifffile", "torchvision")},
    }
    publish(report, arguments.out, threads=1)


if __name__ == "__main__":
    main()
