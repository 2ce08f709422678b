"""Pretrained weights: full coverage where they fit, one line where they do not, no code run."""

import argparse
import pickle
from dataclasses import replace

import pytest
import timm
import torch
from helpers.encoders import info_of
from helpers.weights.official_weights import RunsCode, official

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import encoder_bytes
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.geometry import NetworkGeometry, ViTRopeGeometry
from mae_vit.objectives.config import MAEConfig
from mae_vit.weights import read
from mae_vit.weights.encoder import encoder_from_weights
from mae_vit.weights.load import load_weights
from mae_vit.weights.mae_decoder import read_decoder
from mae_vit.weights.read import read_weights

SIZE = {"img_size": (32, 32), "patch_size": 4, "embed_dim": 64, "depth": 3, "num_heads": 4}


def encoder_of(**changes) -> ViTEncoder:
    return ViTEncoder(**{**SIZE, "pos_embed": "sincos", **changes})


def written(folder, encoder, img_size, patch_size, pos_embed):
    facts = {"img_size": img_size, "patch_size": patch_size, "pos_embed": pos_embed}
    info = info_of(size="S", embed_dim=64, depth=len(encoder.blocks), **facts)
    path = folder / "encoder.safetensors"
    path.write_bytes(encoder_bytes(encoder, info))
    return path


@pytest.mark.parametrize(("decoder", "namespace"), [(False, True), (True, False)])
def test_official_files_are_loaded_in_full(tmp_path, decoder, namespace):
    path = tmp_path / "mae_pretrain.pth"
    model = official(path, decoder=decoder, namespace=namespace)
    section = MAEConfig(name="mae", decoder_embed_dim=48, decoder_depth=2, decoder_num_heads=4)
    objective = section.build(encoder_of(), mean=[0.5] * 3, std=[0.25] * 3)
    before = objective.decoder_embed.weight.clone()
    report = load_weights(read_weights(str(path)), objective.encoder, objective, objective="mae")
    assert report.share == 1
    for name, value in objective.encoder.state_dict().items():
        torch.testing.assert_close(value, model[name])
    if decoder:
        assert (report.random, report.skipped) == ([], ["decoder_pos_embed"])
        for name, value in objective.named_parameters():
            if not name.startswith("encoder."):
                torch.testing.assert_close(value, model[name])
    else:
        assert torch.equal(objective.decoder_embed.weight, before)
        assert "decoder_embed.weight" in report.random


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path, wrapped):
    path, mark = tmp_path / "evil.pth", tmp_path / "mark"
    if wrapped:
        torch.save({"model": {"cls_token": torch.zeros(1)}, "args": RunsCode(str(mark))}, path)
    else:
        path.write_bytes(pickle.dumps(RunsCode(str(mark))))
    with pytest.raises(InputError, match=r"evil\.pth") as error:
        read_weights(str(path))
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_an_encoder_of_ours_is_loaded_by_its_file_or_folder(tmp_path):
    encoder = encoder_of(pos_embed="learnable")
    path = written(tmp_path, encoder, (32, 32), 4, "learnable")
    for source in (tmp_path, path):
        weights = read_weights(str(source))
        assert weights.mean == info_of().mean
        same = encoder_of(pos_embed="learnable")
        assert load_weights(weights, same).share == 1
        assert torch.equal(same.pos_embed, encoder.pos_embed)
    with pytest.raises(InputError, match='"learnable"'):
        load_weights(weights, encoder_of(pos_embed="sincos"))


