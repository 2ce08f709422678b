"""Is a run normal? Curves of shipped presets as they were measured, and where a run leaves them.

A reference is made of finished runs of one recipe that differ in their seed (`docs/tools/collect_curves.py`).
Its band is the mean of the seeds and `WIDTH_SIGMAS` standard deviations to either side, at least
`LEAST_SHARE` of the mean: with three seeds the spread itself is hardly known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from mae_vit.config.presets import shipped_folder
from mae_vit.objectives.pretrain_config import PretrainConfig

FOLDER = shipped_folder("reference_curves", "docs/reference_curves")
WIDTH_SIGMAS = 4.0
LEAST_SHARE = 0.03
# Of one seed nothing is known of the spread.
_LEAST_SHARE_OF_ONE = 0.08
# The loss of single steps is noisy: it is averaged over so many parts of the run.
_BINS = 30
_LOSS = "loss"
# Keys that define a recipe; speed, paths and monitoring do not.
_SECTIONS = ("model", "objective", "optim")
_TRAIN = (
    *("steps", "epochs", "samples", "warmup_steps", "warmup_epochs", "warmup_samples"),
    *("effective_batch_size", "ema_decay"),
)


@dataclass(frozen=True)
class Band:
    """A curve over steps, and how far runs of other seeds may be from it.

    Attributes:
        steps: int (n,), ascending: the end of each part of the run, or where it was measured.
        mean: (n,) over seeds.
        half_width: (n,).
        lines: int (n,), how many lines of metrics each value is the mean of.
    """

    steps: np.ndarray
    mean: np.ndarray
    half_width: np.ndarray
    lines: np.ndarray


@dataclass(frozen=True)
class Curve:
    """A run's own.

    Attributes:
        steps: int (n,), ascending.
        values: (n,).
        lines: int (n,), how many lines of metrics each value is the mean of.
    """

    steps: np.ndarray
    values: np.ndarray
    lines: np.ndarray


@dataclass(frozen=True)
class Reference:
    """The reference curves of a preset.

    Attributes:
        name: of the preset.
        recipe: values of the config that make it, by key.
        total_steps: of its runs.
        seeds: they were run with.
        bands: "loss" in training, and metrics of held-out images by their names.
    """

    name: str
    recipe: Mapping[str, Any]
    total_steps: int
    seeds: tuple[int, ...]
    bands: Mapping[str, Band]


@dataclass(frozen=True)
class Departure:
    """Where a run leaves the band.

    Attributes:
        curve: "loss" or a held-out metric.
        step: the first outside.
        value: of the run.
        low: of the band.
        high: of the band.
    """

    curve: str
    step: int
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        off = self.value - (self.high if self.value > self.high else self.low)
        return (
            f"{self.curve} {self.value:.4g} at step {self.step:,} is {off:+.3g} outside of {self.low:.4g} to "
            f"{self.high:.4g}"
        )


def recipe_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys that define a resolved config's recipe: `model.depth`, `optim.lr`, ..."""
    chosen = {name: config.get(name, {}) for name in _SECTIONS}
    data = config.get("data", {})
    chosen["data"] = {name: data[name] for name in ("augment", "repeats") if name in data}
    chosen["train"] = {name: config.get("train", {}).get(name) for name in _TRAIN}
    return dict(sorted(_flat(chosen)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def read_references(folder: Path = FOLDER) -> list[Reference]:
    """Reads all that are there."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Reference:
    record = json.loads(path.read_text(encoding="utf-8"))
    seeds = tuple(record["seeds"])
    bands = {}
    for name, curve in record["curves"].items():
        values = np.array(curve["values"], np.float64)  # (seeds, n)
        mean = values.mean(axis=0)
        if len(values) > 1:
            width = np.maximum(WIDTH_SIGMAS * values.std(axis=0, ddof=1), LEAST_SHARE * np.abs(mean))
        else:
            width = _LEAST_SHARE_OF_ONE * np.abs(mean)
        bands[name] = Band(
            np.array(curve["steps"], np.int64), mean, width, np.array(curve["lines"], np.int64)
        )
    return Reference(path.stem, _with_defaults(record["recipe"]), record["total_steps"], seeds, bands)


def _with_defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the defaults of options that are newer than the reference."""
    config: dict[str, Any] = {"run": {"name": "reference"}, "data": {"path": "-"}}
    for key, value in recipe.items():
        place = config
        *sections, name = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    try:
        return recipe_of(PretrainConfig.model_validate(config).model_dump(mode="json"))
    except ValidationError:  # of an option that is gone
        return dict(recipe)


def nearest_reference(
    recipe: Mapping[str, Any], references: Iterable[Reference]
) -> tuple[Reference, list[str]] | None:
    """Finds the reference whose recipe differs in the fewest values.

    Returns:
        It, and the keys that differ, with both values; None where there are no references.
    """
    nearest = None
    for reference in references:
        keys = sorted({*recipe, *reference.recipe})
        differing = [
            f"{key}={_shown(recipe.get(key))} (the reference has {_shown(reference.recipe.get(key))})"
            for key in keys
            if recipe.get(key) != reference.recipe.get(key)
        ]
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = reference, differing
    return nearest


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def curves_of(lines: Sequence[Mapping[str, Any]], total_steps: int) -> dict[str, Curve]:
    """Reads curves off `metrics.jsonl`, by name.

    The loss is averaged over equal parts of the run, and only complete parts count.
    """
    edges = np.unique(np.linspace(0, total_steps, min(_BINS, total_steps) + 1).round().astype(np.int64))
    steps = np.array([line["step"] for line in lines], np.int64)
    losses = np.array([np.nan if line["loss"] is None else line["loss"] for line in lines], np.float64)
    parts = []
    for low, high in pairwise(edges.tolist()):
        inside = (steps > low) & (steps <= high) & np.isfinite(losses)
        if inside.any() and steps.max() >= high:
            parts.append((high, losses[inside].mean(), inside.sum()))
    curves = {_LOSS: _curve(parts)}
    for name in dict.fromkeys(name for line in lines for name in line.get("heldout", {})):
        evaluated = [line for line in lines if name in line.get("heldout", {})]
        curves[f"heldout.{name}"] = _curve([(line["step"], line["heldout"][name], 1) for line in evaluated])
    return curves


def _curve(points: Sequence[tuple[int, float, int]]) -> Curve:
    steps, values, lines = zip(*points, strict=True) if points else ((), (), ())
    return Curve(np.array(steps, np.int64), np.array(values, np.float64), np.array(lines, np.int64))


def deviations(reference: Reference, lines: Sequence[Mapping[str, Any]]) -> tuple[list[Departure], int]:
    """Names, for each curve, the first place where a run leaves its band.

    Places where the run has fewer lines than the reference had are passed over: their mean is noisier, or
    a part of them is missing.

    Returns:
        The departures (none for a normal run), and the number of compared points.
    """
    outliers, compared = [], 0
    for name, curve in curves_of(lines, reference.total_steps).items():
        band = reference.bands.get(name)
        if band is None:
            continue
        at = {int(step): place for place, step in enumerate(band.steps)}
        outside = []
        for step, value, count in zip(
            curve.steps.tolist(), curve.values.tolist(), curve.lines.tolist(), strict=True
        ):
            place = at.get(step)
            if place is None or count < band.lines[place]:
                continue
            compared += 1
            low = float(band.mean[place] - band.half_width[place])
            high = float(band.mean[place] + band.half_width[place])
            if not low <= value <= high:
                outside.append(Departure(name, step, value, low, high))
        outliers += outside[:1]
    return outliers, compared


@dataclass
class ReferenceWatch:
    """Watches a run in training and warns once per process if it is far outside its reference."""

    reference: Reference
    _lines: list[Mapping[str, Any]] = field(default_factory=list)
    _said: bool = False

    def check(self, line: Mapping[str, Any]) -> str | None:
        """Takes a line of metrics; returns a warning the first time that there is one."""
        if self._said:
            return None
        self._lines = [kept for kept in self._lines if kept["step"] < line["step"]] + [line]
        outliers, _ = deviations(self.reference, self._lines)
        if not outliers:
            return None
        self._said = True
        seeds = len(self.reference.seeds)
        return (
            f"warning: {outliers[0]}, where runs of {self.reference.name} lie ({seeds} measured): same data? "
            "`mae-vit curve RUN` draws it; said once"
        )


def reference_watch(
    config: Mapping[str, Any], total_steps: int, folder: Path = FOLDER
) -> ReferenceWatch | None:
    """Returns a watcher for a run of exactly a preset's recipe and length; None for all others."""
    nearest = nearest_reference(recipe_of(config), read_references(folder))
    if nearest is None or nearest[1] or nearest[0].total_steps != total_steps:
        return None
    return ReferenceWatch(nearest[0])
