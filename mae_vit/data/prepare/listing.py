"""The files of a folder or an archive: which are images, which are left out, and what is said of the others."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import (
    ARCHIVE_EXTENSIONS,
    ARRAY_EXTENSIONS,
    CONVERTIBLE_EXTENSIONS,
    DICOM_EXTENSIONS,
    EACH_IMAGE,
    IMAGE_EXTENSIONS,
    LIST_EXTENSIONS,
    OTHER_EXTENSIONS,
    TABLE_EXTENSIONS,
    extension_of,
    full_extension,
    image_kind,
    is_hidden,
    is_image,
    placeholder_of,
    unread_photo,
)
from mae_vit.data.prepare.entries import Reader
from mae_vit.data.prepare.folder_names import Parts, companions_among

# S2A_..._B8A.tif of Sentinel-2, LC08_..._B4.TIF of Landsat; of microscopes _w1.png, _c1.tif (and no well C01),
# img_channel000_..., -ch1sk1fk1fl1.tiff, where more may follow.
_BAND = re.compile(
    r"(.*[-_.])(?:(?:B|band_?|(?-i:w|c))\d{1,2}A?|ch(?:annel)?_?\d{1,3}(?!\d)(.*))\.(?:tiff?|jp2|png)$",
    re.IGNORECASE,
)
# Other sizes of NAME.jpg: NAME_thumb.jpg, thumb_NAME.jpg, NAME@2x.jpg.
_SIZE = re.compile(r"[-_. ]thumb(nail)?s?$|@\dx$|^(thumb(nail)?s?|tn)[-_. ]", re.IGNORECASE)
# cat.0.jpg, dog_12.jpg, and not IMG_0001.jpg.
_CLASS_IN_NAME = re.compile(r"(\D*[a-z]{2}\D*?)[-_. ]*\d+\.\w+")
_NAMED = 3
# Of one folder so many texts may be lists of labels; more are captions, one of each image.
_FEW_TEXTS = 8


@dataclass
class Listing:
    """The files of a folder or an archive.

    Attributes:
        images: path and reader of each image, by path.
        kinds: extensions of images whose names do not tell them.
        ignored: how many other files there are.
        unread: how many photographs there are in formats that are not decoded, by extension.
        unknown: how many files there are of other formats that may matter, by extension.
        absent: placeholders of files that a cloud keeps.
        beside: tables and archives among the other files.
        bare: folders of files that are no readable images.
        texts: path and reader of texts that may list labels, a few of each folder.
        notes: remarks on skipped files.
    """

    images: list[tuple[str, Reader]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    ignored: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
    absent: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    bare: set[str] = field(default_factory=set)
    texts: list[tuple[str, Reader]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def take(self, path: str, head: Reader, read: Reader) -> None:
        """Takes a file as an image, or counts it.

        Args:
            path: of the file.
            head: reads its first bytes, which decide where the name does not.
            read: reads all of it.
        """
        extension = extension_of(path)
        if is_image(path):
            self.images.append((path, read))
        elif placeholder_of(path):
            self.absent.append(path)
        elif is_hidden(path):
            self.ignored += 1
        elif extension in OTHER_EXTENSIONS:
            self.ignored += 1
            self.bare.add(path.rpartition("/")[0])
            self.beside += [path] if extension in TABLE_EXTENSIONS else []
            self._take_text(path, read)
        elif (kind := unread_photo(path) or image_kind(head())) in (*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS):
            self.kinds[path] = kind or ""
            self.images.append((path, read))
        else:
            self.bare.add(path.rpartition("/")[0])
            full = full_extension(path)
            if kind:
                self.unread[kind] += 1
            elif full in CONVERTIBLE_EXTENSIONS:
                self.unknown[full] += 1
            elif extension in ARCHIVE_EXTENSIONS:
                self.ignored += 1
                self.beside.append(path)
            else:
                self.unknown[extension] += 1

    def _take_text(self, path: str, read: Reader) -> None:
        """Keeps a text that may list the labels of images; a few of each folder."""
        folder, before = path.rpartition("/")[0], self.texts[-_FEW_TEXTS:]
        few = len(before) < _FEW_TEXTS or before[0][0].rpartition("/")[0] != folder
        if few and extension_of(path) in LIST_EXTENSIONS:
            self.texts.append((path, read))

    def add(self, other: Listing, *, wrapping: str, place: str) -> None:
        """Adds the files of another listing, whose paths begin with `wrapping`, below the folder `place`."""

        def moved(path: str) -> str:
            return place + path.removeprefix(wrapping)

        self.images += [(moved(path), read) for path, read in other.images]
        self.kinds |= {moved(path): kind for path, kind in other.kinds.items()}
        self.ignored += other.ignored
        self.unread += other.unread
        self.unknown += other.unknown
        self.absent += map(moved, other.absent)
        self.beside += map(moved, other.beside)
        self.bare |= {moved(f"{path}/").removesuffix("/") for path in other.bare}
        self.texts += [(moved(path), read) for path, read in other.texts]
        self.notes += other.notes

    def leave_out(self, paths: Iterable[str], what: str) -> None:
        """Removes images, and notes `what` they are; nothing where there are none."""
        if gone := set(paths):
            self.images = [(path, read) for path, read in self.images if path not in gone]
            self.notes.append(f"left out {what}")

    def extension(self, path: str) -> str:
        """Returns the extension of an image, by its name or its first bytes."""
        return self.kinds.get(path) or extension_of(path)

    def all_notes(self, *, labeled: bool) -> tuple[str, ...]:
        """Returns the remarks.

        Args:
            labeled: the images have labels; without, tables beside them may hold some.
        """
        notes = list(self.notes)
        if self.kinds:
            notes.append(
                f"took {count_of(len(self.kinds), 'image')} by the first bytes, since the names do not tell: "
                f"{shown(self.kinds)}"
            )
        if self.absent:
            notes.append(
                f"not downloaded: {count_of(len(self.absent), 'file')} that iCloud keeps ({shown(self.absent)}): "
                "download the folder first"
            )
        if self.unknown:
            notes.append(_not_read(self.unknown))
        if archives := [path for path in self.beside if extension_of(path) in ARCHIVE_EXTENSIONS]:
            notes.append(f"left out {count_of(len(archives), 'archive')} ({shown(archives)}): unpack first")
        if not labeled and (tables := self.tables()):
            notes.append(
                f"{shown(tables)} may hold labels, but the labels of a folder are its folders (CLASS/*.jpg); a CSV or "
                f"TSV of paths and labels is a source itself: {self.table_way(tables)} in place of the folder"
            )
        if not labeled and (classes := self._classes_in_names()):
            notes.append(
                f"names of images may hold their classes ({shown(classes)}), which are not read: for labels, move the "
                "images into folders of these names"
            )
        if self.unread:
            counts = ", ".join(f"{count:,} .{extension}" for extension, count in sorted(self.unread.items()))
            photos = count_of(self.unread.total(), "photograph")
            notes.append(
                f"left out {photos} in a format that cannot be read ({counts}): convert to JPEG first"
            )
        return tuple(notes)

    def tables(self) -> list[str]:
        """Returns the tables that may hold labels: no sample of a submission to Kaggle, whose classes are made up."""
        return [
            path for path in self.beside if extension_of(path) in TABLE_EXTENSIONS and not is_sample(path)
        ]

    def table_way(self, tables: Iterable[str]) -> str:
        """Says how to give a table, whose images must lie beside it or below."""
        folders = {path[: path.rfind("/") + 1] for path in tables}
        near = all(any(path.startswith(folder) for path, _ in self.images) for folder in folders)
        return "give it" if near else "move it to the folder that holds its images, and give it"

    def _classes_in_names(self) -> list[str]:
        """The first words of all names of a folder, if these are few and numbers follow."""
        folders: dict[str, list[str]] = defaultdict(list)
        for path, _ in self.images:
            folder, _, name = path.rpartition("/")
            found = _CLASS_IN_NAME.fullmatch(name)
            folders[folder].append(found[1] if found else "")
        counts = [Counter(names) for names in folders.values() if "" not in names]
        return sorted({name for count in counts if len(count) > 1 < min(count.values()) for name in count})


def is_sample(path: str) -> bool:
    """Whether a table is by its name a sample of a submission."""
    return "submission" in path.rpartition("/")[2].lower()


def _not_read(unknown: Counter[str]) -> str:
    counts = ", ".join(f"{count:,} {_dotted(kind)}" for kind, count in sorted(unknown.items()))
    convert = sorted(unknown.keys() & CONVERTIBLE_EXTENSIONS)
    remedy = f"; of {', '.join(map(_dotted, convert))}, {EACH_IMAGE}"
    if "arrow" in convert:
        remedy += '; datasets.load_from_disk(FOLDER)["train"].to_parquet("train.parquet") writes what is read'
    return f"not read: {counts}{remedy if convert else ''}"


def _dotted(extension: str) -> str:
    return f".{plain_text(extension)}" if extension else "without an extension"


def shown(paths: Iterable[str]) -> str:
    """Lists the first few paths, for messages."""
    shown = [plain_text(path) for path in islice(paths, _NAMED + 1)]
    return ", ".join(shown[:_NAMED]) + (", ..." if len(shown) > _NAMED else "")


def leave_out(files: Listing, top: str, *, companions: bool) -> None:
    """Leaves out images that are none to train on, and says of which images each is but a band.

    Args:
        files: of a source, changed in place.
        top: the name of the folder or archive.
        companions: leave out folders of masks or labels, too.
    """
    _leave_out_arrays(files)
    _leave_out_doubled(files, top)
    _leave_out_sizes(files)
    if companions:
        _leave_out_companions(files)
    _note_bands(files)
    _note_pairs(files)


def _leave_out_arrays(files: Listing) -> None:
    """Takes arrays beside photographs for what belongs to them, as webdataset does: features, masks, depth.

    Photographs beside more DICOM belong to these: the logo of a viewer.
    """
    dicom = sum(files.extension(path) in DICOM_EXTENSIONS for path, _ in files.images)
    main = DICOM_EXTENSIONS if 2 * dicom > len(files.images) else IMAGE_EXTENSIONS
    others = [path for path, _ in files.images if files.extension(path) not in main]
    if not 0 < len(others) < len(files.images):
        return
    what = f"{len(others)} .npy, .npz or .dcm files beside images of other formats"
    if main is DICOM_EXTENSIONS:
        what = f"{count_of(len(others), 'file')} beside {count_of(dicom, 'image')} of DICOM: {shown(others)}"
    files.leave_out(others, what)
    files.ignored += len(others)


def _leave_out_doubled(files: Listing, top: str) -> None:
    """Leaves out a copy of a folder that lies in it under its own name, as in chest_xray/chest_xray/train/..."""
    paths = {(top, *path.split("/")) for path, _ in files.images}
    inner: dict[Parts, list[Parts]] = defaultdict(list)
    for parts in paths:
        for depth in range(1, len(parts) - 1):
            if parts[depth - 1] == parts[depth]:
                inner[parts[: depth + 1]].append(parts)
    copies = [
        folder
        for folder, own in inner.items()
        if all(parts[: len(folder) - 1] + parts[len(folder) :] in paths for parts in own)
    ]
    doubled = {"/".join(parts[1:]) for folder in copies for parts in inner[folder]}
    folders = shown(sorted("/".join(folder[1:]) for folder in copies))
    files.leave_out(
        doubled,
        f"{count_of(len(doubled), 'image')} of {folders}: the folder around it holds images of the same names",
    )


def _leave_out_sizes(files: Listing) -> None:
    """Leaves out thumbnails and other sizes of images that lie beside them: 1_thumb.jpg beside 1.jpg or 1.png."""
    image_of = {}
    for path, _ in files.images:
        folder, slash, name = path.rpartition("/")
        stem = name.rpartition(".")[0]
        if _SIZE.search(stem):
            image_of[path] = f"{folder}{slash}{_SIZE.sub('', stem)}"
    if not image_of:
        return
    # A thumbnail may keep its image's extension: 1.webp_thumb.jpg.
    names = {name for path, _ in files.images for name in (path, path.rpartition(".")[0])}
    sizes = [path for path, image in image_of.items() if image in names]
    files.leave_out(
        sizes,
        f"{count_of(len(sizes), 'image')} ({shown(sizes)}): by the name, a thumbnail or another size of the image "
        "beside it (to take it too, move it elsewhere)",
    )


def _leave_out_companions(files: Listing) -> None:
    """Leaves out folders that belong to the images beside them: masks beside images, ground_truth beside train."""
    by_folder: dict[Parts, list[str]] = defaultdict(list)
    for path, _ in files.images:
        by_folder[tuple(path.split("/")[:-1])].append(path)
    siblings: dict[Parts, set[str]] = defaultdict(set)
    for parts in by_folder:
        for depth, name in enumerate((*parts, "")):
            siblings[parts[:depth]].add(name)
    companions = {(*above, name) for above, names in siblings.items() for name in companions_among(names)}
    paths = [
        path
        for parts, inside in by_folder.items()
        if any(parts[:depth] in companions for depth in range(1, len(parts) + 1))
        for path in inside
    ]
    files.leave_out(
        paths,
        f"{count_of(len(paths), 'image')} of {shown(sorted(map('/'.join, companions)))}: by the folder's name, masks, "
        "labels or thumbnails of the others (--masks DIR reads masks; as images, a source of its own)",
    )


def _note_bands(files: Listing) -> None:
    """Says if images are by their names the bands of fewer images."""
    bands: dict[str, list[str]] = {}
    for path, _ in files.images:
        if found := _BAND.match(path):
            bands.setdefault(f"{found[1]} {found[2]}", []).append(path)
    several = [paths for paths in bands.values() if len(paths) > 1]
    if several and 2 * sum(map(len, several)) > len(files.images):
        files.notes.append(
            f"warning: {shown(several[0])} are by their names bands of one image, and each was taken for an image of "
            "its own: stack the bands of each image in one .tif first"
        )


def _note_pairs(files: Listing) -> None:
    """Says if images of one folder have one name in two formats, as 1.jpg and its depth map 1.png."""
    named: dict[str, list[str]] = defaultdict(list)
    for path, _ in files.images:
        named[path.removesuffix(f".{path.rpartition('.')[2]}")].append(path)
    if pairs := [paths for paths in named.values() if len(paths) > 1]:
        files.notes.append(
            f"warning: {count_of(len(pairs), 'name')} in several formats ({shown(pairs[0])}), and each was taken for "
            "an image of its own: if one is a copy, a mask or a depth map of the other, move it elsewhere first"
        )
