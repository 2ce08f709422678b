"""Decides which folders of a source are splits, and which are classes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from math import gcd

from mae_vit.core.errors import InputError
from mae_vit.core.user_files import split_and_rest, split_named
from mae_vit.data.prepare.listing import shown

# A folder with such a name and no siblings wraps images, and is no class.
_WRAPPERS = frozenset(
    ("images", "image", "imgs", "img", "data", "dataset", "photos", "pictures", "jpegimages", "originals")
)
# Folders that accompany all images or those of a split, and are no classes: masks, masks_png, train_masks, valannot,
# gtFine, stuffthingmaps, and resources, where a macOS photo library keeps thumbnails.
_SPLIT = "(train(ing)?|val(id(ation)?)?|dev|test(ing)?)?"
_FORMAT = re.compile(r"[\W_](png|jpe?g|tiff?)$", re.IGNORECASE)
_COMPANION = re.compile(
    rf"{_SPLIT}[\W_]*(masks?|labels?|targets|annot(ation)?s?|ground[\W_]?truths?|gt|segmentation\w*|\w+maps|depths?|"
    rf"resources|thumb(nail)?s?)[\W_]*{_SPLIT}",
    re.IGNORECASE,
)
# Words in other names of such folders, as ISIC2018_Task1_Training_GroundTruth. They may stand in names of classes too.
DRAWN = re.compile("mask|label|annot|truth|segm|target|maps|gt", re.IGNORECASE)
_TRUTH = re.compile(r"gt([A-Z_-]|$)")
# Parts of a benchmark, as for re-identification, which are no classes beside its training images.
_PARTS = frozenset(("query", "gallery", "probe", "eval", "evaluation"))
# Numbered parts of one data set: by a program, a camera (100APPLE), a patient.
_NUMBERED = re.compile(
    r"(.*[\W_])?(part|images?|imgs?|photos|batch|chunk|shard|subset|folder|fold)[\W_]?\d+|[1-9]\d\d[A-Z0-9_]{5}|"
    r"\w+_(19|20)\d\d(0[1-9]|1[0-2])\d\d|(patients?|pat|subjects?|subj?|case|study|series|ser)[\W_]?\d+(_\w+)?",
    re.IGNORECASE,
)
# Albums by day or month, also with words: 2022-01-04 Rome, 01.05.2023.
_DATED = re.compile(r"((19|20)\d\d([-_.])\d\d(\3\d\d)?|\d\d([-_.])\d\d\5(19|20)\d\d)([\W_].*)?")
# The name of a folder, or of a file without extension, with one number, at its end.
_ONE_NUMBER = re.compile(r"\D*(\d{1,18})")
# Fewest images in a folder of a numbered set.
_SMALLEST_PART = 10
_HEX = frozenset("0123456789abcdefABCDEF")
# Albums by year: Photos from 2019.
_YEAR = re.compile(r"(\D+)(?:19|20)\d\d")
# For messages about names that are not in UTF-8.
NAME_ENCODING = (
    "unpack a zip file in its encoding (Python 3.11: python -m zipfile --metadata-encoding gbk -e FILE FOLDER), and "
    "give the folder; or rename it"
)
Parts = tuple[str, ...]


def place(paths: Sequence[Parts], split: str, class_folder: str | None) -> list[tuple[str, Parts]]:
    """Strips the common top and the split folder from each path: (split, (class, ..., file)).

    Raises:
        InputError: if the names are ambiguous and `class_folder` is None.
    """
    top = _common_top(paths)
    below = [path[top:] for path in paths]
    direct = {parts[0] for parts in below if len(parts) == 2}
    splits, unclear = _splits_among({parts[0] for parts in below if len(parts) > 1}, direct)
    placed = [
        (splits[parts[0]], parts[1:]) if len(parts) > 1 and parts[0] in splits else (split, parts)
        for parts in below
    ]
    if not splits and (second := _splits_below_classes(below)):
        placed = [(second[parts[1]], (parts[0], *parts[2:])) for parts in below]
    placed = _unwrapped(placed)
    if class_folder == "last":
        return [
            (own, (parts[-2], *parts[:-2], parts[-1])) if len(parts) > 1 else (own, parts)
            for own, parts in placed
        ]
    if class_folder is None and (unclear := unclear or _unclear_classes(placed)):
        raise InputError(
            f"are the folders {_listed(name or '.' for name in unclear)} classes? If so, use "
            "--class-folder first; if the innermost folders are, --class-folder last; if they are splits, versions or "
            "masks, prepare each separately (--split NAME, --masks DIR); for images without labels, --no-labels"
        )
    return placed


def _common_top(paths: Sequence[Parts]) -> int:
    """Returns the number of leading folders that all paths share and that are neither split nor class."""
    top = 0
    while (
        paths
        and all(len(parts) >= top + 3 and parts[top] == paths[0][top] for parts in paths)
        and not surely_split(paths[0][top])
    ):
        top += 1
    return top


def _rest(folder: str) -> str:
    """Returns the words of a name besides its split: "station" for train_station, none for train_images."""
    words = split_and_rest(folder)[1]
    return " ".join(word for word in words if word not in _WRAPPERS)


def _wraps(folder: str) -> bool:
    """Whether a folder has the name of a wrapper of images: images, images_png."""
    return _FORMAT.sub("", folder.lower()) in _WRAPPERS


def surely_split(folder: str) -> str | None:
    """Returns the split of a name without other words: of training_images, but not of train_station."""
    return None if _rest(folder) else split_and_rest(folder)[0]


def companions_among(names: set[str]) -> set[str]:
    """Returns the sibling folders that accompany the others: masks beside images, ground_truth beside train.

    `names` are all siblings that hold images, "" for images beside them. It returns none if the others may be classes.
    """
    companions = set(filter(_is_companion, names))
    others = names - companions
    splits = {split for name in others if (split := split_named(name))}
    wrapped = all(not name or _wraps(name) or surely_split(name) for name in others)
    return companions if len(splits) > 1 or (others and wrapped) else set()


def _is_companion(folder: str) -> bool:
    """Whether a folder's name is that of a companion of images, such as masks."""
    return bool(_COMPANION.fullmatch(_FORMAT.sub("", folder)) or _TRUTH.match(folder))


