"""Which folders of a source are splits, and which are classes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NoReturn

from mae_vit.core.errors import InputError
from mae_vit.core.messages import plain_text
from mae_vit.core.user_files import split_and_rest, split_named

# A folder that is alone at its place and called so wraps images, and is no class.
_WRAPPERS = frozenset(
    ("images", "image", "imgs", "img", "data", "dataset", "photos", "pictures", "jpegimages", "originals")
)
# What belongs to images, of all or of a split, and is no class of them: masks, train_masks, valannot, gtFine, and
# resources, where a photo library of macOS keeps thumbnails of its originals.
_SPLIT = "(train(ing)?|val(id(ation)?)?|dev|test(ing)?)?"
_COMPANION = re.compile(
    rf"{_SPLIT}[\W_]*(masks?|labels?|annot(ation)?s?|ground[\W_]?truths?|gt|segmentation\w*|depths?|resources|thumbnails?)[\W_]*{_SPLIT}",
    re.IGNORECASE,
)
_TRUTH = re.compile(r"gt([A-Z_-]|$)")
# Parts of a benchmark, such as of re-identification, that are no class beside its training images.
_PARTS = frozenset(("query", "gallery", "probe", "eval", "evaluation"))
# How parts of one set are numbered: by a program, a camera (100APPLE), a day, a patient.
_NUMBERED = re.compile(
    r"(.*[\W_])?(part|images?|imgs?|photos|batch|chunk|shard|subset|folder|fold)[\W_]?\d+|[1-9]\d\d[A-Z0-9_]{5}|"
    r"(19|20)\d\d-\d\d(-\d\d)?|(patients?|pat|subjects?|subj?|case|study|series|ser)[\W_]?\d+",
    re.IGNORECASE,
)
_HEX = frozenset("0123456789abcdefABCDEF")
# Albums of one year each: Photos from 2019.
_YEAR = re.compile(r"(\D+)(?:19|20)\d\d")
_NAMED = 3
_BY_ITSELF = "prepare each folder by itself (--split NAME)"
# For messages about names that are no UTF-8.
NAME_ENCODING = "name the encoding of an archive (--name-encoding gbk, cp932, cp437 ...), or rename it"
Parts = tuple[str, ...]


def place(
    paths: Sequence[Parts], split: str, *, where: str, class_folder: str | None
) -> list[tuple[str, Parts]]:
    """Takes the common top and the split folder off each path: (split, (class, ..., file)).

    Args:
        paths: of images, and of what else lies beside them.
        split: of images outside of split folders.
        where: names the source in errors.
        class_folder: as in `SourceOptions`.

    Raises:
        InputError: if the names have two meanings and `class_folder` is None.
    """
    top = _common_top(paths)
    below = [path[top:] for path in paths]
    ask = None if class_folder else where
    splits = _splits_among([parts[0] for parts in below if len(parts) > 1], _direct(below), ask)
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
    if ask:
        _ask_of_companions(placed, where)
        _ask_which_level(placed, where)
        _ask_of_parts(placed, where)
    return placed


def _common_top(paths: Sequence[Parts]) -> int:
    """How many leading folders all paths share that are neither split nor class."""
    top = 0
    while (
        paths
        and all(len(parts) >= top + 3 and parts[top] == paths[0][top] for parts in paths)
        and not surely_split(paths[0][top])
    ):
        top += 1
    return top


def _direct(paths: Iterable[Parts]) -> set[str]:
    """The first folders that hold images themselves."""
    return {parts[0] for parts in paths if len(parts) == 2}


def _rest(folder: str) -> str:
    """What a name says beside its split: "station" of train_station, nothing of train_images."""
    words = split_and_rest(folder)[1]
    return " ".join(word for word in words if word not in _WRAPPERS)


def surely_split(folder: str) -> str | None:
    """Returns the split of a name that says nothing else: training_images, and not train_station."""
    return None if _rest(folder) else split_and_rest(folder)[0]


def companions_among(names: set[str]) -> set[str]:
    """Returns those of sibling folders that belong to the others: masks beside images, ground_truth beside train.

    Args:
        names: of all that hold images; "" for images that lie beside them. Where others may be classes, none belongs.
    """
    found = set(filter(_is_companion, names))
    others = names - found
    splits = {split for name in others if (split := split_named(name))}
    wrapped = all(not name or name.lower() in _WRAPPERS or surely_split(name) for name in others)
    return found if len(splits) > 1 or (others and wrapped) else set()


def _is_companion(folder: str) -> bool:
    """Whether a folder is called as what belongs to images is."""
    return bool(_COMPANION.fullmatch(folder) or _TRUTH.match(folder))


def _splits_among(names: Iterable[str], direct: set[str], where: str | None) -> dict[str, str]:
    """The split of each of some sibling folders; none if they are classes.

    Two split names make all of them splits, the others by their own name (extra, test_A). One among other names
    is a class like its brothers.

    Args:
        names: of the folders.
        direct: those that hold images themselves.
        where: names the source in a question; None takes what may be both as classes.
    """
    folders = sorted(set(names))
    exact = {folder: split for folder in folders if (split := split_named(folder))}
    if len(set(exact.values())) > 1 or len(exact) == len(folders):
        found = {folder: surely_split(folder) or re.sub(r"\W", "_", folder) for folder in folders}
        return _distinct(found, where)
    inside = {folder: split for folder in folders if (split := split_and_rest(folder)[0])}
    if len(inside) == len(folders) and (len(set(inside.values())) > 1 or not _rest(folders[0])):
        if len(set(map(_rest, folders))) == 1:
            return _distinct(inside, where)
        if where:
            _ask(
                where, f"are {_listed(folders)} splits or classes?", "if splits, call them train, val or test"
            )
    pairs = {(" ".join(split_and_rest(folder)[1]), split) for folder, split in inside.items()}
    if where and (
        _PARTS & {folder.lower() for folder in folders} or len(pairs) > len({rest for rest, _ in pairs})
    ):
        _ask(where, f"are {_listed(folders)} splits or classes?", f"if splits, {_BY_ITSELF}")
    if where and any(folder not in direct or split == "unlabeled" for folder, split in exact.items()):
        others = _listed(set(folders) - set(exact))
        _ask(
            where,
            f"is {_listed(exact)} beside {others} a split or a class?",
            f"if a split, {_BY_ITSELF}",
            first="a class",
        )
    return {}


def _distinct(splits: dict[str, str], where: str | None) -> dict[str, str]:
    """Refuses two folders of one split."""
    folder_of: dict[str, str] = {}
    for folder, split in splits.items():
        if (other := folder_of.setdefault(split, folder)) != folder:
            raise InputError(
                f'{where or "the source"}: the folders {_listed([other, folder])} are both of split "{split}": move '
                "them into one"
            )
    return splits


def _splits_below_classes(paths: Sequence[Parts]) -> dict[str, str]:
    """The splits of CLASS/SPLIT/file, by the folders' names; none where it is not so everywhere."""
    if any(len(parts) < 3 for parts in paths):
        return {}
    names = {parts[1] for parts in paths}
    exact = set(map(split_named, names))
    return _splits_among(names, set(), None) if len(exact - {None}) > 1 or None not in exact else {}


