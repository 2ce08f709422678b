"""What fine-tuning begins from: every kind of weights, another image size, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.commands import ROOT, one_line, summary_of
from helpers.damage import copy_of
from helpers.encoders import encoder_file
from helpers.finetune import CNN
from helpers.images import prepare_pairs, write_pairs
from helpers.weights.official_weights import official
from safetensors.torch import load_file, save_file

from mae_vit.core.errors import InputError
from mae_vit.data.data_path import resolve_data_path
from mae_vit.finetuning.command import main
from mae_vit.finetuning.config import recipes
from mae_vit.finetuning.config.recipes import find_recipe
from mae_vit.training.checkpoints.checkpoint import load_checkpoint

# What the official file of the tests holds, for the config: it does not say so itself.
OFFICIAL = ["model.embed_dim=64", "model.depth=3", "model.num_heads=4"]
SHORT = ["train.steps=2", "train.warmup_steps=0", "monitor.tensorboard=false", "optim.lr=1e-9"]


@pytest.fixture
def run(call, colored):
    """Fine-tunes on color images of 32 px: run(weights, "key=value", ..., name="run") -> exit code."""

    def tune(ckpt, *arguments, **options) -> int:
        few = ["data.labels_per_class=16", "train.effective_batch_size=64"]
        words = [f"--ckpt={ckpt}", f"data.path={colored}", *few, *arguments]
        return call(*words, **options, model=(), small=SHORT)

    return tune


def write_encoder(folder, **facts):
    size = {"size": "S", "embed_dim": 48, "num_heads": 3, "mlp_ratio": 2.0, "pos_embed": "learnable"}
    encoder_file(folder / "encoder.safetensors", **size, **facts)


@pytest.mark.parametrize(("namespace", "pool"), [(False, "mean"), (True, "cls")])
def test_an_official_file_is_fine_tuned_in_full(run, tmp_path, capsys, namespace, pool):
    weights = official(tmp_path / "mae.pth", decoder=namespace, namespace=namespace)
    assert run(tmp_path / "mae.pth", *OFFICIAL, f"finetune.pool={pool}") == 0
    output = capsys.readouterr().out
    assert "100.0%" in output
    assert "left random" not in output
    # At this rate next to nothing has moved.
    model = load_file(tmp_path / "run" / "model.safetensors")
    for name in weights.keys() & model.keys():
        torch.testing.assert_close(model[name], weights[name], atol=1e-6, rtol=0)
    fresh = {"head.weight", "head.bias"} | ({"fc_norm.weight", "fc_norm.bias"} if pool == "mean" else set())
    assert model.keys() - weights.keys() == fresh
    assert ("norm.weight" in model) == (pool == "cls")


def test_weights_of_others_with_a_normalization_of_colors_read_gray_as_colors(call, tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(official(tmp_path / "mae.pth", decoder=False), folder / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "model_args": {"num_heads": 4, "img_size": 32}}
    config["pretrained_cfg"] = {"mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["model.img_size=32", *OFFICIAL, "data.augment.crop=random_resized", "--dry-run"]
    assert call(*words, ckpt=folder, model=()) == 0


def test_geometry_and_normalization_are_the_weights(run, tmp_path, capsys):
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    write_encoder(tmp_path, img_size=(32, 32), patch_size=8, mean=mean, std=std)
    assert run(tmp_path) == 0
    identity = load_checkpoint(sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]).identity
    expected = {
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 2,
        "num_heads": 3,
        "mlp_ratio": 2.0,
        "img_size": 32,
    }
    assert {name: identity[f"model.{name}"] for name in expected} == expected
    assert (identity["data.mean"], identity["data.std"]) == (mean, std)
    out, err = capsys.readouterr()
    assert "warning" not in err
    # What the file says and the weights replace is named.
    assert "model.patch_size=8," in out
    assert run(tmp_path, "data.normalize=half", name="other") == 0
    assert "mean [0.1, 0.2, 0.3]" in capsys.readouterr().err
    for change in ("model.patch_size=4", "model.depth=3", "model.num_heads=4", 'model.name="B"'):
        assert run(tmp_path, change, name="third") == 2
        assert change in capsys.readouterr().err
        assert not (tmp_path / "third").exists()


def test_fine_tuned_networks_are_where_others_begin(call, shared, pretrained, tmp_path, capsys):
    """By the file that a run leaves, or by its checkpoint."""
    folders = {"finetune_cifar_tiny": shared(ckpt=pretrained).folder, CNN["config"]: shared(**CNN).folder}
    short = ["train.steps=1", "train.warmup_steps=0"]
    for config, folder in folders.items():
        copy = shutil.copytree(folder, tmp_path / config)
        for name in ("file", "checkpoint"):
            assert call(*short, config=config, ckpt=copy, name=f"{config}-{name}") == 0
            output = capsys.readouterr().out
            assert "100.0%" in output
            assert (str(copy / "model.safetensors") in output) == (name == "file")
            (copy / "model.safetensors").unlink(missing_ok=True)


@pytest.fixture
def alone(pretrained, tmp_path):
    """A copy of the pretraining run, to be spoiled; and `--ckpt` on it without --config."""
    copy = shutil.copytree(pretrained, tmp_path / "mae")

    def call(*arguments: str) -> int:
        return main(["--ckpt", str(copy), *SHORT, f"run.dir={tmp_path / 'run'}", *arguments])

    call.folder = copy
    return call


def test_a_run_folder_alone_tells_data_and_recipe(alone, digits, tmp_path, capsys):
    assert alone() == 0
    assert summary_of(tmp_path / "run")["status"] == "done"
    config = (tmp_path / "run" / "config.yaml").read_text()
    name = "name: finetune_cifar_tiny-mae"
    for line in (f"path: {digits}", name, "flip: false", "crop: none", "pool: mean", "layer_decay: 0.8"):
        assert line in config, line
    # Two blocks of the pretraining, so the first layer is three steps of 0.8 below the peak.
    (rates,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("lr "))
    numbers = [float(word.strip(",")) for word in rates.split() if word[0].isdigit()]
    assert numbers[1] == 1.25
    assert numbers[0] / numbers[2] == pytest.approx(0.8**3, rel=1e-3)
    assert alone("train.steps=3") == 2
    assert "train.steps was 2" in capsys.readouterr().err


def test_a_run_whose_data_does_not_serve_says_what_to_pass(alone, digits, tmp_path, capsys, said):
    data = copy_of(digits, tmp_path / "data")
    config = alone.folder / "config.yaml"
    config.write_text(config.read_text().replace(f"path: {digits}", f"path: {data}"))

    def refuse(*words: str) -> None:
        assert (main([*words]) if words else alone()) == 2
        said(one_line(capsys))
        assert not (tmp_path / "run").exists()

    whole = json.loads((data / "dataset.json").read_text())
    train = {**whole, "splits": {"train": whole["splits"]["train"]}}
    (data / "dataset.json").write_text(json.dumps(train))
    refuse()
    (data / "dataset.json").write_text(json.dumps({**train, "classes": []}))
    refuse()
    (data / "dataset.json").write_text(json.dumps({**whole, "classes": []}))
    refuse()
    # The command line may name data that have.
    assert alone(f"data.path={digits}", "--dry-run") == 0
    capsys.readouterr()
    config.write_text("model: 3\n")
    refuse()
    config.unlink()
    refuse()
    encoder = alone.folder / "encoder.safetensors"
    # What holds no weights is said before how to use some.
    (pictures := encoder.parent / "cats").mkdir()
    refuse("--ckpt", str(ROOT / "README.md"))
    refuse("--ckpt", str(pictures))
    refuse("--ckpt", str(encoder))
    main([])
    said(one_line(capsys))


def run_folder(folder, size: str, data: str) -> str:
    """What of a run folder says how to fine-tune it."""
    model = size if "," in size else f"{size}, img_size: 224"
    text = f"model: {{name: {model}}}\ndata: {{path: {data}, split: train, augment: {{crop: null}}}}\n"
    (folder / "config.yaml").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("size", "mode", "expected"),
    [
        ("B", "linear_probe", "linear_probe_cifar_tiny"),
        ("B", "finetune", "finetune_base"),
        ("L", "few_shot", "finetune_large"),
        ("H", "finetune", "finetune_huge"),
        ("S", "finetune", "finetune_photos_224"),
        ("tiny-cifar, img_size: 32", "finetune", "finetune_cifar_tiny"),
        ("tiny-cifar, img_size: 64", "finetune", "finetune_photos_64"),
        ("tiny-cifar, img_size: [64, 96]", "few_shot", "finetune_photos_96"),
    ],
)
def test_a_run_folder_is_fine_tuned_by_the_recipe_for_its_size(colored, tmp_path, size, mode, expected):
    """The size of its network and of its images."""
    config, overrides = find_recipe(run_folder(tmp_path, size, colored), [f"finetune.mode={mode}"])
    assert config.stem == expected
    assert f'data.path="{colored}"' in overrides


def test_another_crop_leaves_the_options_of_the_runs_crop_out(colored, tmp_path):
    run = Path(run_folder(tmp_path, "tiny-cifar, img_size: 32", colored))
    text = (run / "config.yaml").read_text().replace("crop: null", "crop: pad, pad_px: 1, flip: false")
    (run / "config.yaml").write_text(text)
    overrides = find_recipe(str(run), ["data.augment.crop=none"])[1]
    assert [text for text in overrides if "augment" in text] == ["data.augment.flip=false"]


def test_a_linear_probe_takes_large_batches_of_many_images_alone(colored, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, "_FEWEST_FOR_LARS", 10)
    config, overrides = find_recipe(run_folder(tmp_path, "L", colored), ["finetune.mode=linear_probe"])
    assert config.stem == "linear_probe_base"
    assert "train.epochs=50" in overrides


def test_data_that_a_moved_run_recorded_are_named_as_such(colored, tmp_path, monkeypatch):
    """Its relative path is seen from the folder where the command runs."""
    run = run_folder(tmp_path, "B", "data/mine")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(InputError, match=rf"^{run} recorded data.path=data/mine,.* {elsewhere};"):
        find_recipe(run)
    find_recipe(run, [f"data.path={colored}"])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(colored)
    (inner := tmp_path / "runs" / "mae").mkdir(parents=True)
    with pytest.raises(InputError, match=rf" data.path={tmp_path}/data/mine$"):
        find_recipe(run_folder(inner, "B", "data/mine"))
    # Not the run itself, which may have the name of its images.
    (inner := tmp_path / "moved" / "photos").mkdir(parents=True)
    with pytest.raises(InputError, match=r" data.path=DIR$"):
        find_recipe(run_folder(inner, "B", "photos"))


def test_masks_are_segmented_by_a_recipe_of_their_own(colored, tmp_path):
    prepare_pairs(write_pairs(tmp_path / "in", side=32), tmp_path / "out")
    given = ["finetune.mode=segment", f"data.path={tmp_path / 'out'}"]
    for size, expected in (("L", "segment_base"), ("tiny-cifar", "finetune_cifar_tiny")):
        config, overrides = find_recipe(run_folder(tmp_path, size, colored), given)
        assert config.stem == expected
        assert ("model.name=L" in overrides) == (size == "L")
    with pytest.raises(InputError, match="no masks"):
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
