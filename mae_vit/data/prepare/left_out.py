"""Leaves out images of a listing that are not for training: masks, thumbnails, copies; warns of parts of one image."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from mae_vit.core import user_files
from mae_vit.core.messages import count_of
from mae_vit.data.images.decode import DecodeError, decode, read_header
from mae_vit.data.prepare.entries import Reader
from mae_vit.data.prepare.folder_names import DRAWN, Parts, companions_among
from mae_vit.data.prepare.listing import Listing, shown

# Bands: S2A_..._B8A.tif of Sentinel-2, LC08_..._B4.TIF of Landsat; of microscopes _w1.png, _c1.tif (but not well C01),
# _w1GUID, and with more text behind the band, img_channel000_..., -ch1sk1fk1fl1.tiff.
_GUID = r"[0-9A-F]{8}(?:-[0-9A-F]{4}){3}-[0-9A-F]{12}"
_BAND = re.compile(
    rf"(.*[-_.])(?:(?:B|band_?|(?-i:w|c))\d{{1,2}}(?:A|{_GUID})?|ch(?:annel)?_?\d{{1,3}}(?!\d)(.*))\.(?:tiff?|jp2|png)$",
    re.IGNORECASE,
)
# Numbered bands: MicaSense's IMG_0000_1.tif ... IMG_0000_5.tif; longer runs are rather slices or frames.
_RUN = re.compile(r"(.*[-_.])(\d{1,2})\.tiff?$", re.IGNORECASE)
_MOST_OF_RUN = 16
# Other sizes of NAME.jpg: NAME_thumb.jpg, thumb_NAME.jpg, NAME@2x.jpg.
_SIZE = re.compile(r"[-_. ]thumb(nail)?s?$|@\dx$|^(thumb(nail)?s?|tn)[-_. ]", re.IGNORECASE)
# Annotations of NAME.jpg: NAME_mask.png, NAME_mask_1.png, NAME-labelled.png, mask_NAME.png; ADE20K's NAME_parts_1,
# CHASE_DB1's NAME_1stHO.
_DRAWN = (
    "masks?|label(l?ed|s|_?ids)?|targets?|seg(mentation|mented)?|gt|ground[-_ ]?truth|annot(ation|ated)?s?|"
    "overlays?|parts_?(?=\\d)|superpixels|depth|contours?"
)
_MASK = re.compile(
    rf"[-_. ]+(({_DRAWN})([-_. ]?\(?\d{{1,3}}\)?)?|\d(st|nd|rd)HO)$|^({_DRAWN})[-_. ]+", re.IGNORECASE
)
# Names of the image that NAME_mask.png belongs to: NAME itself, or DeepGlobe's NAME_sat.
_IMAGE_OF_PAIR = ("{}", "{}_sat", "{}_image", "{}_img", "{}_rgb", "image_{}", "img_{}")
# Number of images to compare in a folder that may be a copy.
_COMPARED = 4
# The last word of an image's name, in place of which its mask may have another: NAME_leftImg8bit.png.
_LAST_WORD = re.compile(r"[-_. ][a-zA-Z][a-zA-Z0-9]*$")
# Most colors of a mask.
_FEW_COLORS = 64


def leave_out(files: Listing, top: str, *, labels: bool) -> set[Parts]:
    """Leaves out images that are not for training, and warns of those that may be parts of one image.

    `top` is the name of the folder or archive; `labels` leaves masks to a question if classes may lie beside them.
    Returns folders that hold the only images beside masks, and are no classes.
    """
    _leave_out_arrays(files)
    _leave_out_doubled(files, top)
    _leave_out_derived(files)
    wrappers = _leave_out_companions(files, labels=labels)
    _warn_of_parts(files)
    return wrappers


def _leave_out_arrays(files: Listing) -> None:
    """Leaves out arrays beside photographs, such as features, masks or depth, as webdataset does.

    If most files are DICOM, leaves out photographs instead, such as a viewer's logo.
    """
    dicom = sum(files.extension(path) in user_files.DICOM_EXTENSIONS for path, _ in files.images)
    main = user_files.DICOM_EXTENSIONS if 2 * dicom > len(files.images) else user_files.IMAGE_EXTENSIONS
    others = [path for path, _ in files.images if files.extension(path) not in main]
    if len(others) < len(files.images):
        kind = "DICOM files" if main is user_files.DICOM_EXTENSIONS else "images of other formats"
        files.leave_out(others, f"they are next to {kind}")


def _leave_out_doubled(files: Listing, top: str) -> None:
    """Leaves out copies of a folder inside it: under its own name (chest_xray/chest_xray/train/...), or complete."""
    readers: dict[Parts, dict[str, Reader]] = defaultdict(dict)
    for path, read in files.images:
        *parts, name = (top, *path.split("/"))
        readers[tuple(parts)][name] = read
    below: dict[Parts, list[Parts]] = defaultdict(list)
    for folder in readers:
        for depth in range(1, len(folder) + 1):
            below[folder[:depth]].append(folder)
    again = list[str]()
    for folder, own in below.items():
        if len(folder) == 1 or (folder[-1] != folder[-2] and 2 * len(own) != len(below[folder[:-1]])):
            continue
        named = folder[-1] == folder[-2]
        pairs = ((readers[inner], readers.get(folder[:-1] + inner[len(folder) :], {})) for inner in own)
        if all(_is_copy(inner, outer) and (named or len(inner) == len(outer)) for inner, outer in pairs):
            again += ["/".join((*inner[1:], name)) for inner in own for name in readers[inner]]
    files.leave_out(again, "their folder repeats the folder above it, file by file")


def _is_copy(inner: dict[str, Reader], outer: dict[str, Reader]) -> bool:
    """Whether a folder's files are in another, too: by their names and, of the first few, by their bytes."""
    with suppress(OSError, DecodeError):
        return inner.keys() <= outer.keys() and all(
            inner[name]() == outer[name]() != b"" for name in islice(inner, _COMPARED)
        )
    return False


