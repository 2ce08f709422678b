"""Any step of a run is shown as it was."""

import json

import pytest
import torch
from helpers.commands import csv_rows, one_line
from PIL import Image

from mae_vit.cli.main import main
from mae_vit.pretraining.replay import replay
from mae_vit.training.engines.torch_engine import TorchEngine


@pytest.fixture
def seen(monkeypatch):
    """All micro-batches of runs in this process."""
    forward, batches = TorchEngine.forward, []

    def remember(self, batch):
        batches.append(batch)
        return forward(self, batch)

    monkeypatch.setattr(TorchEngine, "forward", remember)
    return batches


@pytest.mark.parametrize(
    "objective",
    ["objective.name=mae", "objective={name: joint, mae: {decoder_embed_dim: 32, decoder_num_heads: 2}}"],
)
def test_images_crops_and_masks_are_those_of_the_step(call, tmp_path, seen, objective):
    options = ["data.augment.crop=random_resized", "train.batch_size_per_device=64"]
    assert call(objective, *options) == 0
    for step in (1, 5):
        replayed = replay(tmp_path / "run", step=step)
        parts = seen[2 * step - 2 : 2 * step]
        assert torch.equal(replayed.batch.images, torch.cat([part.images for part in parts]))
        assert [sample["sample"] for sample in replayed.samples] == torch.cat(
            [part.keys.index for part in parts]
        ).tolist()
    masked = next(row.images for row in replayed.pictures if row.label.endswith("masked"))
    # A quarter of the patches is visible, and as it was.
    same = (masked == replayed.batch.images / 255).flatten(1).float().mean(dim=1)
    assert 0.2 < same.mean() < 0.5
    assert replayed.weights_step == 4


def test_the_command_writes_a_picture_and_names(call, tmp_path, capsys):
    assert call("checkpoint.keep_last=9") == 0
    capsys.readouterr()
    run = tmp_path / "run"
    assert main(["replay", str(run), "--step", "3"]) == 0
    said = capsys.readouterr().out
    assert "step 3, which is data step 2, in epoch 0 (" in said
    assert "those of step 2" in said
    path = run / "replay" / "step-00000003-rank-0.png"
    assert Image.open(path).width == 16 * (64 + 2)
    names = csv_rows(path.with_suffix(".csv"))
    assert len(names) == 128
    assert len({name["key"] for name in names}) == 128
    assert main(["replay", str(run), "--data-step", "2"]) == 0
    assert csv_rows(run / "replay" / "data-step-00000002-rank-0.csv") == names


def test_a_rank_has_its_part(call, tmp_path):
    assert call() == 0
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "world_size": 2}))
    whole = [replay(tmp_path / "run", step=2, rank=rank) for rank in range(2)]
    assert [len(part.samples) for part in whole] == [64, 64]
    environment.write_text(json.dumps({**json.loads(environment.read_text()), "world_size": 1}))
    alone = replay(tmp_path / "run", step=2)
    assert whole[0].samples + whole[1].samples == alone.samples
    assert torch.equal(torch.cat([part.batch.images for part in whole]), alone.batch.images)


def test_what_there_is_not_is_one_line(call, digits, tmp_path, capsys):
    assert call() == 0
    capsys.readouterr()
    run = tmp_path / "run"

    def line(*words) -> str:
        assert main([*map(str, words)]) == 2
        return one_line(capsys).removeprefix("error: ")

    assert line("replay", run, "--step", 7).startswith("--step 7: ")
    assert line("replay", run, "--step", 0).startswith("--step 0: ")
    assert line("replay", run, "--step", 2, "--rank", 1).startswith("--rank 1: ")
    assert line("replay", tmp_path, "--step", 1).startswith(f"{tmp_path} is not a run folder")
    assert line("replay", f"{run}s", "--step", 1) == f'{run}s does not exist; did you mean "{run}"?'
    # Data that are elsewhere are named as what the run recorded.
    config = run / "config.yaml"
    config.write_text(config.read_text().replace(f"path: {digits}", "path: data/mine"))
    for words in (["replay", "--step", "1"], ["inspect"]):
        error = line(*words, run)
        assert "data.path=data/mine" in error
        assert ("--data DIR" in error) == (words == ["inspect"])