def _splits_among(folders: set[str], direct: set[str]) -> tuple[dict[str, str], set[str]]:
    """Returns the split of each sibling folder, none if they are classes; and the folders that may be either.

    If two have names of splits, all are splits, the others by their own names (extra, test_A). A single split name
    among other names is a class like its siblings.
    """
    exact = {folder: split for folder in sorted(folders) if (split := split_named(folder))}
    if len(set(exact.values())) > 1 or len(exact) == len(folders):
        own = {folder: surely_split(folder) or re.sub(r"\W", "_", folder) for folder in sorted(folders)}
        return _distinct(own), set()
    inside = {folder: split for folder in sorted(folders) if (split := split_and_rest(folder)[0])}
    several = len(set(inside.values())) > 1
    if len(inside) == len(folders) and (several or not _rest(min(folders))):
        if len(set(map(_rest, folders))) == 1:
            return _distinct(inside), set()
        return {}, folders
    pairs = {(" ".join(split_and_rest(folder)[1]), split) for folder, split in inside.items()}
    if _PARTS & {folder.lower() for folder in folders} or len(pairs) > len({rest for rest, _ in pairs}):
        return {}, folders
    if any(folder not in direct or split == "unlabeled" for folder, split in exact.items()):
        return {}, folders
    return {}, set()


def _distinct(splits: dict[str, str]) -> dict[str, str]:
    """Rejects two folders of the same split."""
    folder_of: dict[str, str] = {}
    for folder, split in splits.items():
        if (other := folder_of.setdefault(split, folder)) != folder:
            both = _listed([other, folder])
            raise InputError(f'the folders {both} both mean split "{split}"; move them into one')
    return splits


def _splits_below_classes(paths: Sequence[Parts]) -> dict[str, str]:
    """Returns the splits of CLASS/SPLIT/file, by folder name; none unless all paths have this form."""
    if any(len(parts) < 3 for parts in paths):
        return {}
    names = {parts[1] for parts in paths}
    exact = set(map(split_named, names))
    return _splits_among(names, set())[0] if len(exact - {None}) > 1 or None not in exact else {}


def _unwrapped(placed: list[tuple[str, Parts]]) -> list[tuple[str, Parts]]:
    """Strips folders that wrap a whole split: train/images/..., training_set/training_set/..."""
    first: dict[str, set[str | None]] = defaultdict(set)
    for own, parts in placed:
        first[own].add(parts[0] if len(parts) > 1 else None)
    wrapped = {
        own
        for own, names in first.items()
        if len(names) == 1
        and (name := next(iter(names)))
        and (_wraps(name) or split_and_rest(name)[0] == own)
    }
    if not wrapped:
        return placed
    return _unwrapped([(own, parts[1:] if own in wrapped else parts) for own, parts in placed])


