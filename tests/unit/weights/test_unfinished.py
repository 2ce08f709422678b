"""Commands that take weights say that the run of the weights is not finished."""

import json
import shutil

import pytest
from helpers.commands import SMALL_PRETRAIN
from helpers.embedding import write_folder
from helpers.export import mae_run

from mae_vit.cli.main import main
from mae_vit.core.errors import InputError
from mae_vit.pretraining.command import main as pretrain
from mae_vit.training.checkpoints.format import list_checkpoints, step_of
from mae_vit.weights.read import read_weights


@pytest.fixture
def photos(tmp_path):
    write_folder(tmp_path / "photos")
    return tmp_path / "photos"


@pytest.fixture
def unfinished(tmp_path):
    run = tmp_path / "run"
    mae_run(run)
    (run / "summary.json").write_text(json.dumps({"status": "interrupted", "total_steps": 1815}))
    return run


def test_export_and_embed_say_so_once(unfinished, photos, tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    assert main(["export", str(unfinished), "--to", "timm", *out]) == 0
    exported = capsys.readouterr().err
    assert main(["embed", str(unfinished), str(photos), "--out", str(tmp_path / "x")]) == 0
    for output in (exported, capsys.readouterr().err):
        assert output.count(f"note: {unfinished} is not finished: its weights are of step ") == 1
        assert " of 1,815\n" in output


def test_the_page_of_an_inspection_says_so(unfinished, photos, tmp_path):
    out = tmp_path / "inspected"
    words = ["inspect", str(unfinished), "--data", str(photos), "--images", "4", "--out", str(out)]
    assert main(words) == 0
    assert "(its weights are of step " in (out / "index.html").read_text()


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A run that keeps its first checkpoint and its last."""
    run = tmp_path_factory.mktemp("trained") / "run"
    words = ["mae_digits", f"data.path={digits}", f"run.dir={run}", *SMALL_PRETRAIN]
    assert pretrain([*words, "checkpoint.every_steps=1000"]) == 0
    return run


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


@pytest.mark.parametrize(
    ("harm", "asked", "expected"),
    [
        (lambda run, last: shutil.rmtree(last), "", "lacks its checkpoint {last}: copy the folder again"),
        (
            lambda run, last: cut(last / "parameters.safetensors"),
            "",
            "has one whole checkpoint alone, of step 0: ",
        ),
        (lambda run, last: None, "checkpoints", "neither checkpoints nor an encoder.safetensors: give {run}"),
        (
            lambda run, last: None,
            "checkpoints/{last}/exp_avg.safetensors",
            "is a part of a checkpoint, and holds no weights: give {run}",
        ),
    ],
    ids=["half copied", "damaged", "inner folder", "optimizer's state"],
)
def test_parts_of_a_run_are_named_for_what_they_are(trained, tmp_path, harm, asked, expected):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    first, last = list_checkpoints(run / "checkpoints")
    assert step_of(first) == 0
    harm(run, last)
    with pytest.raises(InputError) as error:
        read_weights(str(run / asked.format(last=last.name)))
    assert expected.format(run=run, last=last.name) in str(error.value)
