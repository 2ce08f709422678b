"""The configs that come with the library: their folder, their names, their headers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mae_vit.core.errors import InputError
from mae_vit.core.messages import closest_path
from mae_vit.core.user_files import expand_path

_LIBRARY = Path(__file__).resolve().parents[1]
_SUFFIX = ".yaml"
# Inside an installed library, beside it in a checkout (pyproject.toml).
PRESETS = _LIBRARY / "presets" if (_LIBRARY / "presets").is_dir() else _LIBRARY.parent / "configs"


def preset_paths() -> list[Path]:
    """Lists the shipped configs, by name."""
    return sorted(PRESETS.glob(f"*/*{_SUFFIX}"), key=lambda path: path.stem)


def find_preset(name: str) -> Path | None:
    """Returns the shipped config called NAME, NAME.yaml or configs/NAME.yaml; None for other names and paths."""
    if Path(name).parent not in (Path(), Path("configs"), PRESETS):
        return None
    stem = Path(name).name.removesuffix(_SUFFIX)
    return next((path for path in preset_paths() if path.stem == stem), None)


def find_config(given: str | Path) -> Path:
    """Returns the config that is meant: an existing file, else the preset of that name, else `given` as a path.

    Raises:
        InputError: if the name is that of a preset and, with `.yaml`, of another file here.
    """
    path = expand_path(given)
    preset = find_preset(str(given))
    if preset is None or path.is_file():
        return path
    beside = path.with_name(path.name + _SUFFIX)
    if path.suffix != _SUFFIX and beside.is_file() and not beside.samefile(preset):
        raise InputError(
            f'config "{given}" is a preset and a file; give {beside} for the file, or rename it for the preset'
        )
    return preset


def hint_at_config(path: Path) -> str:
    """Returns a hint for a path that is not a config: it may mean a preset, a file in its folder, a run, or data."""
    if (path / "config.yaml").is_file():
        return f"for a run's weights give --ckpt {path} (fine-tuning) or model.init={path} (pretraining)"
    if path.is_dir():
        return f"for data give a config, then data.path={path}"
    presets = [Path(preset.stem) for preset in preset_paths()]
    return closest_path(path, path.parent.glob(f"*{_SUFFIX}")) or closest_path(path, presets)


@dataclass(frozen=True)
class Header:
    """The first comment of a preset.

    Attributes:
        name: name of the preset.
        title: its first line.
        lines: the rest by their first words: Command, Data, Hardware, Time, Result, Follows.
    """

    name: str
    title: str
    lines: dict[str, str]

    def row(self) -> tuple[str, str, str, str]:
        """Returns the cells of a table: name, short hardware, short time and title."""
        hardware = re.split(r" \(|[;:,]", self.lines["Hardware"])[0]
        time = re.match(r"(?:about )?[\d.]+ (?:minutes|hours)(?: \d+ minutes)?(?! an)", self.lines["Time"])
        return self.name, hardware, time[0] if time else "-", self.title

    def describe(self) -> str:
        """Returns the name, and an indented line each for title, command, time and result."""
        shown = (name for name in ("Command", "Time", "Result") if name in self.lines)
        parts = (f"  {name.lower():<9}{self.lines[name]}" for name in shown)
        return "\n".join([self.name, f"  {self.title}", *parts])


def read_header(path: Path) -> Header:
    """Reads the header of a preset."""
    title, lines, last = "", dict[str, str](), ""
    header = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    for text in (line.removeprefix("#").strip() for line in header):
        if named := re.match(r"([A-Z]\w+): +(.*)", text):
            last = named[1]
            lines[last] = named[2]
        elif last:
            lines[last] = f"{lines[last].removesuffix(chr(92)).rstrip()} {text}"
        else:
            title = f"{title} {text}".strip()
    return Header(path.stem, title, lines)
