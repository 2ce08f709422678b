"""Pairs images with masks by path; checks the masks, and counts their pixels."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.core.user_files import read_text
from mae_vit.data.images.decode import DecodeError, decode_mask, id_table, numbered
from mae_vit.data.prepare.convert import Converted
from mae_vit.data.prepare.entries import Entry, ImageSource, composed
from mae_vit.data.prepare.listing import shown
from mae_vit.data.prepare.sources.folders import open_folder
from mae_vit.data.shards.dataset_json import Segmentation

_ID_AND_NAME = re.compile(r"(\d{1,5}):\s*(.+)")


def read_classes(path: Path, ignore: int) -> Segmentation:
    """Reads class names, one a line: the first is that of id 0, or all are `ID: NAME`; the id `ignore` is no class.

    Raises:
        InputError: if the file has fewer than two names, or repeats a name or an id.
        OSError: if it cannot be read.
    """
    lines = read_text(path).splitlines()
    matches = [_ID_AND_NAME.fullmatch(line.strip()) for line in lines if line.strip()]
    ids = [(int(match[1]), match[2]) for match in matches if match]
    numbers = sorted(number for number, _ in ids)
    if wrong := [one for one, after in pairwise([*numbers, -1]) if one == after or one > 0xFFFF]:
        raise InputError(f"--mask-classes {path}: id {wrong[0]} is given twice or above 65535; correct it")
    pairs = ids if len(ids) == len(matches) else enumerate(lines)
    names = {number: name.strip() for number, name in pairs if number != ignore and name.strip()}
    if len(names) < 2 or len(set(names.values())) < len(names):
        raise InputError(
            f"--mask-classes {path}: {len(set(names.values()))} names for {len(names)} ids (without id {ignore} of "
            "--mask-ignore); give two or more classes, each its own name"
        )
    return Segmentation(classes=list(names.values()), ids=list(names), ignore=ignore)


def pair_masks(
    source: ImageSource, folder: Path, segmentation: Segmentation, *, partly: bool = False
) -> ImageSource:
    """Gives each image the mask with the same path, apart from the extension; `partly` leaves out images without one.

    Raises:
        InputError: if images have no mask, naming the first.
    """
    masks = open_folder(folder).images
    by_stem = {_stem(path): read for path, read in masks if path.lower().endswith(".png")}
    entries = [replace(entry, read_mask=by_stem.get(_stem(entry.path))) for entry in source.entries]
    missing = [entry.path for entry in entries if entry.read_mask is None]
    if missing and (not partly or len(missing) == len(entries)):
        there = shown(path for path, _ in masks) or "no images"
        remedy = "Add the masks, or leave these images out with --masked-only"
        if len(missing) == len(entries):
            remedy = "Give each mask the name of its image"
        raise InputError(
            f"{folder} has no mask for {count_of(len(missing), 'image')} of {len(entries):,}: {shown(missing)} "
            f"(expected {_stem(missing[0])}.png; the folder has {there}). {remedy}"
        )
    notes = [f"left out {count_of(len(missing), 'image')} without a mask"] if missing else []
    if unused := len(by_stem.keys() - {_stem(entry.path) for entry in source.entries}):
        notes.append(f"{count_of(unused, 'mask')} of {folder} without an image")
    return replace(
        source,
        entries=[entry for entry in entries if entry.read_mask is not None],
        notes=(*source.notes, *notes),
        left_out={**source.left_out, **dict.fromkeys(missing, "without a mask")},
        segmentation=segmentation,
    )


def agreed_segmentation(sources: Sequence[ImageSource], existing: Segmentation | None) -> Segmentation | None:
    """Returns the classes of all masks; None without masks.

    Raises:
        InputError: if masks, or those that the folder already has, are of other classes.
    """
    found = [one for one in (existing, *(source.segmentation for source in sources)) if one is not None]
    if any(one != found[0] for one in found):
        raise InputError(
            f"there are already masks of {len(found[0].classes)} classes, with ignored id {found[0].ignore}; give "
            "the same --mask-classes and --mask-ignore, or another folder"
        )
    return found[0] if found else None


def two_values_note(segmentation: Segmentation, pixels: np.ndarray | None) -> list[str]:
    """Warns of masks that may mark an object by the ignored id; `pixels` as `Statistics.add_mask` takes them."""
    if pixels is None or not pixels[0] or np.count_nonzero(pixels[1:]) > 1:
        return []
    ignore, counted = segmentation.ignore, segmentation.ids[int(pixels[1:].argmax())]
    return [
        f"warning: all pixels of the masks have the id {counted} or the ignored id {ignore}; if {ignore} is an "
        "object, give another --mask-ignore and add it to --mask-classes"
    ]


def read_mask(entry: Entry, stored: Converted, segmentation: Segmentation) -> tuple[bytes, np.ndarray]:
    """Reads the mask of an image, and resizes it as the stored image.

    Returns it as a PNG, and its pixels as `Statistics.add_mask` takes them.

    Raises:
        InputError: if its size differs from the image's, or it has an id that is no class.
    """
    assert entry.read_mask is not None
    header, data = stored.source, entry.read_mask()
    mask, size = decode_mask(data), (stored.height, stored.width)
    table, classes = id_table(segmentation.ids, segmentation.ignore), len(segmentation.classes)
    if header.orientation != 1 and not stored.turned:
        raise InputError(
            f"{entry.path} has an EXIF orientation, and labeling tools show it turned; give --exif-orientation apply, "
            "or remove the orientation if the masks are not turned (exiftool -r -Orientation= FOLDER)"
        )
    # Orientations from 5 on exchange the sides.
    sides = (header.height, header.width)[:: -1 if header.orientation > 4 else 1]
    if mask.shape != sides:
        remedy = "turn it" if mask.shape == sides[::-1] else "resize it (nearest neighbor)"
        raise InputError(
            f"the mask of {entry.path} has {mask.shape[1]}x{mask.shape[0]} px, but its image {sides[1]}x{sides[0]}; "
            f"{remedy}"
        )
    try:
        numbers = numbered(mask, table)
    except DecodeError as error:
        raise InputError(
            f"the mask of {entry.path}: {error}; add it to --mask-classes ({classes} ids), or give it as "
            "--mask-ignore"
        ) from None
    if mask.shape != size:
        mask = np.array(Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST))
        stream = io.BytesIO()
        Image.fromarray(mask.astype(np.uint8) if mask.max() < 256 else mask).save(stream, "png")
        data, numbers = stream.getvalue(), numbered(mask, table)
    return data, np.bincount(numbers.ravel(), minlength=1 + classes)


def _stem(path: str) -> str:
    return composed(path.rpartition(".")[0])
