"""The output folder: `features.npy` (K, D) of the K images that can be read, and files that say which these are.

`keys.txt` has a line for each row; so have `paths.txt` of images that are not prepared, and `splits.txt` and
`labels.npy` (int32; -1 for none) where there are any. `meta.json` says what the features are of, and names the classes.
`broken.csv` lists the other images.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from mae_vit.core import __version__
from mae_vit.core.arrays import keep_rows
from mae_vit.core.errors import InputError
from mae_vit.core.files import write_atomically, write_json
from mae_vit.core.messages import plain_text
from mae_vit.weights.embed.features import Settings
from mae_vit.weights.embed.images import Images
from mae_vit.weights.feature_encoder import FeatureEncoder

FEATURES, KEYS, META, BROKEN = "features.npy", "keys.txt", "meta.json", "broken.csv"
# Of a folder that is not complete.
STATE, LOCK = "state.json", ".lock"
_FILES = {FEATURES, KEYS, META, BROKEN, "paths.txt", "splits.txt", "labels.npy", STATE, LOCK}


def check_out(out: Path) -> None:
    """Makes sure that the output can take the place of `out`.

    Raises:
        InputError: if `out` is a file or the name of one, or a folder that holds something else.
    """
    if out.suffix in (".npy", ".npz", ".parquet"):
        raise InputError(f"--out {out}: the output is a folder: give {out.with_suffix('')}")
    if not out.exists():
        return
    names = {path.name for path in out.iterdir()} if out.is_dir() else {out.name}
    if names and not (META in names and names <= _FILES):
        raise InputError(
            f"--out {out} holds {min(names - _FILES, default='no ' + META)}: it is no output of `mae-vit embed`, "
            "give another name"
        )


def describe_features(encoder: FeatureEncoder, images: Images, settings: Settings) -> dict[str, Any]:
    """Describes an encoder, the images and the settings, as JSON. Equal descriptions have equal features."""
    return {
        "tool": f"mae-vit {__version__}",
        **encoder.description(),
        "precision": settings.precision,
        "dtype": settings.dtype,
        "data": images.name,
        "data_images": len(images),
        "data_fingerprint": images.fingerprint,
        "labels": bool((images.labels >= 0).any()),
        **encoder.input.bands.to_entry(),
        **encoder.input.preprocessing.to_entry(),
    }


def read_description(path: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Reads what features were made of, and compares it with what is asked for.

    Args:
        path: `meta.json` or `state.json`.
        asked: by `describe_features`.

    Raises:
        InputError: if the file is damaged, or naming what differs.
    """
    try:
        saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise InputError(f"{path} is damaged: --restart begins again") from None
    differing = [key for key in asked if key not in ("tool", "data") and saved.get(key) != asked[key]]
    if differing:
        reasons = ", ".join(f"{key} was {saved.get(key)}, is {asked[key]}" for key in differing)
        raise InputError(
            f"{path.parent} was made otherwise ({reasons}): --restart begins again, another --out keeps it"
        )
    return saved


def write_output(folder: Path, meta: dict[str, Any], broken: list[tuple[int, str]], images: Images) -> int:
    """Completes a folder in which `features.npy` has the rows of all images that can be read; returns their number."""
    readable = np.delete(np.arange(len(images)), [number for number, _ in broken])
    keep_rows(folder / FEATURES, len(readable))
    entries = [images.entries[number] for number in readable.tolist()]
    lines = {KEYS: [plain_text(entry.key) for entry in entries]}
    if images.dataset is None:  # a key does not tell the file: IMG_1.png beside IMG_1.jpg is IMG_1_2
        lines["paths.txt"] = [plain_text(entry.path) for entry in entries]
    if images.splits:
        lines["splits.txt"] = [entry.split for entry in entries]
    for name, values in lines.items():
        (folder / name).write_text("".join(f"{value}\n" for value in values), encoding="utf-8")
    if meta["labels"]:
        np.save(folder / "labels.npy", images.labels[readable])
    write_broken(folder / BROKEN, broken, images)
    classes = list(images.classes) if meta["labels"] else []
    write_json(folder / META, {**meta, "rows": len(readable), "broken": len(broken), "classes": classes})
    return len(readable)


def write_broken(path: Path, broken: list[tuple[int, str]], images: Images) -> None:
    """Writes split, key, path and reason of the images that cannot be read; removes an earlier list without any."""
    if not broken:
        path.unlink(missing_ok=True)
        return
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("split", "key", "path", "reason"))
    for number, reason in broken:
        entry = images.entries[number]
        split = entry.split if images.splits else ""
        writer.writerow((split, entry.key, plain_text(entry.path), plain_text(reason)))
    write_atomically(path, stream.getvalue().encode())
