"""Calls of `mae-vit prepare`, and what they leave."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.images import read_back, write_files

from mae_vit.cli.main import main
from mae_vit.data.index import open_index
from mae_vit.data.shards.dataset_json import Dataset, read_dataset


class Call(NamedTuple):
    """A finished call: exit code, what it printed without times and progress, and its output folder."""

    code: int
    text: str
    out: Path

    @property
    def dataset(self) -> Dataset:
        return read_dataset(self.out)

    def images(self, split: str = "train") -> dict[str, dict[str, bytes]]:
        return read_back(self.out, split)

    def counts(self) -> str:
        """Images by split and class, "-" without a label: "train: cat 1, dog 2 | val: - 3"."""
        parts = []
        for split, info in sorted(self.dataset.splits.items()):
            labels = open_index(self.out, split).labels.tolist()
            named = [(name, labels.count(n)) for n, name in [*enumerate(self.dataset.classes), (-1, "-")]]
            parts.append(f"{split}: {', '.join(f'{name} {count}' for name, count in named if count)}")
            assert info.samples == len(labels)
        return " | ".join(parts)


@pytest.fixture
def call(tmp_path, capsys):
    """Prepares sources (paths, or files of a folder `src`) into `out`; options may be one text."""

    def run(*sources, options="", out="out") -> Call:
        paths = [write_files(tmp_path / "src", s) if isinstance(s, dict) else s for s in sources]
        options = options.split() if isinstance(options, str) else options
        in_place = "--in-place" in options
        folder = Path(paths[0]) if in_place else tmp_path / out
        words = [*paths, *([] if in_place else [folder]), *options]
        capsys.readouterr()
        code = main(["prepare", *map(str, words), *([] if "--workers" in options else ["--workers", "0"])])
        printed = capsys.readouterr()
        lines = f"{printed.out}{printed.err}".split("\n")
        # Without progress bars, and without the time.
        lines = [line for line in lines if line.strip() and not re.search(r"\d+/\d+ \[\d", line)]
        lines = [re.sub(r", \d+\.\d s$", "", line) for line in lines]
        return Call(code, "\n".join(lines), folder)

    return run
