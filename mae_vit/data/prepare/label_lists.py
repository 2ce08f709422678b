"""Labels of images in no class folder, from a list of names and classes beside them, such as val_annotations.txt."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import ARRAY_EXTENSIONS, IMAGE_EXTENSIONS, decode_text, extension_of
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.prepare.listing import is_sample, shown

_ALL = frozenset((*IMAGE_EXTENSIONS, *ARRAY_EXTENSIONS))
# More are no columns: words of a caption.
_COLUMNS = 16


class Names:
    """Images, found by the end of their paths, with or without the extension of an image."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Takes the paths."""
        self._paths = set(paths)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for path in self._paths:
            self._by_stem[stem_of(path.rpartition("/")[2]).casefold()].append(path)

    def find(self, name: str) -> str | None:
        """Returns the path of the one image that is meant, in any case; None of none or several."""
        name = name.replace("\\", "/").removeprefix("./")
        if name in self._paths:
            return name
        wanted = f"/{name}"
        alike = self._by_stem.get(stem_of(wanted.rpartition("/")[2]).casefold(), ())
        for cased in (str, str.casefold):
            found = [
                path
                for path in alike
                if cased(f"/{path}").endswith(cased(wanted))
                or stem_of(cased(f"/{path}")).endswith(cased(wanted))
            ]
            # Beside photographs arrays are features, masks or metadata.
            found = [path for path in found if extension_of(path) in IMAGE_EXTENSIONS] or found
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def shown(self) -> str:
        """Lists the first few, for messages."""
        return shown(sorted(self._paths))


def stem_of(name: str) -> str:
    """Returns a name without the extension of an image; what else follows a dot is of the name."""
    return name.rpartition(".")[0] if extension_of(name) in _ALL else name


def labels_beside(
    paths: Sequence[str], classes: Collection[str], texts: Iterable[tuple[str, Callable[[], bytes]]]
) -> tuple[dict[str, str], list[str]]:
    """Reads labels from lists: a column of names of these images, and one that holds classes of others alone.

    Args:
        paths: of images without a label.
        classes: of other images.
        texts: path and reader of each text that may be such a list; it lists what lies beside it or below.

    Returns:
        The label of each path that has one, and remarks.
    """
    told, notes = dict[str, str](), list[str]()
    names: dict[str, Names] = {}
    above = {folder for path in {path.rpartition("/")[0] for path in paths} for folder in _and_above(path)}
    for text, read in texts:
        folder, _, own = text.rpartition("/")
        if folder not in above or is_sample(own):
            continue
        prefix = f"{folder}/" if folder else ""
        if folder not in names:
            names[folder] = Names(path.removeprefix(prefix) for path in paths if path.startswith(prefix))
        rows = [(prefix + path, cells) for path, cells in _rows(read, names[folder])]
        rows = [(path, cells) for path, cells in rows if path not in told]
        if len(images := dict(rows)) < 2:
            continue
        columns = [{(path, cells[n]) for path, cells in rows} for n in range(min(len(c) for _, c in rows))]
        labels = next((pairs for pairs in columns if _are_labels(pairs, len(images), classes)), None)
        count = count_of(len(images), "image")
        if labels:
            told |= dict(labels)
            notes.append(
                f"took the labels of {count} from {plain_text(text)}, which names classes of the others"
            )
        elif len(columns) > 1 and (classes or extension_of(own) == "txt"):
            why = (
                "no column has a class of the others for each" if classes else "labels are read from folders"
            )
            notes.append(
                f"{plain_text(text)} lists {count} without a label, but {why}: make it a CSV whose first line is "
                "path,label, and give that as a source (mae-vit prepare LIST.csv OUT --split NAME)"
            )
    return told, notes


def _are_labels(pairs: set[tuple[str, str]], images: int, classes: Collection[str]) -> bool:
    """Whether a column has one class of each image; one of all images is more likely a stand-in."""
    values = {value for _, value in pairs}
    return len(pairs) == images and len(values) > 1 and all(value in classes for value in values)


def _and_above(folder: str) -> list[str]:
    """A folder and those around it, "" last."""
    found = [folder]
    while found[-1]:
        found.append(found[-1].rpartition("/")[0])
    return found


def _rows(read: Callable[[], bytes], names: Names) -> list[tuple[str, list[str]]]:
    """The lines that name images: the path of the image, and all cells; of the column that names most."""
    try:
        text = decode_text(read(), "")
        first = text.partition("\n")[0]
        delimiter = max("\t", ";", ",", key=first.count)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter if delimiter in first else " ")
        cells = [[cell.strip() for cell in line] for line in lines]
    except (OSError, InputError, DecodeError, csv.Error):
        return []
    by_column = (
        [(path, line) for line in cells if n < len(line) and (path := names.find(line[n])) is not None]
        for n in range(min(_COLUMNS, max(map(len, cells), default=0)))
    )
    return max(by_column, key=len, default=[])