@pytest.mark.parametrize("pos_embed", ["learnable", "sincos"])
def test_positions_go_from_14x14_to_24x16_as_timm_takes_them(tmp_path, pos_embed):
    """224 px to 384 x 256 px at patch 16, by what timm does to a checkpoint of its own; [CLS]'s is kept."""
    size = {"patch_size": 16, "embed_dim": 64, "depth": 1, "num_heads": 4}
    encoder = ViTEncoder(img_size=(224, 224), pos_embed=pos_embed, **size)
    written(tmp_path, encoder, (224, 224), 16, pos_embed)
    larger = ViTEncoder(img_size=(384, 256), pos_embed="learnable", **size)
    report = load_weights(read_weights(str(tmp_path)), larger)
    assert report.interpolated == {"pos_embed": "14 x 14 -> 24 x 16 patches"}
    theirs = timm.models.vision_transformer.VisionTransformer(img_size=(384, 256), num_classes=0, **size)
    state = timm.models.vision_transformer.checkpoint_filter_fn(encoder.state_dict(), theirs)
    theirs.load_state_dict(state, strict=True)
    torch.testing.assert_close(larger.pos_embed.detach(), theirs.pos_embed.detach(), atol=1e-6, rtol=0)
    assert torch.equal(larger.pos_embed[:, 0], encoder.pos_embed[:, 0])


def test_a_fixed_table_of_another_grid_of_as_many_patches_is_a_fixed_table(tmp_path):
    written(tmp_path, encoder_of(img_size=(16, 64)), (16, 64), 4, "sincos")
    report = load_weights(read_weights(str(tmp_path)), encoder_of())
    assert report.kept == {"pos_embed": "fixed sin-cos table, computed for this img_size"}


@pytest.mark.parametrize("pos_embed", ["learnable", "sincos"])
def test_a_bare_table_is_of_a_square_image(tmp_path, pos_embed):
    """Also for a model of as many patches in another shape; a fixed table of that shape is recognized."""
    square, wide = (encoder_of(img_size=size, pos_embed=pos_embed) for size in ((32, 32), (16, 64)))
    torch.save(square.state_dict(), tmp_path / "bare.pth")
    bare = read_weights(str(tmp_path / "bare.pth"))
    learnable = encoder_of(img_size=(16, 64), pos_embed="learnable")
    assert load_weights(bare, learnable).interpolated == {"pos_embed": "8 x 8 -> 4 x 16 patches"}
    assert not torch.allclose(learnable.pos_embed, square.pos_embed, atol=0.01)
    if pos_embed == "sincos":
        assert set(load_weights(bare, encoder_of(img_size=(16, 64))).kept) == {"pos_embed"}
        torch.save(wide.state_dict(), tmp_path / "wide.pth")
        report = load_weights(read_weights(str(tmp_path / "wide.pth")), learnable)
        assert "pos_embed" in report.loaded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rounded_fixed_table_is_a_fixed_table(tmp_path, dtype):
    rounded = {name: value.to(dtype) for name, value in encoder_of().state_dict().items()}
    torch.save(rounded, tmp_path / "half.pth")
    model = encoder_of()
    assert set(load_weights(read_weights(str(tmp_path / "half.pth")), model).kept) == {"pos_embed"}
    assert torch.equal(model.pos_embed, encoder_of().pos_embed)


@pytest.mark.parametrize(
    "changes",
    [{"patch_size": 8}, {"embed_dim": 32}, {"depth": 2}, {"depth": 4}, {"mlp_ratio": 2.0}, None],
    ids=str,
)
def test_another_geometry_is_named_and_half_a_file_is_another_models(tmp_path, changes, said):
    model = official(tmp_path / "mae.pth", decoder=False)
    if changes is None:
        torch.save({name: v for name, v in model.items() if ".mlp." not in name}, tmp_path / "mae.pth")
    with pytest.raises(InputError) as error:
        load_weights(
            read_weights(str(tmp_path / "mae.pth")),
            encoder_of(**{"pos_embed": "learnable", **(changes or {})}),
        )
    said(error)


