"""The sentence of a run's page: its state, and what its curves say, alone or beside the reference."""

import json

import pytest
from helpers.commands import lines_of
from unit.pretraining.report.run_files import change, page_of, refer_to

from mae_vit.pretraining import reference_curves
from mae_vit.pretraining.report.page import write_page
from mae_vit.pretraining.report.run_record import read_run
from mae_vit.pretraining.report.verdict import compare, verdict


@pytest.mark.parametrize(
    ("status", "begin"),
    [
        ("running", "Running, step 4 of 6 when this page was written: "),
        ("interrupted", "Interrupted after saving at step 4 of 6 (the same command resumes): "),
        ("failed", "Failed at step 4 of 6: "),
    ],
)
def test_each_state_is_named(run_folder, status, begin):
    lines = lines_of(run_folder)[:4]
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 5, "lo')
    change(run_folder / "summary.json", status=status, steps=4)
    assert begin + "the training loss" in page_of(run_folder)


def test_a_run_without_held_out_images(run_folder):
    lines = [
        {name: value for name, value in line.items() if name not in ("heldout", "probe")}
        for line in lines_of(run_folder)
    ]
    lines[2]["loss"] = None  # fp16 has skipped it
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = page_of(run_folder)
    assert "; no images were held out." in page
    assert "held-out images:" not in page
    change(run_folder / "summary.json", status="interrupted")
    assert "; no held-out images were evaluated so far." in page_of(run_folder)


@pytest.mark.parametrize(("last", "warned"), [(1.4, True), (2.9, False)])
def test_a_collapse_of_features_is_warned_of(run_folder, last, warned):
    lines = lines_of(run_folder)
    measured = [line for line in lines if "heldout" in line]
    for line in measured:
        line["heldout"]["rankme"] = 5.5
    measured[-1]["heldout"]["rankme"] = last
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sentence = verdict(read_run(run_folder), None)
    assert f"rankme fell from 5.5 to {last:.4g}" in sentence
    assert ("near 1: a collapse" in sentence) == warned


def reference_of(folder, curves, *, factor=1.0):
    """Reference curves of one seed: this run's, its loss times `factor`."""
    record = read_run(folder)
    measured = reference_curves.curves_of(record.lines, 6)
    by_name = {
        name: {
            "steps": curve.steps.tolist(),
            "values": [(curve.values * (factor if name == "loss" else 1)).tolist()],
            "lines": curve.lines.tolist(),
        }
        for name, curve in measured.items()
    }
    recipe = reference_curves.recipe_of(record.config)
    curves.mkdir()
    (curves / "tiny.json").write_text(
        json.dumps({"seeds": [0], "total_steps": 6, "recipe": recipe, "curves": by_name})
    )


def test_the_verdict_is_against_the_reference(run_folder, tmp_path, monkeypatch):
    reference_of(run_folder, tmp_path / "normal")
    refer_to(monkeypatch, tmp_path / "normal")
    record = read_run(run_folder)
    comparison = compare(record)
    said = verdict(record, comparison)
    assert said.startswith("Finished, 6 steps: normal, within the band of tiny (1 seed) at all ")
    assert said.endswith(f" {comparison.compared} places up to step 6.")
    assert "band of tiny</text>" in write_page(record, comparison)
    reference_of(run_folder, tmp_path / "odd", factor=0.5)
    refer_to(monkeypatch, tmp_path / "odd")
    said = verdict(record, compare(record))
    first = lines_of(run_folder)[0]["loss"]
    assert f"not normal, loss {first:.4g} at step 1 is outside of " in said
    assert said in page_of(run_folder)
    # Another recipe is compared with nothing, and so is another length.
    config = run_folder / "config.yaml"
    whole = config.read_text()
    for key, other in (("weight_decay: 0.05", "weight_decay: 0.5"), ("mask_ratio: 0.75", "mask_ratio: 0.5")):
        assert key in whole
        config.write_text(whole.replace(key, other))
        assert compare(read_run(run_folder)) is None
    assert "Finished, 6 steps: the training loss" in page_of(run_folder)
    config.write_text(whole)
    assert compare(read_run(run_folder)) is not None
    change(run_folder / "summary.json", total_steps=7)
    assert compare(read_run(run_folder)) is None
