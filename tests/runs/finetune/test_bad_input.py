"""Bad input to fine-tuning: one line that names key and value, exit code 2, nothing written."""

import re

import pytest
from helpers.commands import one_line
from helpers.finetune import CNN, TINY

from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.finetuning.config.pretrained import WeightsOverrides, run_name
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.training.outputs.run_folder import RunFolder

# Overrides that are refused.
VITS = [
    *(
        "finetune.pol=mean",
        "model.patchsize=2",
        "finetune.mode=linear",
        "model.name=SimpelCNN",
        "model.init=x",
    ),
    *("finetune.holdout=0.9", "monitor.probe_queries=3", "monitor.evaluate_images=9"),
    *("optim.layer_decay=1.5", "finetune.start=runs/mae", "finetune.neighbors=3"),
    *("data.leave_out_per_class=5", "finetune.test=false finetune.holdout=0"),
    *("train.ema_decay=0.9 train.zero_stage=3", "train.engine=torch train.zero_stage=1"),
    *("finetune.mode=segment finetune.mixup=0.8", "finetune.mode=segment data.augment.policy=randaugment"),
    "finetune.mode=segment data.augment.erasing=0.25",
]
NETWORKS = [
    *("finetune.pool=cls", "finetune.head_init=small", "finetune.mode=knn", "finetune.mode=segment_probe"),
    *("model.drop_path_rate=0.1", "model.name=timm:resnet19"),
]
PROBES = [
    *("data.augment.flip=true data.augment.crop=pad", "optim.layer_decay=0.8", "optim.clip_grad=1.0"),
    *("model.drop_path_rate=0.1", "checkpoint.every_steps=9", "guard.skip_steps=9"),
    *("monitor.log_every_steps=9", "train.zero_stage=1", "finetune.shots=[3]", "finetune.lr_factors=[]"),
    *("finetune.lr_factors=[1.0, 0.0]", "finetune.holdout=0", "optim.name=muon"),
    *("optim.name=lars finetune.head_init=small", "finetune.mode=knn finetune.lr_factors=[1.0]"),
]
CASES = [
    *(("finetune_cifar_tiny", [*TINY, "data.path=x"], case) for case in VITS),
    *(("simple_cnn_cifar", [*CNN["model"], "data.path=x"], case) for case in NETWORKS),
    *(("linear_probe_cifar_tiny", ["data.path=x"], case) for case in PROBES),
]


def read(config, overrides) -> FinetuneConfig:
    path = find_config(config)
    return load_config(FinetuneConfig, path, overrides, amend=WeightsOverrides(None, path, overrides))


@pytest.mark.parametrize(
    ("config", "base", "overrides"), CASES, ids=lambda value: "" if isinstance(value, list) else value
)
def test_a_config_is_refused_with_key_and_value(config, base, overrides, said):
    read(config, base)
    with pytest.raises(InputError) as error:
        read(config, [*base, *re.split(r" (?=[a-z]+\.)", overrides)])
    said(error)
    assert "\n" not in str(error.value)


# What only data and files tell.
JOBS = {
    "no start": ["--ckpt", ""],
    "missing weights": ["--ckpt", "nowhere"],
    "holdout of nothing": ["data.labels_per_class=1"],
    "too many labels": ["data.labels_per_class=9999"],
    "shots": ["data.labels_per_class=20", "finetune.mode=few_shot", "finetune.shots=[5,25]"],
    "batch larger than the data": [
        *("data.labels_per_class=2", "train.effective_batch_size=64", "--same-batch")
    ],
    "half a pair": ["finetune.mixup=0.8", "train.effective_batch_size=63"],
    "picture bands": ["monitor.picture_bands=[7]"],
    "length of scores": ["finetune.mode=knn", "--extend"],
    "no masks": ["finetune.mode=segment"],
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_refused_before_anything_is_written(call, tmp_path, capsys, name, said):
    assert call(*JOBS[name]) == 2
    said(one_line(capsys))
    assert not (tmp_path / "run").exists()


def test_networks_take_images_of_their_size_alone(call, capsys, said):
    model = ["model.name=timm:vit_tiny_patch16_224"]
    assert call(*model, **CNN) == 2
    assert "1 x 8 x 8" in one_line(capsys)
    assert call("train.activation_checkpointing=true", **CNN) == 2
    said(one_line(capsys))
    assert call("model.name=SimpleCNN") == 2
    said(capsys.readouterr().err)


def test_a_network_does_not_begin_from_an_encoder_of_another_kind(call, pretrained, tmp_path, capsys, said):
    assert call("model.img_size=8", config="simple_cnn_cifar", ckpt=pretrained) == 2
    said(one_line(capsys))
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_is_left_alone(call, pretrained, tmp_path, capsys):
    """Scores do not replace other scores, nor training scores; a dry run says that the run will stop."""
    assert call("finetune.mode=knn", ckpt=pretrained) == 0
    before = (tmp_path / "run" / "results.json").read_bytes()
    for mode, folder in (("few_shot", "has other settings"), ("finetune", "without checkpoints")):
        capsys.readouterr()
        assert call(f"finetune.mode={mode}", ckpt=pretrained) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert folder in line
        assert call(f"finetune.mode={mode}", "--dry-run", ckpt=pretrained) == 0
        warning = capsys.readouterr().out.splitlines()[-2]
        assert warning.endswith(line.removeprefix("error: "))
    assert (tmp_path / "run" / "results.json").read_bytes() == before


def test_a_dry_run_says_that_another_process_trains_in_the_folder(call, tmp_path, capsys):
    with RunFolder(tmp_path / "run") as used:
        used.lock()
        assert call("--dry-run") == 0
    assert f"would stop: {tmp_path / 'run'} is in use by process" in capsys.readouterr().out


def test_how_often_the_epoch_is_chosen_is_part_of_the_run(call, capsys):
    assert call() == 0
    capsys.readouterr()
    assert call("monitor.evaluate_every_steps=3") == 2
    assert "monitor.evaluate_every_steps was 2, now 3" in one_line(capsys)
    assert call("--dry-run") == 0
    assert "is finished (step 6)" in capsys.readouterr().out


def test_names_of_weights_are_parts_of_folders(tmp_path):
    (tmp_path / "weights.v1.pth").touch()
    names = {
        "runs/mae_v1.5": "mae_v1.5",
        "runs/mae_v1.6": "mae_v1.6",
        "timm:vit_base_patch16_224.dino": "vit_base_patch16_224.dino",
        "runs/mae_v1.5/encoder.safetensors": "mae_v1.5",
        str(tmp_path / "weights.v1.pth"): "weights.v1",
    }
    assert {weights: run_name(weights) for weights in names} == names
    assert run_name("runs/größe S") == "gr--e-S"


def test_a_dry_run_says_what_is_measured_on(call, capsys):
    assert call("--dry-run") == 0
    output = capsys.readouterr().out
    assert "300 images, once" in output
    assert re.search(r"^cores +\d+, 0 workers ", output, re.MULTILINE)
    assert call("--dry-run", "finetune.test=false") == 0
    assert re.search(r"^tested on +nothing", capsys.readouterr().out, re.MULTILINE)
