"""Makes satellite tiles of 13 bands from photographs, to try things on where no real ones can be had.

    python docs/tools/mix_bands.py photos/ tiles/

The structure is that of the photographs; the bands are mixtures of their red, green and blue, so they are no
measurements. Files are TIFF of uint16 with the names of the bands, in the class folders and splits of the photographs
(pip install "mae-vit[bands]"). docs/results/bands.json is of such tiles.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from pathlib import Path

import numpy as np

from mae_vit.data.images.augment import center_crop
from mae_vit.data.images.decode import decode
from mae_vit.data.prepare.sources.find import find_images

# Band: weights of red, green and blue, its gain in raw values at full brightness, and every how many pixels it has a
# value of its own. Names, brightness and resolution follow Sentinel-2 (10, 20 and 60 m). In the visible bands (B02 to
# B04) all three colors look nearly alike; what tells red, green and blue apart is in the infrared.
SATELLITE = {
    "B01": ((0.30, 0.35, 0.35), 1500, 6),
    "B02": ((0.33, 0.34, 0.37), 1800, 1),
    "B03": ((0.32, 0.37, 0.32), 2000, 1),
    "B04": ((0.38, 0.33, 0.31), 2200, 1),
    "B05": ((0.70, 0.25, 0.05), 2600, 2),
    "B06": ((0.85, 0.15, 0.00), 3200, 2),
    "B07": ((0.95, 0.05, 0.00), 3500, 2),
    "B08": ((1.00, 0.00, 0.00), 3800, 1),
    "B8A": ((0.90, 0.00, 0.10), 3800, 2),
    "B09": ((0.50, 0.00, 0.50), 1200, 6),
    "B10": ((0.10, 0.10, 0.80), 300, 6),
    "B11": ((0.00, 0.20, 0.80), 3000, 2),
    "B12": ((0.00, 0.90, 0.10), 2400, 2),
}
# Shares of tiles that end at the edge of the satellite's strip, and raw value of pixels beyond it.
AT_THE_EDGE, NODATA = 0.05, 0
# Tags of TIFF.
GDAL_METADATA, GDAL_NODATA = 42112, 42113


def mix(photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mixes bands out of a photograph: uint8 (3, H, W) -> uint16 (13, H, W)."""
    linear = (photo.astype(np.float64) / 255) ** 2.2
    raw = np.clip(np.stack([_band(linear, *facts, rng) for facts in SATELLITE.values()]), 1, 65535)
    if rng.random() < AT_THE_EDGE:
        raw[:, :, : rng.integers(1, raw.shape[2] // 2)] = NODATA
    return np.rint(raw).astype(np.uint16)


def _band(
    linear: np.ndarray, weights: tuple[float, ...], gain: float, step: int, rng: np.random.Generator
) -> np.ndarray:
    band = np.tensordot(weights, linear, 1) * gain + 0.04 * gain
    height, width = band.shape
    band = band[::step, ::step].repeat(step, axis=0).repeat(step, axis=1)[:height, :width]
    return band + rng.normal(0, 0.01 * gain, band.shape)


def write(stem: Path, bands: np.ndarray) -> None:
    """Writes bands (13, H, W) as STEM.tif, with their names and what no data are, as GDAL does."""
    import tifffile  # optional

    items = "".join(
        f'<Item name="DESCRIPTION" sample="{number}" role="description">{name}</Item>'
        for number, name in enumerate(SATELLITE)
    )
    metadata = f"<GDALMetadata>{items}</GDALMetadata>"
    tags = [(GDAL_METADATA, "s", 0, metadata, True), (GDAL_NODATA, "s", 0, str(NODATA), True)]
    tifffile.imwrite(
        stem.with_suffix(".tif"), bands, planarconfig="separate", photometric="minisblack", extratags=tags
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Makes satellite tiles of 13 bands from photographs.")
    parser.add_argument("photos", help="what mae-vit prepare takes: a folder, an archive")
    parser.add_argument("out", type=Path, help="a folder to be")
    parser.add_argument("--side", type=int, default=64, metavar="PX", help="of the tiles (64)")
    parser.add_argument("--per-class", type=int, metavar="N", help="of each class and split (all)")
    arguments = parser.parse_args()
    counts: dict[Path, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for entry in find_images(arguments.photos, out=Path(scratch)).entries:
            folder = arguments.out / entry.split / (entry.class_name or "")
            counts[folder] = counts.get(folder, 0) + 1
            if arguments.per_class is not None and counts[folder] > arguments.per_class:
                continue
            photo = center_crop(decode(entry.read(), 3), (arguments.side, arguments.side))
            # From the photograph alone, so that neither its place nor others change a tile.
            rng = np.random.default_rng(zlib.crc32(photo.tobytes()))
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / f"{counts[folder]:06d}", mix(photo, rng))
    print(f"{sum(len(list(folder.iterdir())) for folder in counts)} images in {arguments.out}")


if __name__ == "__main__":
    main()
