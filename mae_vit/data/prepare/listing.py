"""Sorts the files of a folder or an archive: which are images, which are left out, and notes on the others."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from mae_vit.core import user_files
from mae_vit.core.messages import count_of, plain_text
from mae_vit.data.images.decode import DecodeError, decode, read_header
from mae_vit.data.prepare.entries import Reader
from mae_vit.data.prepare.folder_names import DRAWN, Parts, companions_among

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
# Classes in names: cat.0.jpg, dog_12.jpg, but not IMG_0001.jpg.
_CLASS_IN_NAME = re.compile(r"(\D*[a-z]{2}\D*?)[-_. ]*\d+\.\w+")
ARCHIVE_PART = re.compile(
    r"\.(z\d\d|(zip|7z|rar|tar|tgz|gz)[-_.]?(\d{2,3}|part\w*|[a-z]{2}))$", re.IGNORECASE
)
JOIN_PARTS = "join the parts first (cat ARCHIVE.* > ARCHIVE; zip -s 0 of .z01)"
_NAMED = 3
_DECODED = (*user_files.IMAGE_EXTENSIONS, *user_files.ARRAY_EXTENSIONS)
# Number of images to compare in a folder that may be a copy.
_COMPARED = 4
# The last word of an image's name, in place of which its mask may have another: NAME_leftImg8bit.png.
_LAST_WORD = re.compile(r"[-_. ][a-zA-Z][a-zA-Z0-9]*$")
# Most colors of a mask.
_FEW_COLORS = 64
# Number of texts in a folder that may be lists of labels; more are captions, one for each image.
_FEW_TEXTS = 8


@dataclass
class Listing:
    """The files of a folder or an archive.

    Attributes:
        images: path and reader of each image, by path.
        kinds: extensions of images whose names do not have them, by path.
        ignored: number of files that are known to be no images.
        unread: number of files in formats that are not read but may matter, by extension.
        absent: placeholders of files that are only in a cloud.
        beside: tables and archives among the other files.
        parts: parts of split archives.
        texts: path and reader of texts that may list labels, a few of each folder.
        notes: remarks on skipped files.
    """

    images: list[tuple[str, Reader]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    ignored: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    absent: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    texts: list[tuple[str, Reader]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, path: str, head: Reader, read: Reader) -> None:
        """Adds a file as an image, or counts it; `head` reads its first bytes, which decide if the name does not."""
        extension = user_files.extension_of(path)
        if user_files.is_image(path):
            self.images.append((path, read))
        elif user_files.is_placeholder(path):
            self.absent.append(path)
        elif user_files.is_hidden(path):
            self.ignored += 1
        elif extension in user_files.OTHER_EXTENSIONS:
            self.ignored += 1
            self.beside += [path] if _is_table(path) else []
            folder, before = path.rpartition("/")[0], self.texts[-_FEW_TEXTS:]
            few = len(before) < _FEW_TEXTS or before[0][0].rpartition("/")[0] != folder
            self.texts += [(path, read)] if few and extension in user_files.LIST_EXTENSIONS else []
        elif (
            kind := extension if extension in user_files.UNREAD_EXTENSIONS else user_files.image_kind(head())
        ) in _DECODED:
            self.kinds[path] = kind or ""
            self.images.append((path, read))
        elif (
            extension in user_files.ARCHIVE_EXTENSIONS
            and user_files.full_extension(path) not in user_files.CONVERTIBLE_EXTENSIONS
        ):
            self.ignored += 1
            self.beside.append(path)
        elif ARCHIVE_PART.search(path):
            self.parts.append(path)
        else:
            self.unread[kind or user_files.full_extension(path)] += 1

    def add(self, other: Listing, *, wrapping: str, folder: str) -> None:
        """Adds the files of another listing below `folder` ("a/", or ""), without the `wrapping` before their paths."""

        def moved(path: str) -> str:
            return folder + path.removeprefix(wrapping)

        self.images += [(moved(path), read) for path, read in other.images]
        self.kinds |= {moved(path): kind for path, kind in other.kinds.items()}
        self.ignored += other.ignored
        self.unread += other.unread
        self.absent += map(moved, other.absent)
        self.beside += map(moved, other.beside)
        self.parts += map(moved, other.parts)
        self.texts += [(moved(path), read) for path, read in other.texts]
        self.notes += other.notes

    def leave_out(self, paths: Iterable[str], why: str) -> None:
        """Removes images, and adds a note with their number, the first of them and `why`."""
        if gone := set(paths):
            self.images = [(path, read) for path, read in self.images if path not in gone]
            self.notes.append(f"left out {count_of(len(gone), 'image')} ({shown(sorted(gone))}): {why}")

    def extension(self, path: str) -> str:
        """Returns the extension of an image, by its name or its first bytes."""
        return self.kinds.get(path) or user_files.extension_of(path)

    def all_notes(self, *, labeled: bool) -> list[str]:
        """Returns all notes; unless `labeled`, also on tables and names of images that may hold labels."""
        notes = [f"ignored {count_of(self.ignored, 'file')} (no images)"] if self.ignored else []
        notes += self.notes
        if self.kinds:
            count = count_of(len(self.kinds), "image")
            notes.append(f"read {count} by the first bytes, not by the name: {shown(self.kinds)}")
        if self.absent:
            notes.append(
                f"not downloaded: {count_of(len(self.absent), 'file')} in iCloud ({shown(self.absent)}); download "
                "the folder first"
            )
        if self.unread:
            dotted = {
                kind: f".{plain_text(kind)}" if kind else "without an extension" for kind in self.unread
            }
            counts = ", ".join(f"{count:,} {dotted[kind]}" for kind, count in sorted(self.unread.items()))
            convert = [
                dotted[kind] for kind in sorted(self.unread) if kind in user_files.CONVERTIBLE_EXTENSIONS
            ]
            remedy = f"; of {', '.join(convert)}, {user_files.EACH_IMAGE}" if convert else ""
            notes.append(f"not read: {counts}{remedy}")
        if archives := [
            path for path in self.beside if user_files.extension_of(path) in user_files.ARCHIVE_EXTENSIONS
        ]:
            notes.append(f"left out {count_of(len(archives), 'archive')} ({shown(archives)}); unpack first")
        if self.parts:
            notes.append(
                f"left out {count_of(len(self.parts), 'part')} of archives ({shown(self.parts)}); {JOIN_PARTS}"
            )
        if not labeled and (tables := self.tables()):
            notes.append(
                f"{shown(tables)} may contain labels, but a folder's labels are its subfolders (CLASS/*.jpg); give "
                "a CSV or TSV of paths and labels as the source, or with --labels"
            )
        if not labeled and (classes := self._classes_in_names()):
            notes.append(
                f"names of images may contain their classes ({shown(classes)}), which are not read; for labels, "
                "move the images into folders of these names"
            )
        return notes

    def tables(self) -> list[str]:
        """Returns the tables that may hold labels, without Kaggle's sample submissions, whose classes are made up."""
        return [path for path in self.beside if _is_table(path) and not is_sample(path)]

    def _classes_in_names(self) -> list[str]:
        """Returns the words before the numbers in a folder's file names, if there are several and each repeats."""
        folders: dict[str, list[str]] = defaultdict(list)
        for path, _ in self.images:
            folder, _, name = path.rpartition("/")
            match = _CLASS_IN_NAME.fullmatch(name)
            folders[folder].append(match[1] if match else "")
        counts = [Counter(names) for names in folders.values() if "" not in names]
        return sorted({name for count in counts if len(count) > 1 < min(count.values()) for name in count})


