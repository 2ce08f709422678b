"""The tables and figures of README and docs, made from the files under docs/results.

    python docs/tools/tables.py --write      # puts them into all pages
    python docs/tools/tables.py --check      # exits 1 and names what differs from its files
    python docs/tools/tables.py step engine  # prints tables

In a page a table stands between `<!-- table NAME -->` and `<!-- end -->`. Figures outside such tables are found by the
words around them (page_tables/sentences.py). Words are written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# So that a checkout runs without being installed, also if this file is imported.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_tables import (
    bands,
    comparisons,
    engine_and_loader,
    gpu,
    pretraining,
    segmentation,
    small_machine,
    steps,
)
from page_tables.files import ROOT
from page_tables.sentences import SENTENCES


class Table(NamedTuple):
    """A table, and the files under docs/results that it is made of."""

    make: Callable[[], str]
    files: tuple[str, ...] = ()


def _planned(name: str) -> Callable[[], str]:
    def make() -> str:
        # Late: it imports torch, which the other tables do without.
        import scaling_plan

        return scaling_plan.TABLES[name](scaling_plan.Inputs())

    return make


def _length(comparison: str) -> Table:
    files = tuple(f"{comparison}/{name}" for name in ("results.csv", "report.md"))
    return Table(lambda: comparisons.length(comparison), files)


_COMPARED = tuple(f"{comparisons.FIVE_K}/{name}" for name in ("results.csv", "report.md"))
_TRANSFER = (f"{comparisons.TRANSFER}/results.csv", f"{comparisons.TRANSFER}/report.md")
_SCALE = (small_machine.FILE,)
_SEGMENTATION = tuple(f"{segmentation.COMPARISON}/{name}" for name in ("results.csv", "report.md"))
TABLES = {
    "few-labels": Table(comparisons.few_labels, _COMPARED),
    "transfer": Table(comparisons.transfer, _TRANSFER),
    "segmentation": Table(segmentation.compared, _SEGMENTATION),
    "rankme": Table(pretraining.rankme, (pretraining.RANKME,)),
    "contrast": Table(pretraining.contrast, (pretraining.CONTRAST,)),
    "pretraining": Table(pretraining.pretraining_runs, ("pretraining.json",)),
    "length": _length(comparisons.LENGTH),
    "length-photos": _length(comparisons.LENGTH_PHOTOS),
    "chosen-settings": Table(comparisons.chosen_settings, _COMPARED[:1]),
    "tried-settings": Table(comparisons.tried_settings, (comparisons.TRIED,)),
    "plain-script": Table(comparisons.plain_script, ("plain_small_data.json",)),
    "step": Table(steps.step, ("step.json", "step_base.json")),
    "profile-cifar-tiny": Table(lambda: steps.profile("mae_cifar_tiny"), ("profile_step.json",)),
    "profile-base": Table(lambda: steps.profile("mae_base"), ("profile_step.json",)),
    "bands": Table(bands.arms, (bands.ARMS,)),
    "bands-loader": Table(bands.loader, (bands.LOADER,)),
    "engine": Table(engine_and_loader.engine, ("engine.json",)),
    "loader": Table(engine_and_loader.loader, ("loader.json",)),
    "gpu-rates": Table(gpu.rates, (gpu.RATES,)),
    "gpu-parity": Table(gpu.parity, (gpu.PARITY,)),
    "start": Table(small_machine.start, _SCALE),
    "ranks": Table(small_machine.ranks, _SCALE),
    "measured-saves": Table(small_machine.saves, _SCALE),
    "cores": Table(_planned("cores"), ("loader.json",)),
    # Computed from configs, or assumed: no file.
    **{name: Table(_planned(name)) for name in ("rates", "runs", "storage", "steps", "states", "saves")},
}
MARKED = re.compile(r"(<!-- table ([a-z-]+) -->)\n(.*?)\n?(<!-- end -->)", flags=re.DOTALL)
_FIGURE = r"([-+]?[0-9][0-9.,]*(?:\s+±\s+[0-9.]+)?)"


def pages() -> list[str]:
    """The pages that have tables or figures of files, relative to the repository."""
    marked = [path for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if _tables(path)]
    return sorted({*(str(path.relative_to(ROOT)) for path in marked), *SENTENCES})


def _tables(path: Path) -> list[str]:
    return [match[2] for match in MARKED.finditer(path.read_text())]


def pattern(words: str) -> re.Pattern[str]:
    """Finds a sentence over line breaks, which in a config begin with `#`."""
    parts = [r"[\s#]+".join(map(re.escape, part.split(" "))) for part in words.split("{}")]
    return re.compile(_FIGURE.join(f"({part})" for part in parts))


def fill(page: str, text: str) -> tuple[str, list[str]]:
    """Puts tables and figures into a page.

    Args:
        page: its path, relative to the repository.
        text: what it holds.

    Returns:
        The page as it should be, and a line on each table and sentence that differs from its files or is not there.
    """
    complaints = []

    def put(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            complaints.append(f"{page}: no table is called {match[2]}")
            return match[0]
        made = TABLES[match[2]].make()
        if made != match[3]:
            complaints.append(f"{page}: table {match[2]}: " + _first_difference(match[3], made))
        return f"{match[1]}\n{made}\n{match[4]}"

    text = MARKED.sub(put, text)
    for words, values in SENTENCES.get(page, ()):
        matches = list(pattern(words).finditer(text))
        if len(matches) != 1:
            complaints.append(f"{page}: {len(matches)} times in the page, not once: {words}")
            continue
        (match,) = matches
        groups, figures = list(match.groups()), list(values())
        before = [" ".join(figure.split()) for figure in groups[1::2]]
        if before != figures:
            complaints.append(f"{page}: has {before}, its files {figures}: {words}")
            groups[1::2] = figures
        text = text[: match.start()] + "".join(groups) + text[match.end() :]
    return text, complaints


def _first_difference(before: str, after: str) -> str:
    pairs = zip(before.splitlines() + [""] * 99, after.splitlines(), strict=False)
    return next((f"has {old!r}, its files {new!r}" for old, new in pairs if old != new), "has more rows")


def missing_links(page: str, text: str) -> Iterator[str]:
    """A line on each table whose section of the page does not link to a file of it."""
    for match in MARKED.finditer(text):
        start = max(text.rfind("\n## ", 0, match.start()), 0)
        end = text.find("\n## ", match.end())
        section = text[start : end if end >= 0 else None]
        for file in TABLES[match[2]].files if match[2] in TABLES else ():
            if f"results/{file})" not in section:
                yield f"{page}: table {match[2]}: its section does not link to docs/results/{file}"


def main() -> int:
    """Writes, checks or prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="put tables and figures into all pages")
    action.add_argument("--check", action="store_true", help="exit 1 if a page differs from its files")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"print it: {', '.join(TABLES)}")
    options = parser.parse_args()
    for name in options.tables:
        if name not in TABLES:
            parser.error(f"no table is called {name}; there are: {', '.join(TABLES)}")
        print(f"{TABLES[name].make()}\n")
    complaints = []
    for page in pages() if options.write or options.check else ():
        path = ROOT / page
        text, differences = fill(page, path.read_text())
        if options.write:
            path.write_text(text)
            differences = fill(page, text)[1]
        complaints += [*differences, *missing_links(page, text)]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