def _unclear_classes(placed: Sequence[tuple[str, Parts]]) -> set[str]:
    """Returns folders that may not be classes, judged by their names and those of their subfolders."""
    first: dict[str, set[str]] = defaultdict(set)
    inner: dict[tuple[str, str], set[str]] = defaultdict(set)
    for split, parts in placed:
        first[split].add(parts[0] if len(parts) > 1 else "")
        if len(parts) > 1:
            inner[split, parts[0]].add(parts[1] if len(parts) > 2 else "")
    # Names of wrappers and companions of images: images, masks; images_evaluation if it has or is beside subfolders.
    for split, names in first.items():
        deep = any(folders != {""} for (own, _), folders in inner.items() if own == split)
        odd = {
            name
            for name in names
            if _wraps(name) or _is_companion(name) or (deep and _WRAPPERS & {*split_and_rest(name)[1]})
        }
        if (odd and names - odd) or len(odd) > 1:
            return names
    below = {"/".join(parts[:-1]) for _, parts in placed if len(parts) > 2}
    if odd := {folder for folder in below if _is_companion(folder.rpartition("/")[2])}:
        return odd
    # Two folders with subfolders of the same names: SITE/CLASS, or CLASS/SITE?
    holder: dict[tuple[str, str], str] = {}
    shared = Counter[tuple[str, str]]()
    for (split, folder), names in inner.items():
        for name in () if "" in names else sorted(names):
            if (other := holder.setdefault((split, name), folder)) != folder:
                shared[other, folder] += 1
    if pairs := [pair for pair, count in shared.items() if count > 1]:
        return set(pairs[0])
    # Parts of one data set, by name, by letters of a hash, or by tile numbers.
    levels = [{parts[at] if len(parts) > at + 1 else "" for _, parts in placed} for at in range(3)]
    tops, lower = levels[0], levels[1]
    letters = "" not in lower and all(len(name) == 1 and name.isalpha() for name in tops)
    # Two levels of single letters, of which one may be of classes.
    single = [all(len(name) == 1 for name in level) for level in levels]
    hashed = len(lower) > 1 and single[1] and (single[0] or single[2])
    tiles = all(map(str.isdigit, tops | lower | {parts[-1].partition(".")[0] for _, parts in placed}))
    cut = letters or hashed or tiles or _are_parts(tops) or _are_ranges(tops, placed)
    return tops if len(tops) > 1 and cut else set()


def _are_parts(names: set[str]) -> bool:
    """Whether folders have the names of parts of one data set."""
    years = [match[1] for name in names if (match := _YEAR.fullmatch(name))]
    # Names of digits only, or of letters only, are those of classes.
    hashed = names <= _HEX and 0 < sum(map(str.isdigit, names)) < len(names)
    return (
        hashed
        or (len(years) > 1 and len(set(years)) == 1)
        or any(map(_DATED.fullmatch, names))
        or all(map(_NUMBERED.fullmatch, names))
    )


def _are_ranges(tops: set[str], placed: Sequence[tuple[str, Parts]]) -> bool:
    """Whether the number of each folder begins the range of its images' numbers: 01000/01234.png."""
    first = {name: int(match[1]) for name in tops if (match := _ONE_NUMBER.fullmatch(name))}
    part = gcd(*first.values())
    if len(first) < len(tops) or part < _SMALLEST_PART:
        return False
    images = ((first[parts[0]], _ONE_NUMBER.fullmatch(parts[-1].rpartition(".")[0])) for _, parts in placed)
    return all(number and start <= int(number[1]) <= start + part for start, number in images)


def level_note(placed: Iterable[tuple[str, Parts]], class_folder: str | None) -> list[str]:
    """Notes which folders below classes are not classes or, if the last folder is the class, which are joined."""
    below: dict[str, set[str]] = defaultdict(set)
    for _, parts in placed:
        if class_folder == "last" or len(parts) > 2:
            below[parts[0]].add("/".join(parts[1:-1]))
    if class_folder == "last":
        joined = sorted(name for name, folders in below.items() if len(folders) > 1)
        return [f"joined folders of the same name into one class: {_listed(joined)}"] if joined else []
    inner = {f"{name}/{folder}" for name, folders in below.items() for folder in folders}
    if class_folder or all(_wraps(folder.rpartition("/")[2]) for folder in inner):
        return []
    return [
        f"folders inside classes are not classes: {_listed(inner)} (--class-folder last makes them classes)"
    ]


def _listed(names: Iterable[str]) -> str:
    return shown(f'"{name}"' for name in sorted(names))
