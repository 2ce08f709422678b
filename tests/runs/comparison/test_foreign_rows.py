"""Rows of third-party encoders: with their own size and pooling, and marked in every table."""

import csv
import re

import pytest
from helpers.commands import ROOT, run, summary_of
from helpers.comparison import TINY_MODEL
from helpers.weights.foreign import write_backbone

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.finetuning.comparison.checks import check
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.inputs import Inputs
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.weights.names import FOREIGN_ORIGIN


def plan_with(folder, entry: dict, **shared) -> ComparisonPlan:
    content = {"run": {"name": "x"}, "data": {"path": "data"}, "set": shared, "reference": "it"}
    entries = [{"name": "it", "config": "linear_probe_cifar_tiny", **entry}]
    config = CompareConfig.model_validate({**content, "modes": ["knn"], "entries": entries})
    return ComparisonPlan(config, folder, folder / "out")


def test_it_keeps_its_own_size_and_pooling_whatever_all_rows_are_given(tmp_path):
    start = f"frozen:{write_backbone(tmp_path / 'dinov2', 'dinov2')}"
    shared = {"model.img_size": 8, "model.in_chans": 1, "finetune.pool": "mean", "finetune.neighbors": 5}
    plan = plan_with(tmp_path, {"start": start}, **shared)
    check(plan)
    (cell,) = plan.cells
    assert "finetune.neighbors=5" in cell.run.command()
    assert not [word for word in cell.run.command() if word.startswith(("model.", "finetune.pool"))]
    assert cell.fixed  # no seed makes a difference
    cost = plan.cost_before(plan.config.entries[0])
    assert (cost.images_seen, cost.flops) == (None, None)
    (cell,) = plan_with(tmp_path, {"start": start, "set": {"model.img_size": 42}}, **shared).cells
    assert "model.img_size=42" in cell.run.command()
    with pytest.raises(InputError, match=r'entry "it": frozen:.*finetune.mode=knn'):
        check(plan_with(tmp_path, {"start": start, "modes": ["finetune"]}))


def test_a_published_encoder_joins_the_comparison_of_photographs(tmp_path):
    path = ROOT / "configs" / "compare" / "compare_photos.yaml"
    start = f"frozen:{write_backbone(tmp_path / 'dinov2', 'dinov2')}"
    config = load_config(CompareConfig, path, [f"published={start}"])
    plan = ComparisonPlan(config, path.parent, tmp_path / "out")
    check(plan)
    runs = [cell.run for cell in plan.cells if cell.entry.start == start]
    assert len(runs) == 3
    assert {(run.overrides["finetune.mode"], run.overrides["model.img_size"]) for run in runs} == {
        ("few_shot", 224)
    }


def test_other_weights_in_its_file_are_other_inputs(tmp_path):
    names = [f"frozen:{name}" for name in (write_backbone(tmp_path / "clip", "clip"), "timm:convnext_tiny")]
    before = [Inputs({}).weights(name) for name in names]
    write_backbone(tmp_path / "clip", "clip", seed=1)
    after = [Inputs({}).weights(name) for name in names]
    assert before[0] != after[0]
    assert before[1] == after[1] == names[1]


CONFIG = """
run: {{name: foreign}}
data: {{path: {data}}}
set: {{data.augment: {{crop: none, flip: false}}, train.epochs: 2, train.warmup_epochs: 0.5,
       train.effective_batch_size: 64, finetune.pool: mean, model.img_size: 8, model.in_chans: 1}}
pretrain:
  MAE:
    config: mae_digits.yaml
    set: {{{tiny}, objective.decoder_embed_dim: 16, objective.decoder_depth: 1, objective.decoder_num_heads: 2,
          {short}}}
  supervised:
    config: supervised_cifar_tiny.yaml
    set: {{{tiny}, {short}, data.leave_out_per_class: 25, train.effective_batch_size: 64,
          data.augment: {{crop: pad, pad_px: 1, flip: false}}}}
entries:
  - {{name: scratch, config: {probe}, set: {{{tiny}}}}}
  - {{name: MAE, config: {probe}, start: MAE}}
  - {{name: supervised, config: {probe}, start: supervised}}
  - {{name: DINOv2, config: {probe}, start: "frozen:{dinov2}"}}
  - {{name: ConvNeXt, config: {probe}, start: "frozen:{convnext}"}}
reference: scratch
labels_per_class: [25]
seeds: [0]
modes: [knn, linear_probe]
parallel: 2
"""


@pytest.mark.slow
def test_a_comparison_with_ours_scratch_supervised_and_two_of_others(digits, tmp_path):
    files = {kind: write_backbone(tmp_path / kind, kind) for kind in ("dinov2", "convnext")}
    short = "train.engine: torch, train.steps: 6, train.warmup_steps: 1, monitor.tensorboard: false"
    config, out = tmp_path / "foreign.yaml", tmp_path / "out"
    values = {"data": digits, "probe": "linear_probe_cifar_tiny"}
    config.write_text(CONFIG.format(tiny=TINY_MODEL, short=short, **values, **files))
    done = run("finetune/compare.py", "--config", str(config), f"run.dir={out}", timeout=500)
    assert done.returncode == 0, done.stderr
    with (out / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 10
    for line in table:
        foreign = line["entry"] in ("DINOv2", "ConvNeXt")
        assert line["start_origin"] == (FOREIGN_ORIGIN if foreign else "")
        assert line["start"].startswith("frozen:") == foreign
        assert (line["pretrain_flops"] == "") == foreign
        assert line["labels_seen_by_start"] == ("others" if line["entry"] == "supervised" else "")
        assert 0 <= float(line["test_top1"]) <= 1
    text = (out / "report.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert sum(f"DINOv2 ({FOREIGN_ORIGIN})" in line for line in rows) >= 2
    assert not re.search(r"(DINOv2|ConvNeXt)(?! \(trained|: trained)", text)
    (place,) = [line["run"] for line in table if (line["entry"], line["mode"]) == ("DINOv2", "knn")]
    assert summary_of(out / place)["start_origin"] == FOREIGN_ORIGIN
