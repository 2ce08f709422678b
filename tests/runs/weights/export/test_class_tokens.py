"""Encoders of several class tokens: what each form keeps, and what it says where it cannot."""

import json

import pytest
import timm
import torch
from helpers.encoders import encoder_file, info_of
from helpers.export import classifier_file, close, export, images_for
from safetensors.torch import load_file
from transformers import PixioModel

import mae_vit
from mae_vit.models.encoder_file import read_metadata

IMAGES = images_for(info_of())


@pytest.fixture
def path(tmp_path):
    return encoder_file(tmp_path / "encoder.safetensors", class_tokens=4, pos_embed="learnable")


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_timm_has_them_as_register_tokens(path, tmp_path, capsys, pool):
    out = tmp_path / "out"
    assert export(path, "--to", "timm", "--out", out, "--pool", pool) == 0
    assert ("does not pool" in capsys.readouterr().out) == (pool == "cls")
    model = timm.create_model(
        "vit_tiny_patch16_224",
        **{"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4},
        **{
            "num_classes": 0,
            "reg_tokens": 3,
            "global_pool": "" if pool == "cls" else "avg",
            "fc_norm": False,
        },
    )
    model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    theirs = model.eval()(IMAGES)
    theirs = theirs[:, :4].mean(dim=1) if pool == "cls" else theirs
    close(theirs, mae_vit.load_encoder(path, pool=pool)(IMAGES))
    # What was exported is read back whole.
    close(mae_vit.load_encoder(out / "model.safetensors", pool=pool)(IMAGES), theirs)


def test_transformers_has_pixio_for_them(path, tmp_path):
    out = tmp_path / "out"
    assert export(path, "--to", "hf", "--out", out) == 0
    model = PixioModel.from_pretrained(out).eval()
    ours = mae_vit.load_encoder(path, pool="cls")
    close(model(pixel_values=IMAGES).pooler_output, ours(IMAGES))
    close(model(pixel_values=IMAGES).last_hidden_state, ours.encoder.forward_features(IMAGES))
    close(mae_vit.load_encoder(out, pool="cls")(IMAGES), ours(IMAGES))


def test_forms_that_cannot_say_so(path, tmp_path, capsys, said):
    classifier = tmp_path / "tuned" / "model.safetensors"
    classifier_file(classifier, pool="mean", class_tokens=4)
    tensors = load_file(classifier)
    assert tensors["reg_token"].shape == (1, 3, 32)
    for weights, form in ((path, "official"), (classifier, "hf")):
        out = tmp_path / form
        assert export(weights, "--to", form, "--out", out) == 2
        said(capsys.readouterr().err)
        assert not out.exists()
    by_cls = tmp_path / "by_cls" / "model.safetensors"
    classifier_file(by_cls, pool="cls", class_tokens=4)
    assert export(by_cls, "--to", "timm", "--out", tmp_path / "out") == 2
    said(capsys.readouterr().err)
    assert export(classifier, "--to", "timm", "--out", tmp_path / "out") == 0


def test_positions_are_interpolated_behind_all_class_tokens(path):
    plain, larger = mae_vit.load_encoder(path), mae_vit.load_encoder(path, img_size=24)
    assert larger.encoder.pos_embed.shape == (1, 4 + 36, 32)
    assert torch.equal(larger.encoder.pos_embed[:, :4], plain.encoder.pos_embed[:, :4])


def test_files_of_one_class_token_do_not_state_it(tmp_path, path):
    assert read_metadata(path)["class_tokens"] == 4
    plain = encoder_file(tmp_path / "plain.safetensors")
    assert "class_tokens" not in json.dumps(read_metadata(plain))
    assert mae_vit.load_encoder(plain).info.vit.class_tokens == 1
