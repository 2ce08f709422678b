"""Weights to begin from: full coverage where they fit, one line where they do not, no code run."""

import json
import pickle
import re
import shutil

import pytest
import timm
import torch
from helpers.commands import ROOT
from helpers.encoders import vit_info
from helpers.weights.official_weights import RunsCode, official

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_cost import cost_of_weights
from mae_vit.models.encoder_file import encoder_bytes
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.config import MAEConfig
from mae_vit.pretraining.command import main
from mae_vit.weights import read
from mae_vit.weights.load import load_weights
from mae_vit.weights.read import read_weights


def encoder_of(**changes) -> ViTEncoder:
    options = {
        "img_size": (32, 32),
        "patch_size": 4,
        "embed_dim": 64,
        "depth": 3,
        "num_heads": 4,
        "pos_embed": "sincos",
    }
    return ViTEncoder(**{**options, **changes})


def mae_of(**changes):
    section = MAEConfig(name="mae", decoder_embed_dim=48, decoder_depth=2, decoder_num_heads=4)
    return section.build(encoder_of(**changes), mean=[0.5] * 3, std=[0.25] * 3)


@pytest.mark.parametrize("namespace", [False, True])
@pytest.mark.parametrize("decoder", [False, True])
def test_official_files_are_loaded_in_full(tmp_path, decoder, namespace):
    path = tmp_path / "mae_pretrain.pth"
    model = official(path, decoder=decoder, namespace=namespace)
    objective = mae_of()
    before = objective.decoder_embed.weight.clone()
    coverage = load_weights(read_weights(str(path)), objective.encoder, objective, objective="mae")
    assert coverage.share == 1
    for name, value in objective.encoder.state_dict().items():
        torch.testing.assert_close(value, model[name])
    if decoder:
        assert coverage.random == []
        assert coverage.skipped == ["decoder_pos_embed"]
        for name, value in objective.named_parameters():
            if not name.startswith("encoder."):
                torch.testing.assert_close(value, model[name])
    else:
        assert torch.equal(objective.decoder_embed.weight, before)
        assert "decoder_embed.weight" in coverage.random


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path, wrapped):
    path, mark = tmp_path / "evil.pth", tmp_path / "mark"
    if wrapped:
        torch.save({"model": {"cls_token": torch.zeros(1)}, "args": RunsCode(str(mark))}, path)
    else:
        path.write_bytes(pickle.dumps(RunsCode(str(mark))))
    with pytest.raises(InputError) as error:
        read_weights(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_an_encoder_of_ours_and_another_grid(tmp_path):
    encoder = encoder_of(pos_embed="learnable")
    info = vit_info("S", (32, 32), 4, 3, 64, 3, 4, 4.0, "learnable", [0.5] * 3, [0.25] * 3, "mae", 9)
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(encoder, info))
    for source in (tmp_path, tmp_path / "encoder.safetensors"):
        start = read_weights(str(source))
        assert start.mean == (0.5,) * 3
        same = encoder_of(pos_embed="learnable")
        assert load_weights(start, same).share == 1
        assert torch.equal(same.pos_embed, encoder.pos_embed)
    larger = encoder_of(pos_embed="learnable", img_size=(48, 32))
    coverage = load_weights(read_weights(str(tmp_path)), larger)
    assert coverage.share == 1
    assert coverage.interpolated == {"pos_embed": "8 x 8 -> 12 x 8 patches"}
    assert torch.equal(larger.pos_embed[:, 0], encoder.pos_embed[:, 0])
    expected = timm.layers.resample_abs_pos_embed(encoder.pos_embed.detach(), [12, 8])
    torch.testing.assert_close(larger.pos_embed.detach(), expected)
    with pytest.raises(InputError, match=r'learned positions.*use "learnable"'):
        load_weights(start, encoder_of(pos_embed="sincos"))


