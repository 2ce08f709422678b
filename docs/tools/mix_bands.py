"""Makes images of many bands from photographs, to try things on where no real ones can be had.

python docs/tools/mix_bands.py photos/ tiles/ --kind satellite        # 13 bands, uint16
python docs/tools/mix_bands.py photos/ cells/ --kind microscopy       # 4 channels, uint16
python docs/tools/mix_bands.py photos/ xrays/ --kind xray             # gray, 12 bits in uint16

The structure is that of the photographs; the bands are mixtures of their red, green and blue, so they are no
measurements. Files are TIFF with the names of the bands, or 16-bit PNG of one band, in the class folders and splits
of the photographs. TIFF is written by tifffile: pip install "mae-vit[bands]".
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

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
# Channel: weights, and the share of the brightest pixels that fluoresces.
MICROSCOPY = {
    "DNA": ((0.0, 0.2, 0.8), 0.15),
    "ER": ((0.1, 0.8, 0.1), 0.4),
    "actin": ((0.8, 0.1, 0.1), 0.3),
    "mito": ((0.4, 0.4, 0.2), 0.2),
}
# Shares of tiles that end at the edge of the satellite's strip, and raw value of pixels beyond it.
AT_THE_EDGE, NODATA = 0.05, 0
# Tags of TIFF.
GDAL_METADATA, GDAL_NODATA = 42112, 42113


def mix(photo: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Mixes bands out of a photograph: uint8 (3, H, W) -> uint16 (C, H, W)."""
    linear = (photo.astype(np.float64) / 255) ** 2.2
    if kind == "satellite":
        bands = np.stack([_band(linear, *facts, rng) for facts in SATELLITE.values()])
        raw = np.clip(bands, 1, 65535)
        if rng.random() < AT_THE_EDGE:
            raw[:, :, : rng.integers(1, raw.shape[2] // 2)] = NODATA
    elif kind == "microscopy":
        raw = np.stack([_channel(linear, *facts, rng) for facts in MICROSCOPY.values()])
    else:
        gray = np.tensordot([0.299, 0.587, 0.114], photo.astype(np.float64) / 255, 1)
        raw = (600 + 2600 * (1 - gray) + rng.normal(0, 12, gray.shape))[None]
    return np.clip(np.rint(raw), 0, 65535).astype(np.uint16)


def _band(
    linear: np.ndarray, weights: tuple[float, ...], gain: float, step: int, rng: np.random.Generator
) -> np.ndarray:
    band = np.tensordot(weights, linear, 1) * gain + 0.04 * gain
    if step > 1:
        height, width = band.shape
        coarse = band[::step, ::step]
        band = coarse.repeat(step, axis=0).repeat(step, axis=1)[:height, :width]
    return band + rng.normal(0, 0.01 * gain, band.shape)


def _channel(
    linear: np.ndarray, weights: tuple[float, ...], share: float, rng: np.random.Generator
) -> np.ndarray:
    stained = np.tensordot(weights, linear, 1)
    stained = np.clip(stained - np.quantile(stained, 1 - share), 0, None)
    counts = 40 * stained / max(stained.max(), 1e-6)
    return 250 + 400 * rng.poisson(counts) + rng.normal(0, 20, stained.shape)


def write(stem: Path, bands: np.ndarray, kind: str) -> None:
    """Writes bands (C, H, W) with their names as GDAL does: STEM.tif; gray ones as STEM.png."""
    names = {"satellite": SATELLITE, "microscopy": MICROSCOPY}.get(kind)
    if names is None:
        Image.fromarray(bands[0]).save(stem.with_suffix(".png"))
        return
    import tifffile  # optional

    items = "".join(
        f'<Item name="DESCRIPTION" sample="{number}" role="description">{name}</Item>'
        for number, name in enumerate(names)
    )
    tags = [(GDAL_METADATA, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]
    if kind == "satellite":
        tags.append((GDAL_NODATA, "s", 0, str(NODATA), True))
    tifffile.imwrite(
        stem.with_suffix(".tif"), bands, planarconfig="separate", photometric="minisblack", extratags=tags
    )


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", help="what mae-vit prepare takes: a folder, an archive")
    parser.add_argument("out", type=Path, help="a folder to be")
    parser.add_argument("--kind", choices=("satellite", "microscopy", "xray"), default="satellite")
    parser.add_argument("--side", type=int, default=64, metavar="PX", help="of the tiles (64)")
    parser.add_argument(
        "--per-class", type=int, metavar="N", help="photographs of each class and split (all)"
    )
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
            write(folder / f"{counts[folder]:06d}", mix(photo, arguments.kind, rng), arguments.kind)
    print(f"{sum(len(list(folder.iterdir())) for folder in counts)} images in {arguments.out}")


if __name__ == "__main__":
    main()