def _leave_out_derived(files: Listing) -> None:
    """Leaves out images that are derived from others beside them: 1_thumb.jpg and 1_mask.png beside 1.jpg."""
    # A thumbnail may keep its image's extension: 1.webp_thumb.jpg.
    names = {name for path, _ in files.images for name in (path, path.rpartition(".")[0])}
    for pattern, images, why in (
        (_SIZE, ("{}",), "a thumbnail or another size of the image next to it"),
        (
            _MASK,
            _IMAGE_OF_PAIR,
            "a mask, labels, depth or an overlay of the image next to it (to keep them as images, move them to a "
            "folder of their own)",
        ),
    ):
        derived = []
        for path, _ in files.images:
            folder, slash, _ = path.rpartition("/")
            if pattern.search(_stem(path)):
                rest = pattern.sub("", _stem(path))
                if any(f"{folder}{slash}{image.format(rest)}" in names for image in images):
                    derived.append(path)
        files.leave_out(derived, f"by name, {why}")


def _leave_out_companions(files: Listing, *, labels: bool) -> set[Parts]:
    """Leaves out folders that accompany the images beside them: masks beside images, ground_truth beside train.

    Returns the folders that hold all other images beside folders of masks.
    """
    by_folder: dict[Parts, list[str]] = defaultdict(list)
    for path, _ in files.images:
        by_folder[tuple(path.split("/")[:-1])].append(path)
    siblings: dict[Parts, set[str]] = defaultdict(set)
    for parts in by_folder:
        for depth, name in enumerate((*parts, "")):
            siblings[parts[:depth]].add(name)
    companions = {(*above, name) for above, names in siblings.items() for name in companions_among(names)}
    drawn = _drawn_after(files, by_folder)
    kept = [parts for parts in by_folder if parts not in drawn and not _is_below(parts, companions)]
    wrappers = set[Parts]()
    for mask, images in drawn.items():
        pairs = zip((*mask, ""), (*images[0], ""), strict=False)
        differs = next(depth for depth, (one, other) in enumerate(pairs) if one != other)
        beside = {parts[: differs + 1] for parts in kept if parts[:differs] == mask[:differs]}
        wrappers |= beside if len(beside) == 1 and differs < len(images[0]) else set()
    # Two images of one mask are versions, as before and after, and no classes; nor are folders in folders.
    depths = (len(parts) - _is_below(parts, wrappers) for parts in kept)
    if labels and (any(len(images) > 1 for images in drawn.values()) or max(depths, default=0) > 1):
        drawn, wrappers = {}, set()
    companions |= {parts for parts in drawn if not _is_below(parts, companions)}
    files.leave_out(
        [path for parts, inside in by_folder.items() if _is_below(parts, companions) for path in inside],
        f"{shown(sorted(map('/'.join, companions)))}: judged by names or pixels, these are masks, labels or "
        "thumbnails of the others (--masks DIR reads masks; for images, give them as a separate source)",
    )
    return wrappers