@pytest.mark.parametrize("pos_embed", ["learnable", "sincos"])
def test_positions_go_from_14x14_to_24x24_as_timm_takes_them(tmp_path, pos_embed):
    """224 px to 384 px at patch 16, by what timm does to a checkpoint of its own; [CLS]'s is kept."""
    size = {"patch_size": 16, "embed_dim": 64, "depth": 1, "num_heads": 4}
    encoder = ViTEncoder(img_size=(224, 224), pos_embed=pos_embed, **size)
    info = vit_info("S", (224, 224), 16, 3, 64, 1, 4, 4.0, pos_embed, [0.5] * 3, [0.25] * 3, "mae", 9)
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(encoder, info))
    larger = ViTEncoder(img_size=(384, 384), pos_embed="learnable", **size)
    coverage = load_weights(read_weights(str(tmp_path)), larger)
    assert coverage.interpolated == {"pos_embed": "14 x 14 -> 24 x 24 patches"}
    theirs = timm.models.vision_transformer.VisionTransformer(img_size=384, num_classes=0, **size)
    theirs.load_state_dict(
        timm.models.vision_transformer.checkpoint_filter_fn(encoder.state_dict(), theirs), strict=True
    )
    assert larger.pos_embed.shape == (1, 1 + 24 * 24, 64)
    torch.testing.assert_close(larger.pos_embed.detach(), theirs.pos_embed.detach(), atol=1e-6, rtol=0)
    assert torch.equal(larger.pos_embed[:, 0], encoder.pos_embed[:, 0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"patch_size": 8}, "patch_size is 4 there, model.patch_size=8 here"),
        ({"embed_dim": 32}, "embed_dim is 64 there, model.embed_dim=32 here"),
        ({"depth": 2}, "depth is 3 there, model.depth=2 here"),
        ({"depth": 4}, "depth is 3 there, model.depth=4 here"),
        ({"mlp_ratio": 2.0}, "blocks.0.mlp.fc1.weight is"),
    ],
)
def test_another_geometry_is_named(tmp_path, changes, expected):
    official(tmp_path / "mae.pth", decoder=False)
    with pytest.raises(InputError, match=expected):
        load_weights(
            read_weights(str(tmp_path / "mae.pth")), encoder_of(**{"pos_embed": "learnable", **changes})
        )


def test_half_a_file_is_another_models(tmp_path):
    model = official(tmp_path / "whole.pth", decoder=False)
    torch.save({n: v for n, v in model.items() if ".mlp." not in n}, tmp_path / "half.pth")
    with pytest.raises(InputError, match=r"covers \d+% of the encoder's parameters"):
        load_weights(read_weights(str(tmp_path / "half.pth")), encoder_of())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere", "nowhere does not exist: give a run folder"),
        ("https://host/a.pth", "^https://host/a.pth is a URL: download it"),
        ("facebook/vit-mae-base", 'of the Hub it is "hf:facebook/vit-mae-base"'),
        ("vit_base_patch16_224.mae", 'of timm it is "timm:vit_base_patch16_224.mae"'),
        ("emtpy", 'emtpy does not exist: did you mean ".*/empty"'),
        ("empty", "neither checkpoints nor an encoder.safetensors"),
        (
            "text.pth",
            "text.pth is no file of weights: give a run folder, an encoder.safetensors, a file of",
        ),
        ("hello.pth", "hello.pth is no file of weights: give a run folder"),
        ("list.pth", "holds a list, not tensors by name"),
        ("text.safetensors", "no file of weights"),
    ],
)
def test_what_holds_no_weights(tmp_path, name, expected):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pth").write_text("weights")
    (tmp_path / "hello.pth").write_text("hello\n")
    (tmp_path / "text.safetensors").write_text("weights")
    torch.save([torch.zeros(1)], tmp_path / "list.pth")
    elsewhere = "/" in name or name.startswith("vit_")
    with pytest.raises(InputError, match=expected):
        read_weights(name if elsewhere else str(tmp_path / name))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("checkpoint-9.pth.tar last.pth.tar model_best.pth.tar args.yaml", "model_best.pth.tar"),
        ("train/x/checkpoint-9.pth.tar train/x/checkpoint-10.pth.tar", "train/x/checkpoint-10.pth.tar"),
        (
            "checkpoint-500/model.safetensors checkpoint-1000/model.safetensors checkpoint-1000/optimizer.pt "
            "checkpoint-1000/rng_state.pth checkpoint-1000/training_args.bin runs/events",
            "checkpoint-1000",
        ),
        ("step/model.safetensors.index.json step/model-00001-of-00002.safetensors", "step"),
        ("checkpoints/epoch=9-step=90.ckpt checkpoints/last.txt", "checkpoints/epoch=9-step=90.ckpt"),
        ("mae/encoder.safetensors mae/config.yaml", "mae"),
    ],
)
def test_what_is_meant_by_a_folder_around_weights_is_named(tmp_path, files, expected):
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(InputError) as error:
        read_weights(str(tmp_path))
    assert f'did you mean "{tmp_path / expected}"?' in str(error.value)
    if "checkpoints" in files:  # they are no run's of ours
        with pytest.raises(InputError, match=r"did you mean .*step=90\.ckpt"):
            read_weights(str(tmp_path / "checkpoints"))


