"""What tests of comparisons share."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from helpers.commands import csv_rows
from helpers.finetune import TINY

from mae_vit.comparison.config import CompareConfig, EntrySection
from mae_vit.comparison.plan import Cell, ComparisonPlan
from mae_vit.comparison.report.rows import PREDICTIONS, Row
from mae_vit.comparison.report.significance import Gap, Scores, gap_between
from mae_vit.comparison.spec import RunSpec
from mae_vit.config.load import load_config
from mae_vit.config.typed_yaml import parse_yaml
from mae_vit.evaluation.segmentation import Overlaps


def spec(name: str, folder: Path, script: Path | None = None, **options) -> RunSpec:
    """A run by a script, or by none; its name is its identity."""
    program = (str(script),) if script else ()
    values = {
        "overrides": {},
        "config": folder / "config.yaml",
        "folder": folder / name,
        "id": name,
        **options,
    }
    return RunSpec(name, program, **values)


def row(name: str, seed: int, correct: np.ndarray, *, fixed: bool = False) -> Row:
    """A finished cell with nothing in it but which test images are classified correctly."""
    entry = EntrySection(name=name, config="x")
    cell = Cell(entry, "all", "finetune", seed, spec(f"{name}, seed {seed}", Path(name)), fixed)
    keys = tuple("abcdefghij"[: len(correct)]) if len(correct) <= 10 else tuple(map(str, range(len(correct))))
    truth = np.ones(len(correct), int)
    return Row(cell, {"test_top1": float(correct.mean())}, keys, truth, correct.astype(int), (), 0)


def gap_of(rows: list[Row], others: list[Row]) -> Gap | None:
    """The gap between two entries, from their rows."""
    return gap_between([row.scores for row in rows], [row.scores for row in others])


_TESTED = 1000
_VALUES = {
    "val_size": 0, "test_size": _TESTED, "test_split": "test", "parameters": 1, "finetune_flops": 1.0,
    "pretrain_flops": 0.0,
}  # fmt: skip


def rows_of(
    name: str, shares: list[float], *, start: str | None = None, seen: str | None = None, labels: int = 200
) -> list[Row]:
    """A row for each seed; `shares` of the test images are classified correctly, the easy ones."""
    rows = []
    for seed, share in enumerate(shares):
        base = row(name, seed, np.arange(_TESTED) < round(_TESTED * share))
        cell = replace(base.cell, entry=base.cell.entry.model_copy(update={"start": start}), labels=labels)
        more = {"train_size": labels, "labels_seen_by_start": seen}
        rows.append(replace(base, cell=cell, values=base.values | _VALUES | more))
    return rows


def config_of(rows: list[Row]) -> CompareConfig:
    """A comparison of the entries that the rows name; the first is the reference."""
    names = list(dict.fromkeys(row.cell.entry.name for row in rows))
    entries = [{"name": name, "config": "x.yaml"} for name in names]
    return CompareConfig.model_validate(
        {"run": {"name": "x"}, "data": {"path": "data"}, "entries": entries, "reference": names[0]}
    )


def plan_of(folder: Path, entries: list[dict] | None = None, **values) -> ComparisonPlan:
    """The plan of a comparison in `folder / "out"`; by default of one entry, from scratch."""
    entries = [{"config": "x.yaml", **entry} for entry in entries or [{"name": "scratch"}]]
    raw = {
        "run": {"name": "x"},
        "data": {"path": "data"},
        "entries": entries,
        "reference": entries[0]["name"],
    }
    return ComparisonPlan(CompareConfig.model_validate(raw | values), folder, folder / "out")


# What differs from one machine, or one try, to the next.
_TIME_COLUMNS = ("finetune_s", "pretrain_s")
TINY_MODEL = ", ".join(text.replace("=", ": ") for text in TINY)
_CONFIG = """
run: {{name: small}}
data: {{path: {data}}}
set:
  model.img_size: 8
  model.in_chans: 1
  data.augment: {{crop: pad, pad_px: 1, flip: false}}
  train.steps: {steps}
  train.warmup_steps: 1
  train.effective_batch_size: 32
  monitor.log_every_steps: 1
  monitor.evaluate_every_steps: 2
  monitor.tensorboard: false
  checkpoint.every_steps: 2
