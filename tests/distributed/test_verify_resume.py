"""`mae-vit verify-resume`: real kills on 1 and 2 ranks, and what it says of runs that differ."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from mae_vit.cli.main import main
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining import verify_resume
from mae_vit.pretraining.verify_resume import Record, _differences

SMALL = ["model.embed_dim=32", "model.depth=1", "objective.decoder_embed_dim=32", "objective.decoder_depth=1"]


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_kills_change_nothing(tmp_path, capsys):
    assert main(["verify-resume", *SMALL, "--kills", "3", "--keep", str(tmp_path / "kept")]) == 0
    expected, *lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert re.fullmatch(r"5 runs and 3 kills take about \d+:\d\d:\d\d here", expected)
    digests = [line.split()[-1] for line in lines[:4]]
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]
    assert "images and crops are equal in 40 steps" in lines[4]
    assert lines[5].startswith("ok: ")
    assert (tmp_path / "kept" / "killed-2" / "encoder.safetensors").exists()


@pytest.fixture
def record(tmp_path):
    save_file({"a": torch.zeros(2), "b": torch.zeros(1)}, tmp_path / "encoder.safetensors")
    images = {step: [[0, 2 * step, 7], [0, 2 * step + 1, 8]] for step in range(3)}
    return Record(tmp_path, 1, "digest", {1: 0.5, 2: 0.4, 3: 0.3}, images)


def test_differences_are_named(record, tmp_path, said):
    other = tmp_path / "other"
    other.mkdir()
    save_file({"a": torch.ones(2), "b": torch.zeros(1)}, other / "encoder.safetensors")
    assert _differences(record, record) == _differences(record, record, bits=False) == []
    changed = replace(record, folder=other, weights="another", losses={**record.losses, 2: 0.4 + 1e-9})
    for text in _differences(changed, record):
        said(text)
    # On another number of ranks that is rounding.
    assert _differences(changed, record, bits=False) == []
    wrong = replace(
        record, losses={**record.losses, 2: 0.41}, images={**record.images, 2: [[0, 4, 7], [0, 6, 8]]}
    )
    for text in _differences(wrong, record, bits=False):
        said(text)


@pytest.mark.parametrize(
    ("words", "tensor", "counts"),
    [
        (["data.workers=1"], "a", True),
        (["model.drop_rate=0.1"], "a", False),
        ([], "norm.running_mean", False),
    ],
)
def test_losses_on_other_ranks_count_without_noise_and_batch_norm(
    record, digits, tmp_path, monkeypatch, words, tensor, counts
):
    def run(given, folder, ranks, chance, bar):
        workers = load_config(PretrainConfig, find_config("mae_digits"), given[1:]).data.workers
        assert workers == ("data.workers=1" in words)
        return replace(record, losses={1: 0.5, 2: 0.41, 3: 0.3}) if folder.name == "changing" else record

    monkeypatch.setattr(verify_resume, "_run", run)
    save_file({tensor: torch.zeros(2)}, tmp_path / "encoder.safetensors")
    config = find_config("mae_digits")
    problems = verify_resume.verify_resume(config, [f"data.path={digits}", *words], kills=3, folder=tmp_path)
    assert bool(problems) == counts


def test_bad_options_are_one_line(tmp_path, capsys, said):
    kept = ["--keep", str(tmp_path / "kept")]
    for words in (["--kills", "2"], ["--keep", str(tmp_path)], ["mae_digit"], ["model.nme=S", *kept]):
        assert main(["verify-resume", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        said(line)
    assert not (tmp_path / "kept").exists()
    for word in ("train.engine=deepspeed", "checkpoint.every_epochs=1"):
        with pytest.raises(InputError) as refused:
            verify_resume.verify_resume(find_config("mae_digits"), [word], kills=3, folder=tmp_path)
        said(refused)