def test_timm_names(monkeypatch):
    with pytest.raises(InputError, match='did you mean "vit_base_patch16_224"'):
        read_weights("timm:vit_base_patch16_225")
    with pytest.raises(
        InputError, match=r"timm has no weights '.*_224.nope': .*vit_tiny_patch16_224\.augreg_in21k"
    ):
        read_weights("timm:vit_tiny_patch16_224.nope")
    with pytest.raises(InputError, match="timm has no weights of 'vit_small_patch16_36x1_224'"):
        read_weights("timm:vit_small_patch16_36x1_224")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a network
    by_hand = (
        "network needed .*hf download timm/{}.* give DIR/model.safetensors, and data.normalize={} in training"
    )
    for name, normalize in (("vit_tiny_patch16_224", "half"), ("vit_base_patch16_224.mae", "imagenet")):
        with pytest.raises(InputError, match=by_hand.format(name, normalize)):
            read_weights(f"timm:{name}")


@pytest.fixture
def fresh_timm(monkeypatch):
    """timm's models without their weights, which are not here."""
    create = timm.create_model
    monkeypatch.setattr(read, "check_reachable", lambda *_: None)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **options: create(name, **options))


def test_a_timm_model_of_our_kind_is_loaded_in_full(fresh_timm):
    start = read_weights("timm:vit_tiny_patch16_224")
    assert start.geometry.size == "Ti"
    encoder = ViTEncoder(img_size=(224, 224), patch_size=16, embed_dim=192, depth=12, num_heads=3)
    assert load_weights(start, encoder).share == 1
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=0).eval()
    model.load_state_dict(start.tensors)
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(encoder.eval().forward_features(images), model.forward_features(images))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_base_patch32_clip_quickgelu_224", "its activation is QuickGELU"),
        ("vit_base_patch32_clip_224", "its norm is LayerNorm of eps 1e-05, ours LayerNorm of eps 1e-06"),
        ("vit_base_patch16_rpn_224", "its blocks are ResPostBlock, ours Block"),
        ("vit_base_patch16_18x2_224", "its blocks are ParallelThingsBlock, ours Block"),
    ],
)
def test_timm_models_that_compute_something_else_are_refused(fresh_timm, name, expected):
    # Large ones, and none of their numbers is needed.
    with torch.device("meta"), pytest.raises(InputError, match=expected):
        read_weights(f"timm:{name}")


def test_positions_without_that_of_the_class_token_are_refused(fresh_timm):
    encoder = ViTEncoder(img_size=(224, 224), patch_size=16, embed_dim=192, depth=12, num_heads=3)
    start = read_weights("timm:vit_tiny_patch16_224")
    start.tensors["pos_embed"] = start.tensors["pos_embed"][:, 1:]
    with pytest.raises(InputError, match="its pos_embed has 196 rows for 14 x 14 patches, ours one for each"):
        load_weights(start, encoder)


