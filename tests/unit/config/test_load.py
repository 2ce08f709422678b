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

BAD = {
    "model.img_sise=8": 'command line: unknown key "model.img_sise": did you mean "model.img_size"?',
    "optimizer.lr=1": 'unknown key "optimizer": did you mean "optim"?',
    "objective.mask_ration=0.5": 'unknown key "objective.mask_ration": did you mean "objective.mask_ratio"?',
    "data.augment.flipp=true": 'unknown key "data.augment.flipp": did you mean "data.augment.flip"?',
    "train.epoch=3": 'command line: unknown key "train.epoch": did you mean "train.epochs"?',
    "train={epochs: 3}": 'batch_size" is missing: "train" is replaced as a whole; to change a part of it, write ',
    "epochs=3": 'command line: unknown key "epochs": did you mean "train.epochs"?',
    "epoch=3": 'unknown key "epoch": did you mean "train.epochs"?',
    "lr=1e-3": 'unknown key "lr": did you mean "optim.lr"?',
    "batch_size=32": 'did you mean "train.effective_batch_size" or "train.batch_size_per_device"?',
    "augment.crop=none": 'unknown key "augment": did you mean "data.augment"?',
    "train.lr=1e-3": 'unknown key "train.lr": did you mean "optim.lr"?',
    "name=x": 'did you mean "run.name" or "model.name" or "optim.name" or "objective.name"?',
    "mask_ratio=0.5": 'unknown key "mask_ratio": did you mean "objective.mask_ratio"?',
    "corrupt_ratio=0.5": 'did you mean "objective.corrupt_ratio" or "objective.masked_patch.corrupt_ratio"?',
    # What other trainers call it.
    "train.device=cuda": 'unknown key "train.device": a process finds its GPU by itself: CUDA_VISIBLE_DEVICES chooses '
    "which, run.device=cpu takes none; ",
    "device=cuda": 'unknown key "device": a process finds its GPU',
    "gpus=1": 'unknown key "gpus": a process finds its GPU',
    "train.gpu_ids=[0]": 'unknown key "train.gpu_ids": a process finds its GPU',
    "trainer.accelerator=gpu": 'unknown key "trainer": a process finds its GPU',
    "zzz=1": 'unknown key "zzz": known: checkpoint, data, guard, model, ',
    "train.zzz=1": 'unknown key "train.zzz": known in train: activation_checkpointing, ',
    "objective.corrupt_ratio=0.5": 'objective.corrupt_ratio belongs to objective "masked_patch"; '
    'options of "mae": mask_ratio, mask_unit, decoder_embed_dim, ',
    "objective.temperature=4 objective.corrupt_ratio=0.5": '"mae": mask_ratio, mask_unit, ',
    "objective.name=null": '"objective.name" is missing: one of contrastive_mae, joint, mae, ',
    "objective=mae": "objective='mae': this is a section: give its keys, e.g. objective.name=...",
    "train.epoks=null": 'unknown key "train.epoks": did you mean "train.epochs"?',
    "run.name=": 'override "run.name=" gives no value (run.name=null is the default)',
    "run.name=a/b": "run.name='a/b': letters, digits, . _ - (a letter or digit first); a folder goes in run.dir",
    "train.effective_batch_size=many": "train.effective_batch_size='many': input should be a valid integer",
    "data.augment.flip=no": "data.augment.flip='no': true or false",
    "objective.mask_ratio=1.0": "objective.mask_ratio=1.0: input should be less than 1",
    "objective.mask_ratio=0": "objective.mask_ratio=0: input should be greater than 0",
    "objective.name=may": 'objective.name="may": did you mean "mae"?',
    "model.name=tiny-cifer": 'did you mean "tiny-cifar"?',
    "optim.name=AdamW": 'did you mean "adamw"',
    "model.name=b": 'did you mean "B"',
    "model.patch_size=3": "patch_size=3 does not divide img_size=8 (nearest side that fits: 9, nearest patch_size: 2)",
    "model.img_size=[8, 8, 8]": "give one number or [height, width]",
    "optim.blr=1e-4 optim.lr=1e-4": "give one of blr, lr, not blr and lr: drop lr=0.0001, or blr=0.0001",
    "optim.lr=null": "give one of blr, lr",
    "train.steps=5 train.epochs=5": "not steps and epochs: drop epochs=5.0, or steps=5",
    "train.precision=fp8": "train.precision='fp8'",
    "data.augment.pad_px=2": 'pad_px has no effect with crop="none"',
    "data.augment.scale=[0.1, 0.5]": 'scale has no effect with crop="none"',
    "data.order=block": "data.order='block': input should be 'global' or 'blocks'; did you mean \"blocks\"?",
    "data.source=tar data.memory_limit_gib=1": 'memory_limit_gib has no effect with source="tar"',
    "data.leave_out_draws=3": "leave_out_draws has no effect without leave_out_per_class",
    "data.lanes=8": 'lanes has no effect with order="global"; it belongs to order="blocks"',
    "data.block_shards=8": 'block_shards has no effect with order="global"; it belongs to order="blocks"',
    "data.order=blocks data.lanes=0": "data.lanes=0: input should be greater than 0",
    "data.order=blocks data.block_shards=0": "data.block_shards=0: input should be greater than 0",
    "data.order=blocks data.lanes=10": (
        "data.lanes=10 does not divide train.effective_batch_size=128 (nearest batch: 130, nearest lanes: 8)"
    ),
    "data.order=blocks train.effective_batch_size=3": (
        "data.lanes=8 does not divide train.effective_batch_size=3 (nearest batch: 8, nearest lanes: 3)"
    ),
    "data.repeats=0": "data.repeats=0: input should be greater than 0",
    "data.repeats=3": "data.repeats=3 does not divide train.effective_batch_size=128 (nearest batch: 129)",
    "data.order=blocks data.repeats=4 data.lanes=64": (
        "data.lanes=64 x data.repeats=4 does not divide train.effective_batch_size=128 (nearest batch: 256, "
        "nearest lanes: 32)"
    ),
    "optim.betas=[0.9, 1.5]": "each needs 0 <= beta < 1",
    "optim.name=sgd optim.betas=[0.9,0.9]": 'betas has no effect with name="sgd"; it belongs to name="adamw" or "adam"',
    "guard.spike_sigmas=null guard.spike_steps=4": "spike_steps=4 has no effect with spike_sigmas=null",
    "guard.max_rollbacks=0 guard.skip_steps=5": "skip_steps=5 has no effect with max_rollbacks=0",
    "optim.momentum=0.9": 'momentum has no effect with name="adamw"; it belongs to name="sgd" or "lars"',
    "optim.name=adamm": 'did you mean "adam',
    "optim.name=lars optim.betas=null train.zero_stage=1": "needs whole parameters, train.zero_stage=1 shards",
    "train.zero_stage=4": "train.zero_stage=4",
    "train.zero_stage=3 train.compile=true": "compile=true does not go with zero_stage=3",
    "train.compile=yes": "train.compile",
    "train.zero_stage=2 train.engine=torch": 'zero_stage=2 needs engine="deepspeed"',
    "run.seed=-1": "run.seed=-1",
    "optim.lr=.inf": "optim.lr=inf",
    "nonsense": "write key.path=value",
    "model.name.deeper=1": "model.name is not a section",
    "train={": "not valid YAML",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_override_is_one_readable_line(override):
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, CONFIG, override.split(" ") if override.count("=") > 1 else [override])
    message = str(caught.value)
    assert BAD[override] in message, message
    assert "\n" not in message
    assert "pydantic" not in message
    assert str(CONFIG) not in message
    assert message.startswith(("command line: ", "override ")), message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a config is a mapping of sections"),
        ("- a\n- b", "a config is a mapping of sections"),
        ("model: [", "not valid YAML"),
        ("model: 3", "model=3"),
        ("!!python/object/apply:os.system ['touch pwned']", "not valid YAML"),
        ("a: &x [*x]", "unknown key"),
        ("train: {epochs: 3, epochs: 4}", "not valid YAML"),
        ("\x00", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, expected):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("pwned").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.yaml: no such file"):
        load_config(PretrainConfig, tmp_path / "nothing.yaml")


