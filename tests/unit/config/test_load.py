"""Bad configs: one line that names the key, the value and the nearest valid choice."""

from pathlib import Path

import pytest
from helpers.commands import ROOT

from mae_vit.config.load import load_config
from mae_vit.core.errors import InputError
from mae_vit.objectives.config import MaskedPatchConfig
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.command import main

CONFIG = ROOT / "configs" / "pretrain" / "mae_digits.yaml"

# What is refused in one line.
BAD = [
    *(
        "model.img_sise=8",
        "optimizer.lr=1",
        "train.epoch=3",
        "train={epochs: 3}",
        "epochs=3",
        "batch_size=32",
    ),
    *("augment.crop=none", "train.lr=1e-3", "name=x", "corrupt_ratio=0.5", "zzz=1", "train.zzz=1"),
    # What other trainers call it.
    *("gpus=1", "trainer.accelerator=gpu", "run.device=cuda"),
    *("objective.corrupt_ratio=0.5", "objective.name=null", "objective=mae", "train.epoks=null"),
    *("run.hang_timeout_s=", "run.name=a/b", "train.effective_batch_size=many", "train.steps=2026-11-26"),
    *("data.augment.flip=no", "objective.mask_ratio=1.0", "objective.decode_ratio=1.1", "objective.name=may"),
    *("model.name=tiny-cifer", "optim.name=AdamW", "model.patch_size=3", "model.img_size=[8, 8, 8]"),
    *("optim.blr=1e-4 optim.lr=1e-4", "optim.lr=null", "train.steps=5 train.epochs=5"),
    *("data.augment.pad_px=2", "data.augment.num_ops=3", "data.augment.policy=randaug"),
    "data.augment.magnitude_std=0 data.augment.policy=autoaugment_cifar",
    "data.augment.policy=randaugment data.augment.magnitude=11",
    *("data.source=tar data.memory_limit_gib=1", "data.leave_out_draws=3", "data.lanes=8"),
    # The preset neither crops nor flips.
    "objective={name: contrastive}",
    *("data.order=blocks data.lanes=10", "data.order=blocks train.effective_batch_size=3", "data.repeats=3"),
    *("data.order=blocks data.repeats=4 data.lanes=64", "optim.betas=[0.9, 1.5]"),
    *("optim.name=sgd optim.betas=[0.9,0.9]", "guard.max_rollbacks=0 guard.skip_steps=5"),
    *("optim.name=lars optim.betas=null train.zero_stage=1", "optim.name=muon train.zero_stage=1"),
    *("train.zero_stage=3 train.compile=true", "train.compile=yes", "train.zero_stage=2 train.engine=torch"),
    *("optim.lr=.inf", "model.img_size=(32,32)", "model.img_size=32,32", "model.img_size=8x8"),
    *("monitor.trackers=wandb", "monitor.trackers=[wandb,wandb]", "monitor.trackers=[wand]"),
    *("data.normalize=none", "model.family=network"),
    *("model.depth=None", "nonsense", "model.name.deeper=1", "train={"),
]


@pytest.mark.parametrize("override", BAD)
def test_bad_override_is_one_readable_line(override, said):
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, CONFIG, override.split(" ") if override.count("=") > 1 else [override])
    said(caught)
    message = str(caught.value)
    assert "\n" not in message
    assert str(CONFIG) not in message
    assert message.startswith(("command line: ", "override ")), message


@pytest.mark.parametrize(
    "text",
    [
        *("", "- a\n- b", "model: [", "model: 3", "!!python/object/apply:os.system ['touch pwned']", "\x00"),
        *("a: &x [*x]", "data.path: x\nmodel.name: S", "model: {name: S, encoder.depth: 2}"),
        "train: {epochs: 3, epochs: 4}",
    ],
)
def test_bad_files(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    said(message_of(path))
    assert not Path("pwned").exists()


def message_of(path: Path, *overrides: str, **options) -> str:
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, path, overrides, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_that_is_not_there_names_one_that_is(monkeypatch, tmp_path, said):
    monkeypatch.chdir(ROOT)
    mine = tmp_path / "photos.yaml"
    mine.write_text("")
    # The last is a folder that is there: what it may be meant for.
    for path in ("mae_digit", tmp_path / "photo.yaml", tmp_path / "else.yaml", "x" * 300, tmp_path):
        said(message_of(Path(path)))
    (tmp_path / "config.yaml").write_text("")
    said(message_of(tmp_path))


def test_a_problem_is_blamed_on_the_file_or_on_the_command_line(write_config):
    path = write_config(train={"epoch": 3})
    in_file = message_of(path)
    assert in_file.startswith(f"{path}: ")
    assert '"train.epoch"' in in_file
    assert message_of(path, "run.seed=3") == in_file
    both = message_of(path, "modle.name=S").split("; ")
    assert in_file in both
    assert len(both) == 2
    assert any(line.startswith("command line: ") and '"modle"' in line for line in both)
    # Right in the file, wrong together.
    assert message_of(CONFIG, "train.engine=torch", "train.zero_stage=1").startswith("command line: train: ")


def test_five_mistakes_are_five_lines(write_config, capsys, said):
    path = write_config(train={"epohcs": 3}, model={"depth": -1})
    overrides = ["epochs", "train.steps=many", "train.effective_batch_size.x=1"]
    assert main(["--config", str(path), *overrides]) == 2
    said(capsys.readouterr().err)
    many = [f"train.{letter}=1" for letter in "abcdefghijklm"]
    with pytest.raises(InputError, match="3 mistakes more") as error:
        load_config(PretrainConfig, CONFIG, many)
    assert len(error.value.lines) == 11


def test_another_objective_on_the_command_line_drops_the_files_options():
    path = ROOT / "configs" / "pretrain" / "mae_cifar_tiny.yaml"
    config = load_config(PretrainConfig, path, ["objective.name=masked_patch", "objective.corrupt_ratio=0.4"])
    assert config.objective.model_dump() == {
        **MaskedPatchConfig(name="masked_patch").model_dump(),
        "corrupt_ratio": 0.4,
    }
    # What the command line itself gives is not dropped.
    given = message_of(path, "objective.name=masked_patch", "objective.mask_ratio=0.5")
    assert "objective.mask_ratio" in given


def test_a_part_of_an_objective_names_its_own_keys():
    joint = ["objective.name=joint", "objective.mae.mask_ratio=0.5"]
    assert load_config(PretrainConfig, CONFIG, joint).objective.mae.mask_ratio == 0.5
    assert '"objective.mae.mask_ratio"?' in message_of(CONFIG, joint[0], "objective.mae.mask_ration=0.5")
    assert '"objective.mae.decoder_depth"?' in message_of(CONFIG, joint[0], "decoder_depth=3")


def test_the_config_of_a_run_folder_imports_no_plug_in(write_config, tmp_path):
    mark, plugin = tmp_path / "mark", tmp_path / "theirs.py"
    plugin.write_text(f"open({str(mark)!r}, 'w')\n")
    path = write_config(run={"plugins": [str(plugin)]})
    assert load_config(PretrainConfig, path, imports_plugins=False).run.plugins == [str(plugin)]
    assert not mark.exists()
    # What only a plug-in knows is a mistake that names it.
    assert str(plugin) in message_of(path, "objective={name: theirs}", imports_plugins=False)
    assert not mark.exists()
    load_config(PretrainConfig, path)
    assert mark.exists()
