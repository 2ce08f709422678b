"""The output: NumPy's .npz or Apache Parquet, metadata in it, and the list of broken images beside it."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core import __version__
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically
from mae_vit.core.messages import count_of, plain_text
from mae_vit.models.encoder_file import plain_bands
from mae_vit.weights.embed.features import Settings
from mae_vit.weights.embed.images import Images
from mae_vit.weights.feature_encoder import FeatureEncoder

_METADATA = b"mae_vit"
_ROW_GROUP_BYTES = 32 << 20


def check_out(out: Path) -> None:
    """Makes sure that the output can be written.

    Raises:
        InputError: if its format is not known, or takes a package that is missing.
    """
    if out.suffix not in (".npz", ".parquet"):
        raise InputError(f"--out {out}: the name ends in .npz or .parquet, which says the format")
    if out.is_dir():
        raise InputError(f"--out {out} is a folder: give a file in it, such as {out / 'features.npz'}")
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401 - optional
        except ImportError:
            needed = 'Parquet needs pyarrow: pip install "mae-vit[parquet]"'
            raise InputError(f"{needed}, or give --out FILE.npz") from None


def make_metadata(encoder: FeatureEncoder, images: Images, settings: Settings) -> dict[str, Any]:
    """Describes an encoder, the images and the settings, as JSON."""
    return {
        "tool": f"mae-vit {__version__}",
        **encoder.description(),
        "precision": settings.precision,
        "dtype": settings.dtype,
        "data": images.name,
        "data_images": len(images),
        "data_fingerprint": images.fingerprint,
        "labels": bool((images.labels >= 0).any()),
        **({} if encoder.input.bands is None else {"bands": plain_bands(encoder.input.bands)}),
        **encoder.input.preprocessing.to_entry(),
    }


def check_same_features(saved: dict[str, Any], asked: dict[str, Any], *, where: Path) -> None:
    """Compares what features were made of with what is asked for.

    Raises:
        InputError: naming what differs.
    """
    differing = {key for key in asked if saved.get(key) != asked[key]}
    reasons = []
    if differing & {"digest", "mean", "std", "bands", "preprocessing"}:
        same_name = "" if "start" in differing else " with other values"
        reasons.append(f"the weights were {saved.get('start')}{same_name}")
    if differing & {"data_fingerprint", "data_images"}:
        count = count_of(saved.get("data_images", 0), "image")
        reasons.append(f"DATA was {saved.get('data')} as it was, {count}")
    elif "labels" in differing:
        reasons.append(f"DATA was taken {'with' if saved.get('labels') else 'without'} labels")
    for option in ("--img-size", "--pool", "--precision", "--dtype"):
        key = option.removeprefix("--").replace("-", "_")
        if key in differing:
            reasons.append(f"{option} was {_format(saved.get(key))}, not {_format(asked[key])}")
    if reasons:
        raise InputError(
            f"{where} was made otherwise: {'; '.join(reasons)}: --restart begins again, another --out keeps it"
        )


def _format(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def columns_of(
    features: np.ndarray, broken: list[tuple[int, str]], images: Images, metadata: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The columns of an output, by name.

    Returns:
        features (K, D), keys (K,), and where there are any: paths (K,) of images that are not prepared, labels int32
        (K,), -1 for none, with the names of `classes`, and splits (K,), all of the K images that are not broken.
        `metadata` is JSON.
    """
    whole = np.delete(np.arange(len(images)), [image for image, _ in broken])
    entries = [images.entries[image] for image in whole.tolist()]
    columns = {"features": features, "keys": np.array([entry.key for entry in entries], np.str_)}
    if images.dataset is None:  # keys tell apart, but not which file: IMG_1.png beside IMG_1.jpg is IMG_1_2
        columns["paths"] = np.array([plain_text(entry.path) for entry in entries], np.str_)
    if metadata["labels"]:
        columns |= {"labels": images.labels[whole], "classes": np.array(images.classes, np.str_)}
    if images.splits:
        columns["splits"] = np.array([entry.split for entry in entries], np.str_)
    classes = list(images.classes) if metadata["labels"] else []
    counts = {"rows": len(whole), "broken": len(broken), "classes": classes}
    return {**columns, "metadata": np.array(json.dumps({**metadata, **counts}))}


def write_output(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Writes `columns_of` as the name's suffix says; equal columns give equal bytes. No array needs pickle."""
    if path.suffix == ".npz":
        # An array that is mapped from disk is written in pieces.
        np.savez(path, **columns)  # type: ignore[arg-type]
    else:
        _write_parquet(path, columns)


def _write_parquet(path: Path, columns: dict[str, np.ndarray]) -> None:
    """The columns of `columns_of`, features as lists of D; the schema's metadata has JSON under "mae_vit"."""
    import pyarrow as pa  # optional
    import pyarrow.parquet as pq

    features, text = columns["features"], pa.string()
    types = {"keys": text, "paths": text, "labels": pa.int32(), "splits": text}
    width = features.shape[1]
    # Not copied: an array that is mapped from disk is read a row group at a time.
    arrays = {"features": pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), width)}
    arrays |= {
        name: pa.array(columns[name].tolist(), type) for name, type in types.items() if name in columns
    }
    table = pa.table(arrays, metadata={_METADATA: str(columns["metadata"]).encode()})
    size = max(1, _ROW_GROUP_BYTES // (width * features.dtype.itemsize))
    # A dictionary of floats would be as large as they are.
    pq.write_table(table, path, use_dictionary=["splits"], row_group_size=size)


def read_metadata(path: Path) -> dict[str, Any]:
    """Reads the metadata of an output.

    Raises:
        InputError: if it is none.
    """
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return dict(json.loads(str(file["metadata"])))
        import pyarrow.parquet as pq  # optional

        return dict(json.loads(pq.read_schema(path).metadata[_METADATA]))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        raise InputError(f"{path} is there, and no file of `mae-vit embed`: give another --out") from None


def broken_path(out: Path) -> Path:
    """The list of the images that have no features: split, key, path, reason."""
    return out.with_name(f"{out.name}.broken.csv")


def write_broken(out: Path, broken: list[tuple[int, str]], images: Images) -> None:
    """Writes the list of broken images; removes an earlier one where there are none."""
    if not broken:
        broken_path(out).unlink(missing_ok=True)
        return
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("split", "key", "path", "reason"))
    for image, reason in broken:
        entry = images.entries[image]
        split = entry.split if images.splits else ""
        writer.writerow((split, entry.key, plain_text(entry.path), plain_text(reason)))
    write_atomically(broken_path(out), stream.getvalue().encode())