def _unwrapped(placed: list[tuple[str, Parts]]) -> list[tuple[str, Parts]]:
    """Takes off folders that wrap all of a split: train/images/..., training_set/training_set/..."""
    first: dict[str, set[str | None]] = defaultdict(set)
    for own, parts in placed:
        first[own].add(parts[0] if len(parts) > 1 else None)
    wrapped = {
        own
        for own, names in first.items()
        if len(names) == 1
        and (name := next(iter(names)))
        and (name.lower() in _WRAPPERS or split_and_rest(name)[0] == own)
    }
    if not wrapped:
        return placed
    return _unwrapped([(own, parts[1:] if own in wrapped else parts) for own, parts in placed])


def _ask_of_companions(placed: Iterable[tuple[str, Parts]], where: str) -> None:
    """Asks if one of several classes is called like what wraps images or belongs to them: images, masks."""
    folders: dict[str, set[str]] = defaultdict(set)
    for own, parts in placed:
        folders[own].add(parts[0] if len(parts) > 1 else "")
    for names in folders.values():
        odd = {name for name in names if name.lower() in _WRAPPERS or _is_companion(name)}
        if (odd and names - odd) or len(odd) > 1:
            _ask(
                where,
                f"are {_listed(name or '.' for name in names)} classes?",
                "if not, prepare the folder of the images by itself (--masks DIR reads masks)",
                alone=False,
            )
    below = {"/".join(parts[:-1]) for _, parts in placed if len(parts) > 2}
    if odd := {folder for folder in below if _is_companion(folder.rpartition("/")[2])}:
        _ask(
            where,
            f"are {_listed(odd)} images of the classes?",
            "if masks or labels of other images, move them elsewhere first",
            first="images of the classes",
            alone=False,
        )