def _is_table(path: str) -> bool:
    """Whether a file's extension is that of a table, or its name labels.json; other JSON may be of one image each."""
    named = path.lower().endswith(("labels.json", "label.json"))
    return named or user_files.extension_of(path) in user_files.TABLE_EXTENSIONS


def is_sample(path: str) -> bool:
    """Whether a table's name is that of a sample submission."""
    return "submission" in path.rpartition("/")[2].lower()


def shown(paths: Iterable[str]) -> str:
    """Lists the first few paths, for messages."""
    shown = [plain_text(path) for path in islice(paths, _NAMED + 1)]
    return ", ".join(shown[:_NAMED]) + (", ..." if len(shown) > _NAMED else "")


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
    again: dict[bool, list[str]] = {True: [], False: []}
    for folder, own in below.items():
        pairs = [(readers[inner], readers.get(folder[:-1] + inner[len(folder) :], {})) for inner in own]
        if len(folder) == 1 or any(inner.keys() - outer.keys() for inner, outer in pairs):
            continue
        named = folder[-1] == folder[-2]
        whole = 2 * len(own) == len(below[folder[:-1]])
        if named or (whole and all(_hold_the_same(inner, outer) for inner, outer in pairs)):
            again[named] += ["/".join((*inner[1:], name)) for inner in own for name in readers[inner]]
    files.leave_out(again[True], "the folder above has the same name, and images of the same names")
    files.leave_out(again[False], "their folder repeats the folder above it, file by file")


def _hold_the_same(first: dict[str, Reader], second: dict[str, Reader]) -> bool:
    """Whether two folders hold the same names and, in the first few files, the same bytes."""
    with suppress(OSError, DecodeError):
        return first.keys() == second.keys() and all(
            first[name]() == second[name]() != b"" for name in islice(first, _COMPARED)
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