def test_a_fixed_table_of_another_grid_of_as_many_patches_is_a_fixed_table(tmp_path):
    info = vit_info("S", (16, 64), 4, 3, 64, 3, 4, 4.0, "sincos", [0.5] * 3, [0.25] * 3, "mae", 9)
    (tmp_path / "encoder.safetensors").write_bytes(encoder_bytes(encoder_of(img_size=(16, 64)), info))
    coverage = load_weights(read_weights(str(tmp_path)), encoder_of())
    assert coverage.kept == {"pos_embed": "fixed sin-cos table, the same function"}


def test_a_run_begins_from_another(digits, tmp_path, capsys):
    small = [
        *(
            "--config",
            str(ROOT / "configs/pretrain/mae_digits.yaml"),
            f"data.path={digits}",
            "train.engine=torch",
        ),
        *("train.steps=2", "train.warmup_steps=1", "model.depth=1", "monitor.tensorboard=false"),
    ]
    assert main([*small, f"run.dir={tmp_path / 'first'}"]) == 0
    first = read_weights(str(tmp_path / "first"))
    assert (
        main([*small, f"run.dir={tmp_path / 'second'}", f"model.init={tmp_path / 'first'}", "optim.lr=1e-12"])
        == 0
    )
    assert "100.0% of the encoder's parameters" in capsys.readouterr().out
    second = read_weights(str(tmp_path / "second"))
    for name, value in first.tensors.items():
        torch.testing.assert_close(second.tensors[name], value, atol=1e-6, rtol=0)
    own, whole = (cost_of_weights(str(tmp_path / name)) for name in ("first", "second"))
    assert own.images_seen
    assert own.flops
    assert whole == own + own
    newest = sorted((tmp_path / "first" / "checkpoints").glob("step-*"))[-1]
    shutil.copytree(newest, newest.with_name("step-00000099"))
    assert read_weights(str(tmp_path / "first")).unfinished == ""
    summary = tmp_path / "first" / "summary.json"
    summary.write_text(json.dumps({"status": "interrupted", "total_steps": 1815}))
    unfinished = read_weights(str(tmp_path / "first"))
    assert unfinished.notes("first") == ["note: first is not finished: its weights are of step 99 of 1,815"]
    capsys.readouterr()
    third = [*small, f"run.dir={tmp_path / 'third'}", f"model.init={tmp_path / 'first'}", "--dry-run"]
    assert main(third) == 0
    assert "\n  unfinished    its weights are of step 99 of 1,815\n" in capsys.readouterr().out
    summary.write_text('{"status": "interr')
    assert read_weights(str(tmp_path / "first")).unfinished == ""
    damage = newest.with_name("step-00000099") / "parameters.safetensors"
    damage.write_bytes(damage.read_bytes()[:-1] + b"!")
    (newest.parent / "latest").write_text("step-00000099\n")
    again = read_weights(str(tmp_path / "first"))
    assert again.source == str(newest)
    for name, value in first.tensors.items():
        assert torch.equal(again.tensors[name], value)
    objective = [*small, f"run.dir={tmp_path / 'again'}", f"model.init={tmp_path / 'first'}", "--dry-run"]
    capsys.readouterr()
    assert main(objective) == 0
    problem = "passed over   .*step-00000099: parameters.safetensors is damaged"
    assert re.search(problem, capsys.readouterr().out)
    bad = [*small, f"run.dir={tmp_path / 'third'}", f"model.init={tmp_path / 'first'}", "model.num_heads=2"]
    state = next((tmp_path / "first" / "checkpoints").glob("step-*/state.json"))
    assert json.loads(state.read_text())["identity"]["model.num_heads"] in (None, 4)
    assert main(bad) == 2
    assert not (tmp_path / "third").exists()
    for checkpoint in newest.parent.glob("step-*"):
        (checkpoint / "parameters.safetensors").unlink()
    with pytest.raises(InputError, match=r"all 3 checkpoints in .* are broken: .*/encoder.safetensors is"):
        read_weights(str(tmp_path / "first"))