def _ask_of_parts(placed: Iterable[tuple[str, Parts]], where: str) -> None:
    """Asks if folders are called as the parts of one set are, by letters of a hash, or by numbers of tiles."""
    placed = list(placed)
    names = {parts[0] if len(parts) > 1 else "" for _, parts in placed}
    below = {parts[1] if len(parts) > 2 else "" for _, parts in placed}
    letters = "" not in below and all(len(name) == 1 and name.isalpha() for name in names)
    # Two levels of single letters: one may be of classes.
    deeper = {parts[2] if len(parts) > 3 else "" for _, parts in placed}
    single = [all(len(name) == 1 for name in level) for level in (names, below, deeper)]
    hashed = len(below) > 1 and single[1] and (single[0] or single[2])
    tiles = all(map(str.isdigit, names | below | {parts[-1].partition(".")[0] for _, parts in placed}))
    if len(names) > 1 and (letters or hashed or tiles or _are_parts(names)):
        last = len(below) > 1 and not (hashed or tiles or _are_parts(below))
        lower = "--class-folder last (classes are the folders in them)" if last else "--no-labels"
        question = f"are {_listed(names)} classes, or parts of one set?"
        _ask(where, question, f"if parts, {lower}", alone=last)


def _are_parts(names: set[str]) -> bool:
    """Whether folders are called as the parts of one set are."""
    years = [found[1] for name in names if (found := _YEAR.fullmatch(name))]
    # Digits alone are classes, and so are letters alone.
    hashed = names <= _HEX and 0 < sum(map(str.isdigit, names)) < len(names)
    return hashed or (len(years) > 1 and len(set(years)) == 1) or all(map(_NUMBERED.fullmatch, names))


def _ask_which_level(placed: Iterable[tuple[str, Parts]], where: str) -> None:
    """Asks if two folders hold folders of the same names: SITE/CLASS, or CLASS/SITE?"""
    below: dict[tuple[str, str], set[str]] = defaultdict(set)
    for own, parts in placed:
        if len(parts) > 1:
            below[own, parts[0]].add(parts[1] if len(parts) > 2 else "")
    seen: dict[tuple[str, str], str] = {}
    common: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (own, folder), names in below.items():
        if "" in names:
            continue
        for name in sorted(names):
            if (other := seen.setdefault((own, name), folder)) != folder:
                common[other, folder].add(name)
    for (one, two), shared in common.items():
        if len(shared) > 1:
            _ask(
                where,
                f"{_listed([one, two])} hold the same folders, {_listed(shared)}: which are the classes?",
                "if the lower, --class-folder last",
                "if both hold versions of the same images, prepare one of them by itself",
                first="the upper",
            )


def level_note(placed: Iterable[tuple[str, Parts]], class_folder: str | None) -> list[str]:
    """Says which folders below classes are none, or, where the last folder is the class, which of them are joined."""
    below: dict[str, set[str]] = defaultdict(set)
    for _, parts in placed:
        if class_folder == "last" or len(parts) > 2:
            below[parts[0]].add("/".join(parts[1:-1]))
    if class_folder == "last":
        joined = sorted(name for name, folders in below.items() if len(folders) > 1)
        return [f"joined folders of one name to a class: {_listed(joined)}"] if joined else []
    inner = {f"{name}/{folder}" for name, folders in below.items() for folder in folders}
    if class_folder or all(folder.rpartition("/")[2].lower() in _WRAPPERS for folder in inner):
        return []
    return [f"folders below classes are none: {_listed(inner)} (--class-folder last takes them)"]


def _ask(where: str, question: str, *answers: str, first: str = "classes", alone: bool = True) -> NoReturn:
    """Refuses what has two meanings, with what to do for each.

    Args:
        where: names the source.
        question: about its folders.
        answers: for other meanings than the one of --class-folder first.
        first: that meaning.
        alone: whether --no-labels takes images to train on, and nothing else.
    """
    images = ("for images alone, --no-labels",) if alone else ()
    given = "; ".join(("mae-vit prepare --class-folder first", *answers, *images))
    raise InputError(f"{where}: {question} If {first}, {given}")


def _listed(names: Iterable[str]) -> str:
    shown = [f'"{plain_text(name)}"' for name in sorted(names)]
    more = ", ..." if len(shown) > _NAMED else ""
    return (" and " if len(shown) == 2 else ", ").join(shown[:_NAMED]) + more


def decode_name(raw: bytes, encoding: str | None) -> str:
    """Decodes a file's name in an archive, UTF-8 unless told; what cannot be decoded becomes surrogates."""
    return raw.decode(encoding or "utf-8", "surrogateescape")


def check_encoding(name: str) -> str:
    """Returns the name of an encoding that Python knows.

    Raises:
        InputError: for others.
    """
    try:
        "".encode(name)
    except (LookupError, UnicodeError):
        raise InputError(
            f"--name-encoding {name}: no encoding; usual ones are gbk, big5, cp932, euc-kr, cp1251, cp437"
        ) from None
    return name
