"""What fine-tuning begins from: every kind of start, another image size, and what is refused."""

import json
import shutil

import pytest
import timm
import torch
from helpers.commands import ROOT, one_line, summary_of
from helpers.encoders import vit_info
from helpers.images import prepare_pairs, write_pairs
from helpers.weights.official_weights import RunsCode, official
from safetensors.torch import load_file

from mae_vit.core.errors import InputError
from mae_vit.data.data_path import resolve_data_path
from mae_vit.finetuning.command import main
from mae_vit.finetuning.config.recipes import find_recipe
from mae_vit.training.checkpoints.checkpoint import load_checkpoint

# What the official file of the tests holds, for the config: it does not say so itself.
OFFICIAL = ["model.embed_dim=64", "model.depth=3", "model.num_heads=4"]
SHORT = ["train.steps=2", "train.warmup_steps=0", "monitor.tensorboard=false", "optim.lr=1e-9"]


@pytest.fixture
def run(colored, tmp_path):
    """Fine-tunes on color images of 32 px."""

    def call(ckpt, *arguments, name="run", config="finetune_cifar_tiny") -> int:
        few = ["data.labels_per_class=16", "finetune.train_images=64", "train.effective_batch_size=64"]
        options = [f"data.path={colored}", f"run.dir={tmp_path / name}", *SHORT, *few, *arguments]
        return main(["--config", str(ROOT / f"configs/{config}.yaml"), "--ckpt", str(ckpt), *options])

    return call


@pytest.mark.parametrize("namespace", [False, True])
def test_an_official_file_is_fine_tuned_in_full(run, tmp_path, capsys, namespace):
    weights = official(tmp_path / "mae.pth", decoder=namespace, namespace=namespace)
    assert run(tmp_path / "mae.pth", *OFFICIAL) == 0
    output = capsys.readouterr().out
    assert "100.0% of the encoder's parameters" in output
    assert "left random" not in output
    # At this rate next to nothing has moved.
    model = load_file(tmp_path / "run" / "model.safetensors")
    for name, value in weights.items():
        if name in model:
            torch.testing.assert_close(model[name], value, atol=1e-6, rtol=0)
    assert {name for name in model if name not in weights} == {
        "fc_norm.weight",
        "fc_norm.bias",
        "head.weight",
        "head.bias",
    }
    assert "norm.weight" in weights
    assert "norm.weight" not in model


def test_cls_pooling_keeps_the_final_norm(run, tmp_path, capsys):
    weights = official(tmp_path / "mae.pth", decoder=False)
    assert run(tmp_path / "mae.pth", *OFFICIAL, "finetune.pool=cls") == 0
    assert "fc_norm" not in capsys.readouterr().out
    model = load_file(tmp_path / "run" / "model.safetensors")
    torch.testing.assert_close(model["norm.weight"], weights["norm.weight"], atol=1e-6, rtol=0)


def test_a_file_that_would_run_code_runs_none(run, tmp_path, capsys):
    path, mark = tmp_path / "evil.pth", tmp_path / "mark"
    torch.save({"model": {"cls_token": torch.zeros(1)}, "args": RunsCode(str(mark))}, path)
    assert run(path) == 2
    assert "holds no weights of a Vision Transformer" in one_line(capsys)
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("sincos", [False, True])
def test_another_image_size_interpolates_positions(run, tmp_path, capsys, sincos):
    """The grid of 8 x 8 patches becomes 12 x 12, learned or fixed before."""
    from mae_vit.models.encoder_file import encoder_bytes

    kind = "sincos" if sincos else "learnable"
    info = vit_info("S", (32, 32), 4, 3, 64, 3, 4, 4.0, kind, [0.5] * 3, [0.25] * 3, "mae", 9)
    encoder = info.geometry.build()
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(encoder, info))
    assert run(tmp_path, "model.img_size=48", "data.augment.crop=random_resized") == 0
    assert "8 x 8 -> 12 x 12 patches" in capsys.readouterr().out
    positions = load_file(tmp_path / "run" / "model.safetensors")["pos_embed"]
    expected = timm.layers.resample_abs_pos_embed(encoder.pos_embed.detach(), [12, 12])
    torch.testing.assert_close(positions, expected, atol=1e-6, rtol=0)
    assert run(tmp_path, name="same") == 0
    positions = load_file(tmp_path / "same" / "model.safetensors")["pos_embed"]
    torch.testing.assert_close(positions, encoder.pos_embed.detach(), atol=1e-6, rtol=0)


