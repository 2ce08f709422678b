"""Rows of encoders of others: marked in every table and sentence, and never what a comparison is about."""

import csv
import json
import re
from dataclasses import replace

import pytest
from helpers.commands import ROOT, run
from helpers.comparison import TINY_MODEL, config_of, rows_of
from helpers.weights.foreign import write_backbone

from mae_vit.core.errors import InputError
from mae_vit.finetuning.comparison.checks import check
from mae_vit.finetuning.comparison.config import CompareConfig
from mae_vit.finetuning.comparison.inputs import Inputs
from mae_vit.finetuning.comparison.plan import ComparisonPlan
from mae_vit.finetuning.comparison.report.answer import answer, first_chart
from mae_vit.finetuning.comparison.report.charts import Palette
from mae_vit.finetuning.comparison.report.page import Report
from mae_vit.finetuning.comparison.report.summary import lines_of, notes_of

MARK = "(trained by others on other data)"
START = "frozen:timm:vit_small_patch14_dinov2"
SCRATCH = rows_of("scratch", [0.29, 0.30, 0.28])
MAE = rows_of("MAE", [0.973, 0.972, 0.974], start="MAE")
# Nobody knows what it cost.
DINO = [
    replace(one, values=one.values | {"pretrain_flops": None})
    for one in rows_of("DINOv2", [0.99, 0.99, 0.99], start=START)
]


def plan(config, folder) -> ComparisonPlan:
    return ComparisonPlan(config, folder, folder / "out")


def answer_of(*groups):
    rows = [row for group in groups for row in group]
    config = config_of(rows)
    return answer(config, lines_of(config, rows))


def test_it_is_marked_wherever_it_is_named(tmp_path):
    rows = [*SCRATCH, *MAE, *DINO]
    config = config_of(rows)
    entries = [{"name": "DINOv2", "config": "x.yaml", "start": START, "modes": ["knn"]}]
    config = config.model_copy(
        update={"entries": [*config.entries[:2], *(type(config.entries[0])(**entry) for entry in entries)]}
    )
    report, lines = Report(plan(config, tmp_path), rows, []), lines_of(config, rows)
    page, text = report.to_html(), report.to_markdown()
    chart, _ = first_chart(config, rows, lines, Palette([entry.name for entry in config.entries]))
    for shown in (page, text, chart):
        assert MARK in shown
    marked = re.sub(re.escape(f"DINOv2 {MARK}"), "", page)
    # What is left is the note below the table, which says more.
    assert re.findall(r"DINOv2.{12}", marked) == ["DINOv2: trained by"] * marked.count("DINOv2")
    assert notes_of(lines) == [
        "DINOv2: trained by others on other data: which images and labels they were is not known."
    ]


def test_the_sentence_is_about_ours_and_names_it_last():
    sentence = answer_of(SCRATCH, MAE, DINO)
    assert sentence.startswith("With 200 labels, MAE reaches 97.3 %")
    assert f"; DINOv2 {MARK} is better still, at 99.0 % (3 seeds)." in sentence
    assert answer_of(SCRATCH, DINO).startswith(f"With 200 labels, DINOv2 {MARK} reaches 99.0 %")
    assert f"above DINOv2 {MARK} (50.0 %)" in answer_of(rows_of("DINOv2", [0.5] * 3, start=START), MAE)


def config_with(entry: dict, **shared) -> CompareConfig:
    config = str(ROOT / "configs" / "finetune" / "linear_probe_cifar_tiny.yaml")
    content = {"run": {"name": "x"}, "data": {"path": "data"}, "set": shared, "reference": "it"}
    return CompareConfig.model_validate(
        {**content, "modes": ["knn"], "entries": [{"name": "it", "config": config, **entry}]}
    )


def test_it_keeps_its_own_size_and_pooling_whatever_all_rows_are_given(tmp_path):
    file = write_backbone(tmp_path / "dinov2", "dinov2")
    shared = {"model.img_size": 8, "model.in_chans": 1, "finetune.pool": "mean", "finetune.neighbors": 5}
    config = config_with({"start": f"frozen:{file}"}, **shared)
    shared_settings = plan(config, tmp_path)
    check(shared_settings)
    (cell,) = shared_settings.cells
    assert "finetune.neighbors=5" in cell.run.command()
    assert not [word for word in cell.run.command() if word.startswith(("model.", "finetune.pool"))]
    assert cell.fixed  # no seed makes a difference
    own = config_with({"start": f"frozen:{file}", "set": {"model.img_size": 42}}, **shared)
    (cell,) = plan(own, tmp_path).cells
    assert "model.img_size=42" in cell.run.command()
    cost = shared_settings.cost_before(config.entries[0])
    assert (cost.images_seen, cost.flops) == (None, None)


def test_to_train_it_is_refused_with_its_name(tmp_path):
    file = write_backbone(tmp_path / "dinov2", "dinov2")
    config = config_with({"start": f"frozen:{file}", "modes": ["finetune"]})
    with pytest.raises(InputError, match=r'entry "it": frozen:.* never trained here: give finetune.mode=knn'):
        check(plan(config, tmp_path))


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
        of_others = line["entry"] in ("DINOv2", "ConvNeXt")
        assert line["start_origin"] == ("trained by others on other data" if of_others else "")
        assert line["start"].startswith("frozen:") == of_others
        assert (line["pretrain_flops"] == "") == of_others
        assert line["labels_seen_by_start"] == ("others" if line["entry"] == "supervised" else "")
        assert 0 <= float(line["test_top1"]) <= 1
    text = (out / "report.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert sum(f"DINOv2 {MARK}" in line for line in rows) >= 2
    assert not re.search(r"(DINOv2|ConvNeXt)(?! \(trained|: trained)", text)
    (place,) = [line["run"] for line in table if (line["entry"], line["mode"]) == ("DINOv2", "knn")]
    summary = json.loads((out / place / "summary.json").read_text())
    assert summary["start_origin"] == "trained by others on other data"