def message_of(path: Path, *overrides: str, **options) -> str:
    with pytest.raises(InputError) as caught:
        load_config(PretrainConfig, path, overrides, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_that_is_not_there_names_one_that_is(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert message_of(Path("mae_digit")).endswith('did you mean "configs/pretrain/mae_digits.yaml"?')
    mine = tmp_path / "photos.yaml"
    mine.write_text("")
    assert message_of(tmp_path / "photo.yaml").endswith(f'did you mean "{mine}"?')
    assert message_of(tmp_path / "else.yaml").endswith("no such file or directory")
    # A folder that is there: what it may be meant for.
    assert message_of(tmp_path).endswith(
        f"is a directory; for data give a config, and data.path={tmp_path} behind it"
    )
    (tmp_path / "config.yaml").write_text("")
    assert f"is a directory; for the weights of a run give --ckpt {tmp_path} (" in message_of(tmp_path)
    assert message_of(Path("x" * 300)).endswith("file name too long")


def test_a_problem_is_blamed_on_the_file_or_on_the_command_line(write_config):
    path = write_config(train={"epoch": 3})
    of_file = f'{path}: unknown key "train.epoch": did you mean "train.epochs"?'
    of_command_line = 'command line: unknown key "modle": did you mean "model"?'
    assert message_of(path) == of_file
    assert message_of(path, "run.seed=3") == of_file
    assert message_of(path, "modle.name=S") in (
        f"{of_file}; {of_command_line}",
        f"{of_command_line}; {of_file}",
    )
    # Right in the file, wrong together.
    assert message_of(CONFIG, "train.engine=torch", "train.zero_stage=1") == (
        'command line: train: zero_stage=1 needs engine="deepspeed"'
    )


def test_five_mistakes_are_five_lines(write_config, capsys):
    path = write_config(train={"epohcs": 3}, model={"depth": -1})
    overrides = ["epochs", "train.steps=many", "train.effective_batch_size.x=1"]
    with pytest.raises(InputError) as error:
        load_config(PretrainConfig, path, overrides)
    assert len(error.value.lines) == 5
    for line, begin in zip(
        error.value.lines,
        (
            'override "epochs": write key.path=value',
            'override "train.effective_batch_size.x=1": train.effective_batch_size is not a section',
            f'{path}: unknown key "train.epohcs": did you mean "train.epochs"?',
            f"{path}: model.depth=-1: input should be greater than 0",
            "command line: train.steps='many': input should be a valid integer",
        ),
        strict=True,
    ):
        assert line.startswith(begin)
    assert main(["--config", str(path), *overrides]) == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in error.value.lines]
    many = [f"train.{letter}=1" for letter in "abcdefghijklm"]
    with pytest.raises(InputError, match="and 3 mistakes more") as error:
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
    assert "objective.mask_ratio belongs to objective" in message_of(
        path, "objective.name=masked_patch", "objective.mask_ratio=0.5"
    )


def test_a_part_of_an_objective_names_its_own_keys():
    joint = ["objective.name=joint", "objective.mae.mask_ratio=0.5"]
    assert load_config(PretrainConfig, CONFIG, joint).objective.mae.mask_ratio == 0.5
    assert message_of(CONFIG, joint[0], "objective.mae.mask_ration=0.5") == (
        'command line: unknown key "objective.mae.mask_ration": did you mean "objective.mae.mask_ratio"?'
    )
    assert 'did you mean "objective.mae.decoder_depth"?' in message_of(CONFIG, joint[0], "decoder_depth=3")


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