def test_geometry_and_normalization_are_the_starts(run, tmp_path, capsys):
    from mae_vit.models.encoder_file import encoder_bytes

    info = vit_info(
        "S", (32, 32), 8, 3, 48, 2, 3, 2.0, "learnable", [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], "mae", 9
    )
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(info.geometry.build(), info))
    assert run(tmp_path) == 0
    state = load_checkpoint(sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1])
    section = {
        name.removeprefix("model."): v for name, v in state.identity.items() if name.startswith("model.")
    }
    assert (section["patch_size"], section["embed_dim"], section["depth"], section["num_heads"]) == (
        8,
        48,
        2,
        3,
    )
    assert (section["mlp_ratio"], section["img_size"]) == (2.0, 32)
    assert (state.identity["data.mean"], state.identity["data.std"]) == ([0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    assert "warning" not in capsys.readouterr().err
    assert run(tmp_path, "data.normalize=half", name="other") == 0
    assert "was trained on images normalized by mean [0.1, 0.2, 0.3]" in capsys.readouterr().err
    for change, expected in {
        "model.patch_size=4": "patch_size is 8 there, model.patch_size=4 here",
        "model.depth=3": "depth is 2 there, model.depth=3 here",
        "model.num_heads=4": "num_heads is 3 there, model.num_heads=4 here",
    }.items():
        assert run(tmp_path, change, name="third") == 2
        assert expected in capsys.readouterr().err
        assert not (tmp_path / "third").exists()


def test_a_fine_tuned_run_is_a_start(call, pretrained, tmp_path, capsys):
    assert call(ckpt=pretrained, name="first") == 0
    capsys.readouterr()
    assert call(ckpt=tmp_path / "first", name="second") == 0
    output = capsys.readouterr().out
    assert str(tmp_path / "first" / "model.safetensors") in output
    assert "100.0% of the encoder's parameters" in output


def test_an_encoder_of_another_kind_is_refused(run, tmp_path, capsys):
    weights = official(tmp_path / "mae.pth", decoder=False)
    weights["blocks.0.ls1.gamma"] = torch.ones(64)
    torch.save({"model": weights}, tmp_path / "scaled.pth")
    assert run(tmp_path / "scaled.pth", *OFFICIAL) == 2
    assert "ours has no blocks.0.ls1.gamma" in capsys.readouterr().err


@pytest.fixture
def alone(pretrained, tmp_path):
    """A copy of the pretraining run, to be spoiled; and `--ckpt` on it without --config."""
    copy = shutil.copytree(pretrained, tmp_path / "mae")

    def call(*arguments: str) -> int:
        short = [*SHORT, f"run.dir={tmp_path / 'run'}"]
        return main(["--ckpt", str(copy), *short, *arguments])

    call.folder = copy
    return call


def test_a_run_folder_alone_tells_data_and_recipe(alone, digits, tmp_path, capsys):
    assert alone() == 0
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "done"
    config = (tmp_path / "run" / "config.yaml").read_text()
    for line in (
        f"path: {digits}",
        "name: finetune_cifar_tiny-mae",
        "flip: false",
        "crop: none",
        "pool: mean",
    ):
        assert line in config, line
    assert "layer_decay: 0.8" in config
    assert alone("train.steps=3") == 2
    assert "train.steps was 2, now 3" in capsys.readouterr().err


def test_a_run_whose_data_does_not_serve_says_what_to_pass(alone, digits, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(digits, data, ignore=shutil.ignore_patterns(".index"))
    config = alone.folder / "config.yaml"
    config.write_text(config.read_text().replace(f"path: {digits}", f"path: {data}"))

    def refused(expected: str) -> None:
        assert alone() == 2
        error = one_line(capsys)
        assert expected in error
        assert "--config" in error
        assert not (tmp_path / "run").exists()

    whole = json.loads((data / "dataset.json").read_text())
    alone_train = {**whole, "splits": {"train": whole["splits"]["train"]}}
    (data / "dataset.json").write_text(json.dumps(alone_train))
    refused('has no split "test" or "val" to measure on: mae-vit prepare ... --holdout 1/10 draws one')
    (data / "dataset.json").write_text(json.dumps({**whole, "classes": []}))
    refused("has no labels: mae-vit prepare takes them from class folders")
    # The command line may name data that have.
    assert alone(f"data.path={digits}") == 0
    assert f"path: {digits}" in (tmp_path / "run" / "config.yaml").read_text()
    shutil.rmtree(tmp_path / "run")
    capsys.readouterr()
    config.write_text("model: 3\n")
    refused("is no config of a run")
    config.unlink()
    refused("it has no config.yaml")
    encoder = alone.folder / "encoder.safetensors"
    # What holds no weights is said before how to use some.
    pictures = encoder.parent / "cats"
    pictures.mkdir()
    for start, message in (
        (ROOT / "README.md", "is no file of weights"),
        (pictures, "has neither checkpoints nor"),
    ):
        assert main(["--ckpt", str(start)]) == 2
        assert message in capsys.readouterr().err
    assert main(["--ckpt", str(encoder)]) == 2
    assert "is no run folder, which would say how to fine-tune" in capsys.readouterr().err
    assert main([]) == 2
    assert "give --ckpt WEIGHTS, --config FILE or both" in capsys.readouterr().err


def test_what_the_file_says_and_the_start_replaces_is_named(run, tmp_path, capsys):
    from mae_vit.models.encoder_file import encoder_bytes

    info = vit_info("S", (16, 16), 2, 3, 48, 2, 3, 2.0, "learnable", [0.5] * 3, [0.5] * 3, "mae", 9)
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(info.geometry.build(), info))
    assert run(tmp_path, "--dry-run") == 0
    output = capsys.readouterr().out
    assert (
        "note: the pretrained weights have model.patch_size=2, which replaces 4 of finetune_cifar_tiny.yaml"
        in output
    )
    # The file's size of images holds: positions are interpolated to it.
    assert "note: model.img_size=32: the start was pretrained at [16, 16], its positions" in output
    assert "8 x 8 -> 16 x 16 patches" in output


# Of timm's, built without their weights.
OTHER_KINDS = ["deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224"]


@pytest.mark.parametrize("name", OTHER_KINDS)
def test_another_kind_of_encoder_is_one_line(run, name, tmp_path, monkeypatch, capsys):
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *a, **options: create(*a, **{**options, "pretrained": False})
    )
    assert run(f"timm:{name}", "--dry-run") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "error: " in error[0]


def run_folder(folder, size: str, data: str) -> str:
    """What of a run folder says how to fine-tune it."""
    text = f"model: {{name: {size}, img_size: 224}}\ndata: {{path: {data}, split: train, augment: {{crop: null}}}}\n"
    (folder / "config.yaml").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("size", "mode", "expected"),
    [
        ("B", "finetune", "finetune_base"),
        ("L", "few_shot", "finetune_large"),
        ("H", "finetune", "finetune_huge"),
        ("L", "linear_probe", "linear_probe_base"),
    ],
)
def test_a_run_folder_is_fine_tuned_by_the_recipe_for_its_size(colored, tmp_path, size, mode, expected):
    config, overrides = find_recipe(run_folder(tmp_path, size, colored), [f"finetune.mode={mode}"])
    assert config.stem == expected
    assert f'data.path="{colored}"' in overrides


