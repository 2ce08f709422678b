"""A finished run is known again by what it was made of."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.images import encoded, picture, write_files

from mae_vit.core.errors import InputError
from mae_vit.data.shards.dataset_json import read_dataset
from mae_vit.finetuning.comparison.inputs import changed_settings, describe_inputs, difference
from mae_vit.finetuning.comparison.jobs import Job, unfinished


def content_of_config(folder: Path) -> dict[str, Any]:
    return {"model": {"init": str(folder / "init")}, "train": {"epochs": 3}}


@pytest.fixture
def job(digits, tmp_path) -> Job:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "encoder.safetensors").write_bytes(b"weights")
    shutil.copytree(tmp_path / "start", tmp_path / "init")
    (tmp_path / "x.yaml").write_text("# before\n" + json.dumps(content_of_config(tmp_path)))
    data = shutil.copytree(digits, tmp_path / "data")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text('{"status": "done"}')
    start = str(tmp_path / "start")
    teacher = shutil.copytree(tmp_path / "start", tmp_path / "teacher")
    words = ("--ckpt", start, "a=1", f"finetune.teacher={json.dumps(str(teacher))}")
    job = Job("x", folder, ("x.py",), tmp_path / "x.yaml", words, str(data), start)
    job.begin()
    return job


def change_config(job: Job) -> None:
    job.config.write_text("train: {epochs: 4}\n")


def change_weights(job: Job) -> None:
    (Path(job.start) / "encoder.safetensors").write_bytes(b"others!")


def change_teacher(job: Job) -> None:
    (Path(job.start).with_name("teacher") / "encoder.safetensors").write_bytes(b"others!")


def change_init(job: Job) -> None:
    (Path(job.start).with_name("init") / "encoder.safetensors").write_bytes(b"others!")


def change_data(job: Job) -> None:
    path = Path(job.data) / "dataset.json"
    described = json.loads(path.read_text())
    described["splits"]["test"]["shards"][0]["sha256"] = "0" * 64
    path.write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_config, "content of its config"),
        (change_weights, "start"),
        (change_teacher, "finetune.teacher"),
        (change_init, "model.init"),
        (change_data, "of its data"),
    ],
)
def test_a_run_of_something_else_is_not_taken_for_this_one(job, change, said):
    assert job.is_done()
    change(job)
    with pytest.raises(InputError, match=f"was run with another .*{said}"):
        job.is_done()


@pytest.mark.parametrize("status", ["interrupted", "running", "failed", None])
def test_a_run_of_something_else_without_a_result_is_replaced(job, status):
    """Also one whose folder was deleted, as a message says: its record beside it decides nothing."""
    (job.folder / "summary.json").write_text(json.dumps({"status": status}))
    job.begin()
    assert job.folder.exists()  # the same run: it resumes
    change_config(job)
    if status is None:
        shutil.rmtree(job.folder)
    assert unfinished([job]) == [job]
    job.begin()
    assert not job.folder.exists()
    assert job.folder.with_name("run.1").exists() == (status is not None)
    shutil.copytree(job.folder.with_name("start"), job.folder)
    job.begin()
    assert job.folder.exists()


def test_all_runs_of_something_else_are_named_at_once(job):
    second = replace(job, name="second", folder=job.folder.with_name("second"))
    shutil.copytree(job.folder, second.folder)
    shutil.copy(job.folder.with_name("run.job.json"), second.folder.with_name("second.job.json"))
    third = replace(job, name="third", folder=job.folder.with_name("third"))
    assert unfinished([job, second, third]) == [third]
    change_config(job)
    with pytest.raises(InputError, match=f"delete {job.folder} to .*the same holds of {second.folder}$"):
        unfinished([job, third, second])


def test_what_makes_no_difference(job):
    # Comments, another place for the file, a further split, and what is gone: unknown.
    moved = job.config.with_name("moved.yaml")
    moved.write_text("# after\n" + json.dumps(content_of_config(job.config.parent), indent=2))
    path = Path(job.data) / "dataset.json"
    described = json.loads(path.read_text())
    described["splits"]["val"] = described["splits"]["test"]
    path.write_text(json.dumps(described))
    assert "val" in read_dataset(Path(job.data)).splits
    recorded = json.loads((job.folder.with_name("run.job.json")).read_text())
    now = describe_inputs(job.arguments, moved, job.start, job.data)
    assert difference(recorded, now) is None
    gone = describe_inputs(job.arguments, moved, str(job.folder / "none"), str(job.folder / "none"))
    assert (gone["start"], gone["data"]) == (None, None)
    assert difference(recorded, gone) is None
    assert difference(["a=1"], now) == "settings"
    assert changed_settings(["a=1"], now) == ""
    assert difference(recorded, {**now, "settings": ["a=2"]}) == "settings"


def test_changed_settings_are_named_without_secrets():
    before = {"settings": ["--ckpt", "runs/a", 'data.path="https://me:token@host/x?sig=one"', "seed=1"]}
    after = {"settings": ["--ckpt", "runs/b", 'data.path="https://me:token@other/x?sig=two"', "seed=1"]}
    assert changed_settings(before, after) == (
        " (then --ckpt runs/a data.path=https://host/x, now --ckpt runs/b data.path=https://other/x)"
    )
    # Nothing that may be named differs.
    other = {
        "settings": [
            before["settings"][2].replace("one", "two") if "sig" in one else one for one in before["settings"]
        ]
    }
    assert changed_settings(before, other) == ""


def test_data_that_are_prepared_are_looked_for_in_the_runs_own_cache(tmp_path):
    write_files(tmp_path / "photos", {f"a/{n}.jpg": encoded(picture(n)) for n in range(6)})
    cache, config = tmp_path / "cache", tmp_path / "x.yaml"
    config.write_text("{}")
    words = (f"data.cache_dir={json.dumps(str(cache))}",)
    assert describe_inputs(words, config, None, str(tmp_path / "photos"))["data"]
    assert cache.is_dir()