pretrain:
  MAE:
    config: mae_digits.yaml
    set: {{{model}, objective.decoder_embed_dim: 16, objective.decoder_depth: 1, objective.decoder_num_heads: 2,
          train.engine: torch, train.steps: {steps}, train.warmup_steps: 1, monitor.tensorboard: false,
          checkpoint.every_steps: 2, monitor.evaluate_every_steps: 3, monitor.evaluate_images: 64}}
entries:
  - {{name: ViT from scratch, config: finetune_cifar_tiny.yaml, set: {{{model}}}}}
  - {{name: ViT from MAE, config: finetune_cifar_tiny.yaml, start: MAE, modes: [finetune, few_shot]}}
  - {{name: SimpleCNN, config: simple_cnn_cifar.yaml, tune: [{{optim.lr: 2e-3}}, {{optim.lr: 4e-3}}]}}
{as_long}reference: ViT from scratch
labels_per_class: [25]
seeds: [0]
tune: [{{optim.lr: 1e-3}}, {{optim.lr: 3e-3}}]
parallel: 2
"""
_AS_LONG = """\
  - {{name: as long as MAE, config: finetune_cifar_tiny.yaml, set: {{{model}}}, compute_of: ViT from MAE}}
"""


def write_config(folder: Path, data: Path, *, steps: int, as_long: bool = True) -> Path:
    """Writes the file of a small comparison on the digits: pretraining, three entries, and with `as_long` a fourth."""
    path = folder / "small.yaml"
    values = {"data": data, "steps": steps, "model": TINY_MODEL}
    path.write_text(_CONFIG.format(as_long=_AS_LONG.format(**values) if as_long else "", **values))
    return path


def equal_compute_plan(folder: Path, data: Path, **changes) -> ComparisonPlan:
    """A comparison of scratch, MAE and as long as MAE in `folder / "run"`; by default nothing is tuned."""
    path = write_config(folder, data, steps=6)
    content = parse_yaml(path.read_text(), "")
    scratch, mae, _, as_long = content["entries"]
    entries = [scratch, mae | {"modes": ["finetune"]}, as_long]
    path.write_text(json.dumps(content | {"entries": entries, "tune": []} | changes))
    return ComparisonPlan(load_config(CompareConfig, path), folder, folder / "run")


def compare_command(config: Path, folder: Path, *more: str) -> list[str]:
    """The command that runs it in `folder`."""
    return ["finetune/compare.py", "--config", str(config), f"run.dir={folder}", *more]


def read_rows(folder: Path) -> list[dict[str, str]]:
    """The rows of `results.csv`, but for what differs from one try to the next."""
    return [
        {key: value for key, value in line.items() if key not in _TIME_COLUMNS}
        for line in csv_rows(folder / "results.csv")
    ]


def read_scores(folder: Path) -> dict[tuple[str, str, str], list[Scores]]:
    """Reads `results.csv` and `predictions.npz`: one `Scores` a seed by entry, number of labels and mode."""
    rows = csv_rows(folder / "results.csv")
    packed = np.load(folder / PREDICTIONS, allow_pickle=False)
    cells = json.loads(str(packed["cells"]))
    groups: dict[tuple[str, str, str], list[Scores]] = {}
    in_turn = {split: _results(packed, split) for split in {cell["split"] for cell in cells}}
    for cell in cells:
        split, row = cell["split"], rows[cell["row"]]
        correct, overlaps = next(in_turn[split])
        seed = None if cell["fixed"] else int(row["seed"])
        scores = Scores(seed, correct, tuple(packed[f"keys_{split}"].tolist()), overlaps)
        groups.setdefault((row["entry"], row["labels_per_class"], row["mode"]), []).append(scores)
    return groups


def _results(packed: Mapping[str, np.ndarray], split: int) -> Iterator[tuple[np.ndarray, Overlaps | None]]:
    if f"unions_{split}" not in packed:
        for predicted in packed[f"predicted_{split}"]:
            yield predicted == packed[f"truth_{split}"], None
        return
    for both, either in zip(packed[f"intersections_{split}"], packed[f"unions_{split}"], strict=True):
        yield np.zeros(0, bool), Overlaps(both.astype(float), either.astype(float))