def test_data_that_a_moved_run_recorded_are_named_as_such(colored, tmp_path, monkeypatch):
    """Its relative path is seen from the folder where the command runs."""
    run = run_folder(tmp_path, "B", "data/mine")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    recorded = rf"{run} recorded data.path=data/mine, which does not exist from {elsewhere}: give data.path="
    with pytest.raises(InputError, match=f"^{recorded}DIR$"):
        find_recipe(run)
    find_recipe(run, [f"data.path={colored}"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(colored)
    (inner := tmp_path / "runs" / "mae").mkdir(parents=True)
    with pytest.raises(InputError, match=rf"give data.path={tmp_path}/data/mine$"):
        find_recipe(run_folder(inner, "B", "data/mine"))


def test_masks_are_segmented_by_a_recipe_of_their_own(colored, tmp_path):
    prepare_pairs(write_pairs(tmp_path / "in", side=32), tmp_path / "out")
    given = ["finetune.mode=segment", f"data.path={tmp_path / 'out'}"]
    for size, expected in (("L", "segment_base"), ("tiny-cifar", "finetune_cifar_tiny")):
        config, overrides = find_recipe(run_folder(tmp_path, size, colored), given)
        assert config.stem == expected
        assert ("model.name=L" in overrides) == (size == "L")
    with pytest.raises(InputError, match="has no masks"):
        find_recipe(run_folder(tmp_path, "L", colored), ["finetune.mode=segment_probe"])


def test_labels_of_other_data_are_looked_for_in_the_cache_that_is_asked_for(colored, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mae_vit.finetuning.config.recipes.resolve_data_path",
        lambda path, **options: asked.append((path, options)) or resolve_data_path(str(colored)),
    )
    given = ["data.path=https://host/mine", "data.cache_dir=/local", "data.cache_gib=200"]
    find_recipe(run_folder(tmp_path, "B", colored), given)
    assert asked == [("https://host/mine", {"cache_dir": "/local", "cache_gib": 200})]
