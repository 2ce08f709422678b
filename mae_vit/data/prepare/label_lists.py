"""Reads labels of images outside class folders from a list beside them, such as val_annotations.txt."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, plain_text
from mae_vit.core.user_files import (
    IMAGE_EXTENSIONS,
    READ_EXTENSIONS,
    UNREAD_EXTENSIONS,
    decode_text,
    extension_of,
)
from mae_vit.data.images.decode import DecodeError
from mae_vit.data.prepare.columns import read_lines
from mae_vit.data.prepare.entries import Reader, composed
from mae_vit.data.prepare.listing import is_sample, shown

# More cells are the words of a caption, not columns.
_COLUMNS = 16


class Names:
    """Finds images by the ends of their paths, with or without an image's extension."""

    def __init__(self, paths: Iterable[str]) -> None:
        """Takes the paths; a repeated one is of several images."""
        self._paths = Counter(paths)
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        for path in self._paths.elements():
            self._by_stem[_folded(image_stem(path.rpartition("/")[2]))].append(path)

    def __str__(self) -> str:
        """The first few paths, for messages."""
        return shown(sorted(self._paths))

    def find(self, name: str, elsewhere: int = 0) -> str | None:
        """Returns the path of the only image that matches, in any letter case; None if none or several do.

        If none does, up to `elsewhere` leading folders of the name are left out, which may be of another machine.
        """
        for _ in range(elsewhere + 1):
            paths = self._matching(name)
            if len(paths) == 1:
                return paths[0]
            name = re.split(r"[/\\]", name, maxsplit=1)[-1]
        return None

    def several_in(self, columns: Iterable[Sequence[str]]) -> list[str]:
        """Returns the different cells of the first column whose every cell matches several images; else none."""
        return next(
            (list(dict.fromkeys(cells)) for cells in columns if all(map(self.are_several, cells))), []
        )

    def are_several(self, name: str) -> bool:
        """Whether several images match."""
        return len(self._matching(name)) > 1

    def _matching(self, name: str) -> list[str]:
        name = name.replace("\\", "/").removeprefix("./")
        if name in self._paths:
            return [name] * self._paths[name]
        wanted = f"/{name}"
        alike = self._by_stem.get(_folded(image_stem(wanted.rpartition("/")[2])), ())
        for cased in (composed, _folded):
            paths = [
                path
                for path in alike
                if cased(f"/{path}").endswith(cased(wanted))
                or image_stem(cased(f"/{path}")).endswith(cased(wanted))
            ]
            # Arrays beside photographs are features, masks or metadata.
            paths = [path for path in paths if extension_of(path) in IMAGE_EXTENSIONS] or paths
            if paths:
                return paths
        # Converted since the list was written?
        return self._matching(name.rpartition(".")[0]) if extension_of(name) in UNREAD_EXTENSIONS else []


def _folded(text: str) -> str:
    return composed(text).casefold()


def several_fit(names: Sequence[str], table: str) -> str:
    """Says that several images fit each of these names in a table."""
    return (
        f"several images fit {count_of(len(names), 'file')} of {table} ({shown(names)}); give the folders too"
    )


def image_stem(name: str) -> str:
    """Returns a name without an image's extension; other text after a dot is part of the name."""
    return name.rpartition(".")[0] if extension_of(name) in READ_EXTENSIONS else name


def labels_beside(
    paths: Sequence[str], classes: Collection[str], texts: Iterable[tuple[str, Reader]]
) -> tuple[dict[str, str], list[str]]:
    """Reads labels from lists with a column that names these images and one that holds only classes of other images.

    Returns the label of each path that has one, and remarks. `texts` are path and reader of each text that may be such
    a list, for images beside it or below.
    """
    labels, notes = dict[str, str](), list[str]()
    folders = [path.split("/")[:-1] for path in paths]
    above = {"/".join(parts[:count]) for parts in folders for count in range(len(parts) + 1)}
    for text, read in texts if classes else ():
        folder, _, name = text.rpartition("/")
        if folder not in above or is_sample(name):
            continue
        prefix = f"{folder}/" if folder else ""
        below = [
            path.removeprefix(prefix) for path in paths if path.startswith(prefix) and path not in labels
        ]
        rows = [(prefix + path, cells) for path, cells in _rows(read, Names(below))]
        images = len(dict(rows))
        columns = [
            {(path, cells[n]) for path, cells in rows}
            for n in range(min((len(c) for _, c in rows), default=0))
        ]
        for pairs in columns:
            values = {value for _, value in pairs}
            # A single class for all images is more likely a placeholder.
            if len(pairs) == images and len(values) > 1 and values.issubset(classes):
                labels |= dict(pairs)
                notes.append(f"read the labels of {count_of(images, 'image')} from {plain_text(text)}")
                break
    return labels, notes


def _rows(read: Reader, names: Names) -> list[tuple[str, list[str]]]:
    """Returns the image path and the cells of each line that names an image, by the column that names most."""
    try:
        cells = read_lines(decode_text(read(), ""), "", uneven=True)
    except (OSError, InputError, DecodeError):
        return []
    by_column = (
        [(path, line) for line in cells if n < len(line) and (path := names.find(line[n])) is not None]
        for n in range(min(_COLUMNS, max(map(len, cells), default=0)))
    )
    return max(by_column, key=len, default=[])