def _is_below(parts: Parts, folders: Collection[Parts]) -> bool:
    return any(parts[:depth] in folders for depth in range(1, len(parts) + 1))


def _drawn_after(files: Listing, by_folder: Mapping[Parts, Sequence[str]]) -> dict[Parts, list[Parts]]:
    """Returns folders of masks, each with the nearest folders of its images.

    Such a folder or its files have a name of masks, each file pairs with an image elsewhere (NAME_mask.png, NAME.png),
    and the first one has few colors and the size of its image.
    """
    reader = dict(files.images)
    looks = {
        parts: _size_and_few(reader[paths[0]])
        for parts, paths in by_folder.items()
        if any(map(DRAWN.search, parts)) or _MASK.search(_stem(paths[0]))
    }
    few = {parts for parts, (_, is_few) in looks.items() if is_few}
    images: dict[str, dict[Parts, str]] = defaultdict(dict)
    for parts in by_folder.keys() - few if few else ():
        for path in by_folder[parts]:
            for name in (_LAST_WORD.sub("", _stem(path)), _stem(path)):
                images[name][parts] = path
    drawn = dict[Parts, list[Parts]]()
    for mask in few:
        found = []
        for path in by_folder[mask]:
            name = _MASK.sub("", _stem(path))
            while name and name not in images:
                name = re.sub(r"(^|[-_. ]+)[^-_. ]*$", "", name)
            found.append(images.get(name, {}))
        near = {
            other: sum(a == b for a, b in zip(mask, other, strict=False))
            for other in set(found[0]).intersection(*found)
        }
        nearest = sorted(other for other in near if near[other] == max(near.values()))
        if nearest and _size_and_few(reader[found[0][nearest[0]]]) == (looks[mask][0], False):
            drawn[mask] = nearest
    return drawn


def _size_and_few(read: Reader) -> tuple[tuple[int, ...], bool]:
    """Returns an image's size, and whether it has few colors, as masks have."""
    with suppress(OSError, DecodeError):
        red, green, blue = decode(read(), 3).astype(np.int32)
        return red.shape, len(np.unique(red << 16 | green << 8 | blue)) <= _FEW_COLORS
    return (), False


def _stem(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[0]


def _warn_of_parts(files: Listing) -> None:
    """Warns if most images have the names of bands of fewer images, or if names occur in several formats."""
    bands: dict[str, list[str]] = defaultdict(list)
    formats: dict[str, list[str]] = defaultdict(list)
    for path, _ in files.images:
        formats[path.removesuffix(f".{path.rpartition('.')[2]}")].append(path)
        if match := _BAND.match(path):
            bands[f"{match[1]} {match[2]}"].append(path)
    parts = [paths for paths in bands.values() if len(paths) > 1] or _equal_runs(files)
    what = "bands of one image; stack the bands of each image in one .tif first"
    if 2 * sum(map(len, parts)) <= len(files.images):
        parts = [paths for paths in formats.values() if len(paths) > 1]
        what = "one image in several formats; first move copies, masks and depth maps elsewhere"
    if parts:
        count = count_of(len(parts), "name")
        files.notes.append(
            f"warning: {shown(parts[0])} may be {what} ({count}; each file counts as an image)"
        )


def _equal_runs(files: Listing) -> list[list[str]]:
    """Returns runs of TIFFs _1 to _N; none if the first run's sizes differ, or if each folder holds one run."""
    runs: dict[str, dict[int, tuple[str, Reader]]] = defaultdict(dict)
    for path, read in files.images:
        if match := _RUN.match(path):
            runs[match[1]][int(match[2])] = path, read
    whole = [
        run
        for run in runs.values()
        if 1 < len(run) <= _MOST_OF_RUN and max(run) - len(run) + 1 == min(run) < 2
    ]
    alike = [run for run in whole if run.keys() == whole[0].keys()]
    if len(alike) == len({path.rpartition("/")[0] for run in alike for path, _ in run.values()}):
        return []
    headers = set[tuple[int, int]]()
    for _, read in alike[0].values():
        with suppress(OSError, DecodeError):
            header = read_header(read())
            headers.add((header.height, header.width))
    return [sorted(path for path, _ in run.values()) for run in alike] if len(headers) == 1 else []
