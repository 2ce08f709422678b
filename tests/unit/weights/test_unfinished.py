"""Commands that take weights say that the run of the weights is not finished."""

import json

import pytest
from helpers.embedding import write_folder
from helpers.export import mae_run

from mae_vit.cli.main import main


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
    assert main(["embed", str(unfinished), str(photos), "--out", str(tmp_path / "x.npz")]) == 0
    for output in (exported, capsys.readouterr().err):
        assert output.count(f"note: {unfinished} is not finished: its weights are of step ") == 1
        assert " of 1,815\n" in output


def test_the_page_of_an_inspection_says_so(unfinished, photos, tmp_path):
    out = tmp_path / "inspected"
    words = ["inspect", str(unfinished), "--data", str(photos), "--images", "4", "--out", str(out)]
    assert main(words) == 0
    assert "(its weights are of step " in (out / "index.html").read_text()
