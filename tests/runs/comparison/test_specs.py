"""The identity of a run: what makes it another, what does not, and what a folder of an earlier plan counts for."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers.comparison import plan_of
from helpers.damage import copy_of, description
from helpers.images import encoded, picture, write_files

from mae_vit.cli.main import main
from mae_vit.comparison.foresee import check_pretraining
from mae_vit.comparison.inputs import Inputs
from mae_vit.comparison.main import check_data, compare
from mae_vit.comparison.plan import ComparisonPlan
from mae_vit.comparison.protocol import (
    describe_changes,
    keep_protocol,
    read_protocol,
    recorded_inputs,
)
from mae_vit.config import plugins
from mae_vit.config.command_line import Arguments
from mae_vit.core.errors import InputError
from mae_vit.training.outputs.run_folder import RUN_ID, RunFolder

TUNE = [{"optim.lr": 1e-3}, {"optim.lr": 2e-3}]


@pytest.fixture
def made(digits, tmp_path) -> Path:
    """Configs, weights and data of a comparison, to be changed."""
    for name in ("given", "init"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "encoder.safetensors").write_bytes(b"weights")
    (tmp_path / "x.yaml").write_text("# before\ntrain: {epochs: 3}\n")
    (tmp_path / "y.yaml").write_text(json.dumps({"model": {"init": str(tmp_path / "init")}}))
    copy_of(digits, tmp_path / "data")
    return tmp_path


def plan_in(folder: Path, recorded=None, **values) -> ComparisonPlan:
    entries = [
        {"name": "scratch"},
        {"name": "given", "start": str(folder / "given"), "tune": [{"optim.lr": 3e-3}, {"optim.lr": 4e-3}]},
        {"name": "MAE", "start": "MAE"},
    ]
    settings = {"data": {"path": str(folder / "data")}, "seeds": [0], "tune": TUNE}
    settings |= {"pretrain": {"MAE": {"config": "y.yaml"}}, **values}
    plan = plan_of(folder, entries, **settings)
    plan.inputs = Inputs(recorded or {})
    return plan


def ids_of(plan: ComparisonPlan) -> dict[str, str]:
    return {run.name: run.id for run in plan.runs}


def rewrite(path: Path) -> None:
    path.write_bytes(b"others!")


def change_split(folder: Path, split: str) -> None:
    with description(folder / "data") as described:
        described["splits"][split]["shards"][0]["sha256"] = "0" * 64


def add_split(folder: Path) -> None:
    with description(folder / "data") as described:
        described["splits"]["val"] = described["splits"]["test"]


def scale_bands(folder: Path, high: float) -> None:
    """Describes the digits as one band of another scale."""
    zero, one = [0.0], [1.0]
    percentiles = dict.fromkeys(("1", "2", "50", "98", "99"), one)
    with description(folder / "data") as described:
        described["bands"] = {
            **{
                "names": ["gray"],
                "dtype": "uint8",
                "nodata_share": zero,
                "min": zero,
                "max": one,
                "exact": True,
            },
            **{"percentiles": percentiles, "scale": {"low": zero, "high": [high], "by": "given"}},
        }


def name_masks(folder: Path, ids: list[int]) -> None:
    """Gives the numbers in masks another meaning."""
    with description(folder / "data") as described:
        described["segmentation"] = {"classes": ["ground", "thing"], "ids": ids, "ignore": 255}
        for split in described["splits"].values():
            split["masks"] = {"shares": [0.5, 0.5], "ignored": 0.0}


@pytest.mark.parametrize(
    ("change", "other_rows"),
    [
        (
            lambda at: (at / "x.yaml").write_text("train: {epochs: 4}\n"),
            {"scratch", "given", "MAE"},
        ),
        (lambda at: rewrite(at / "given" / "encoder.safetensors"), {"given"}),
        # All that begins from a pretraining depends on what that begins from.
        (lambda at: rewrite(at / "init" / "encoder.safetensors"), {"pretrain MAE", "MAE"}),
        (lambda at: change_split(at, "train"), {"scratch", "given", "pretrain MAE", "MAE"}),
        (lambda at: change_split(at, "test"), {"scratch", "given", "MAE"}),
        # Comments and further splits.
        (lambda at: (at / "x.yaml").write_text("# after\ntrain: {epochs: 3}\n"), set()),
        (add_split, set()),
        (lambda at: scale_bands(at, 200.0), {"scratch", "given", "pretrain MAE", "MAE"}),
        # What masks mean makes no difference to classes.
        (lambda at: name_masks(at, [0, 1]), set()),
    ],
)
def test_a_run_is_another_where_what_it_reads_is(made, change, other_rows):
    before = ids_of(plan_in(made))
    change(made)
    after = ids_of(plan_in(made))
    changed = {name for name, identity in before.items() if after[name] != identity}
    rows = {name.removeprefix("tune ").partition(",")[0] for name in changed}
    assert rows == other_rows


def test_a_run_is_another_where_the_numbers_in_shards_mean_something_else(made):
    def ids(change, value) -> dict[str, str]:
        change(made, value)
        plan = plan_in(made, modes=["segment"])
        found = ids_of(plan)
        (made / "data").rename(made / "away")
        assert ids_of(plan_in(made, plan.digests, modes=["segment"])) == found
        (made / "away").rename(made / "data")
        return found

    masks = [ids(name_masks, numbers) for numbers in ([0, 1], [1, 7])]
    assert {name.partition(" ")[0] for name in masks[0] if masks[0][name] == masks[1][name]} == {"pretrain"}
    bands = [ids(scale_bands, high) for high in (100.0, 200.0)]
    assert not set(bands[0].values()) & set(bands[1].values())


def test_the_split_that_counts_is_the_one_that_is_tested(made):
    """A split without labels is not."""
    add_split(made)
    with description(made / "data") as described:
        described["splits"]["test"]["class_counts"] = [0] * 10
    before, digests = ids_of(plan_in(made)), plan_in(made).digests
    change_split(made, "test")
    assert ids_of(plan_in(made)) == before
    change_split(made, "val")
    assert ids_of(plan_in(made)) != before
    shutil.rmtree(made / "data")
    assert ids_of(plan_in(made, digests)) == before


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({"set": {"train.epochs": 5}}, ("scratch", "tune scratch")),
        # A longer grid makes other cells, by the same tuning runs.
        ({"tune": [*TUNE, {"optim.lr": 5e-3}]}, ("scratch",)),
        ({"set": {"data.workers": 3}}, ()),
        ({"parallel": 1}, ()),
    ],
)
def test_a_run_is_another_where_its_settings_are(made, values, changed):
    def ids(**values) -> dict[str, str]:
        return ids_of(plan_of(made, data={"path": str(made / "data")}, seeds=[0], **values))

    before, after = ids(tune=TUNE), ids(**{"tune": TUNE, **values})
    assert {name.partition(",")[0] for name, identity in before.items() if after[name] != identity} == set(
        changed
    )


def test_a_run_is_another_where_its_plug_in_is(made, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugin, recorded = made / "plugin_of_test_specs.py", {}

    def ids() -> dict[str, str]:
        monkeypatch.setattr(plugins, "_loaded", {})  # as in another process
        plan = plan_in(made, recorded, set={"run.plugins": [str(plugin)]})
        found = ids_of(plan)
        recorded.update(plan.digests)
        return found

    plugin.write_text("")
    before = ids()
    plugin.write_text("# changed")
    after = ids()
    changed = {name.partition(",")[0] for name, identity in before.items() if after[name] != identity}
    assert changed == {"tune scratch", "scratch", "tune given", "given", "tune MAE", "MAE"}
    # A report needs none.
    plugin.unlink()
    assert ids() == after


def test_a_run_is_done_once_its_own_summary_says_so(made, monkeypatch):
    plan = plan_in(made)
    first, second = (cell.run for cell in plan.cells[:2])
    assert first.folder == made / "out" / "scratch" / first.id[:8]
    monkeypatch.setenv(RUN_ID, first.id)
    for run, status, done in ((first, "running", False), (first, "done", True), (second, "done", False)):
        run.folder.mkdir(parents=True, exist_ok=True)
        RunFolder(run.folder).write_summary(status, {})
        assert run.is_done() == done


def test_inputs_that_are_gone_are_those_that_were_recorded(made):
    plan = plan_in(made)
    before = ids_of(plan)
    for name in ("data", "given"):
        shutil.rmtree(made / name)
    (made / "x.yaml").unlink()
    assert ids_of(plan_in(made, plan.digests)) == before
    assert ids_of(plan_in(made)) != before


def test_changes_after_test_results_are_reported(made):
    def keep(**values) -> ComparisonPlan:
        plan = plan_in(made, **values)
        plan.folder.mkdir(exist_ok=True)
        keep_protocol(plan, precision="fp32")
        return plan

    assert describe_changes(keep()) == []
    tested = keep(reference="given").cells[0].run.folder
    tested.mkdir(parents=True)
    (tested / "test_reads.json").write_text("[]")
    assert describe_changes(keep(reference="given")) == []
    (change,) = describe_changes(keep(reference="MAE"))
    assert change.endswith(", 1 run): reference.")
    rewrite(made / "given" / "encoder.safetensors")
    assert describe_changes(keep(reference="MAE"))[-1].endswith(f": weights {made / 'given'}.")
    change_split(made, "train")
    images = f": data.path: {made / 'data'} changed (train)."
    assert [change.endswith(images) for change in describe_changes(keep(reference="MAE"))][-2:] == [
        True,
        False,
    ]
    # The run that was tested is none of the plan any more.
    *_, change, earlier = describe_changes(keep(reference="MAE", set={"train.epochs": 7}))
    assert change.endswith(": set.train.epochs.")
    assert earlier.endswith("(scratch).")
    assert "earlier settings" in earlier
    protocol = read_protocol(made / "out")
    assert len(protocol["plans"]) == 6
    assert recorded_inputs(protocol)[f"weights {made / 'given'}"]
    # As an earlier version wrote the same plan.
    last = protocol["plans"][-1]
    last["plan"], last["settings"]["entries"][0]["gone"] = "", None
    (made / "out" / "protocol.json").write_text(json.dumps(protocol))
    assert describe_changes(keep(reference="MAE", set={"train.epochs": 7}))[-2:] == [change, earlier]
    assert len(read_protocol(made / "out")["plans"]) == 7


def test_data_that_were_moved_are_no_change(made):
    (made / "moved").symlink_to(made / "data")
    for path in ("data", "moved"):
        plan = plan_in(made, data={"path": str(made / path)})
        plan.folder.mkdir(exist_ok=True)
        keep_protocol(plan, precision="fp32")
        tested = plan.cells[0].run.folder
        tested.mkdir(parents=True, exist_ok=True)
        (tested / "test_reads.json").write_text("[]")
    assert not [change for change in describe_changes(plan) if "protocol" in change]
    assert len(read_protocol(plan.folder)["plans"]) == 2


def test_a_report_of_other_settings_than_those_that_ran_leaves_the_folder_as_it_is(made, said):
    def report(**values) -> ComparisonPlan:
        plan = plan_in(made, run={"name": "x", "dir": str(made / "out")}, **values)
        (made / "compare.yaml").write_text(plan.config.model_dump_json())
        before = sorted(made.rglob("*"))
        with pytest.raises(InputError) as refused:
            compare(Arguments(made / "compare.yaml", []), report=True)
        assert sorted(made.rglob("*")) == before
        said(refused)
        return plan

    plan = report(set={"train.epochs": 1})
    plan.folder.mkdir()
    keep_protocol(plan, precision="fp32")
    tested = plan.cells[0].run.folder
    tested.mkdir(parents=True)
    (tested / "test_reads.json").write_text("[]")
    report(seeds=[0, 1])
    for name in ("given", "init"):
        rewrite(made / name / "encoder.safetensors")
    (made / "x.yaml").write_text("train: {epochs: 4}")
    report(set={"train.epochs": 1})


def test_data_that_are_prepared_are_looked_for_in_the_runs_own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    write_files(tmp_path / "photos", {f"a/{n}.jpg": encoded(picture(n)) for n in range(6)})
    (tmp_path / "x.yaml").write_text("run: {seed: 0}")
    settings = {"data.path": str(tmp_path / "photos"), "data.cache_dir": str(tmp_path / "cache")}
    identity, _ = Inputs({}).identity(tmp_path / "x.yaml", settings, None, tested=True)
    train, _ = identity["data"]
    assert train
    assert (tmp_path / "cache").is_dir()
    assert not (tmp_path / "user").exists()


def test_a_run_that_was_finished_outside_of_the_comparison_is_done(made):
    outside = made / "outside"
    plan = plan_in(made, pretrain={"MAE": {"config": "y.yaml", "dir": str(outside)}})
    run = plan.pretraining["MAE"]
    outside.mkdir()
    for status, trained in (("interrupted", False), ("done", True)):
        (outside / "summary.json").write_text(json.dumps({"status": status}))
        assert run.is_done() is trained
    # Nothing tells that it is this run.
    with pytest.raises(InputError, match=r"pretrain\.MAE\.dir=null"):
        check_pretraining(plan)


def test_data_without_labels_are_refused_before_the_pretraining(tmp_path):
    write_files(tmp_path / "photos", {f"{n}.jpg": encoded(picture(n)) for n in range(6)})
    assert main(["prepare", str(tmp_path / "photos"), str(tmp_path / "data"), "--holdout", "1/3"]) == 0
    with pytest.raises(InputError, match=r"has no labels .*--labels$"):
        check_data(plan_in(tmp_path))
    shutil.rmtree(tmp_path / "data")
    assert main(["prepare", str(tmp_path / "photos"), str(tmp_path / "data")]) == 0
    with pytest.raises(InputError, match=r"no labels and no split .*--labels, and with --holdout 1/10$"):
        check_data(plan_in(tmp_path))