def test_a_network_with_rotary_positions_takes_only_its_own_kind(tmp_path, said):
    official(tmp_path / "mae.pth", decoder=False)
    size = {**{key: SIZE[key] for key in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}}
    size |= {"in_chans": 3, "size": "S", "mlp_ratio": 4.0}
    none, four = (ViTRopeGeometry(**size, register_tokens=count) for count in (0, 4))
    for name, geometry in (("none", none), ("four", four)):
        info = replace(info_of(), geometry=geometry)
        (tmp_path / f"{name}.safetensors").write_bytes(encoder_bytes(geometry.build(), info))
    for name, geometry in (("mae.pth", none), ("four.safetensors", none), ("none.safetensors", four)):
        with pytest.raises(InputError) as error:
            load_weights(read_weights(str(tmp_path / name)), geometry.build())
        said(error)


@pytest.mark.parametrize("ratio", [0.6, 2.0, None])
def test_an_official_checkpoint_says_what_its_decoder_predicts(tmp_path, ratio):
    size = {"decoder_embed_dim": 512, "decoder_depth": 1, "decoder_num_heads": 16}
    path = tmp_path / "mae.pth"
    official(path, decoder=True, width=128, depth=6, **size)
    args = argparse.Namespace(norm_pix_loss=True, mask_ratio=ratio)
    torch.save({**torch.load(path), "args": args}, path)
    weights = read_weights(str(path))
    encoder = encoder_from_weights(weights)
    decoder = read_decoder(weights, encoder.encoder, encoder.info)
    assert (decoder.notes, decoder.config.norm_pix_loss) == ((), True)
    assert decoder.config.mask_ratio == (0.6 if ratio == 0.6 else 0.75)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "nowhere",
            "https://host/a.pth",
            "facebook/vit-mae-base",
            "vit_base_patch16_224.mae",
            "emtpy",
            "empty",
        ),
        *("timm:vit_base_patch16_225", "timm:vit_tiny_patch16_224.nope", "timm:test_vit"),
    ],
)
def test_what_is_not_there_has_a_hint(tmp_path, monkeypatch, name, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no waiting for a network
    (tmp_path / "empty").mkdir()
    elsewhere = "/" in name or name.startswith(("vit_", "timm:"))
    with pytest.raises(InputError) as error:
        read_weights(name if elsewhere else str(tmp_path / name))
    said(error)


@pytest.fixture
def fresh_timm(monkeypatch):
    """timm's models without their weights, which are not here."""
    create = timm.create_model
    monkeypatch.setattr(read, "check_reachable", lambda *_: None)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained, **options: create(name, **options))


def test_a_timm_model_of_our_kind_is_loaded_in_full(fresh_timm):
    weights = read_weights("timm:test_vit")
    encoder = weights.geometry.build()
    assert load_weights(weights, encoder).share == 1
    model = timm.create_model("test_vit", pretrained=False, num_classes=0).eval()
    model.load_state_dict(weights.tensors)
    images = torch.randn(1, 3, *weights.geometry.img_size)
    torch.testing.assert_close(encoder.eval().forward_features(images), model.forward_features(images))
    weights.tensors["pos_embed"] = weights.tensors["pos_embed"][:, 2:]
    rows, columns = encoder.grid_size
    with pytest.raises(InputError, match=f"{rows * columns - 1} rows for {rows} x {columns}"):
        load_weights(weights, encoder)


def test_a_timm_model_without_biases_has_biases_of_zero(fresh_timm):
    with torch.device("meta"):
        weights = read_weights("timm:vit_base_patch16_224_miil")
    assert weights.tensors.keys() == weights.geometry.build().state_dict().keys()


@pytest.mark.parametrize(
    "name",
    [
        *("vit_base_patch32_clip_quickgelu_224", "vit_base_patch32_clip_224", "vit_base_patch16_rpn_224"),
        *("vit_base_patch16_18x2_224", "vit_small_r26_s32_224"),
    ],
)
def test_timm_models_that_compute_something_else_stay_timms(fresh_timm, name):
    # Large ones, and none of their numbers is needed.
    with torch.device("meta"):
        weights = read_weights(f"timm:{name}")
    assert weights.network.name == f"timm:{name}"
    assert weights.geometry == NetworkGeometry(weights.network.images.img_size, 1, 3, f"timm:{name}")
