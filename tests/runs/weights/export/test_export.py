"""Every form that is exported, loaded by the library that it is for: the same features as ours."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from helpers.encoders import encoder_file, info_of
from helpers.export import classifier_file, close, export, images_for, mae_run, run_card
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, ViTForImageClassification, ViTMAEForPreTraining, ViTModel

import mae_vit
from mae_vit.core.bands import Bands
from mae_vit.core.preprocessing import Preprocessing
from mae_vit.models.encoder_file import read_info
from mae_vit.models.masking import random_masking
from mae_vit.weights.read import read_weights

PROGRAMS = ["onnx", "torch"]
FIVE = Bands(("blue", "green", "red", "nir", "swir"), "uint16", (0.0, 1.0, 2.0, 3.0, 4.0), (900.0,) * 5, 7.0)
OF_FIVE = {"in_chans": 5, "mean": (0.1, 0.2, 0.3, 0.4, 0.5), "std": (0.2, 0.3, 0.4, 0.5, 0.6), "bands": FIVE}


def images(count=5, **changes):
    return images_for(info_of(**changes), count)


def run_program(out: Path, pixels: torch.Tensor) -> torch.Tensor:
    if (out / "model.pt2").exists():
        return torch.export.load(out / "model.pt2").module()(pixels)
    import onnxruntime

    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": pixels.numpy()})[0])


def run_on_photograph(out: Path, monkeypatch, *, sides: tuple[int, int] = (62, 43), **options) -> dict:
    """Runs the card's code on something as smooth as a photograph beside it."""
    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 3), dtype=np.uint8)
    # Without loss, whatever its name: decoders of JPEG differ.
    smooth = Image.fromarray(pixels).resize(sides, Image.Resampling.BICUBIC)
    smooth.save(out.parent / "image.jpg", "PNG", **options)
    return run_card(out, monkeypatch)


GEOMETRIES = [
    {"pos_embed": "learnable"},
    {"img_size": (16, 24), "in_chans": 1, "mean": (0.3,), "std": (0.2,)},
    {"mlp_ratio": 2.0, "embed_dim": 48, "num_heads": 3, "size": "B"},
]


@pytest.mark.parametrize(
    ("changes", "pool"), [*((changes, "mean") for changes in GEOMETRIES), (GEOMETRIES[0], "cls")]
)
def test_timm_builds_it_by_the_cards_line(tmp_path, monkeypatch, capsys, changes, pool):
    path = encoder_file(tmp_path / "encoder.safetensors", **changes)
    assert export(path, "--to", "timm", "--out", tmp_path / "out", "--pool", pool) == 0
    output = capsys.readouterr().out
    assert "verified" in output
    ours = mae_vit.load_encoder(path, pool=pool)
    found = run_on_photograph(tmp_path / "out", monkeypatch)
    close(found["model"](images(**changes)), ours(images(**changes)))
    assert found["features"].shape == (1, ours.embed_dim)
    # The card's pixels are those of `transform`, but for rounding of another resampling.
    expected = ours.transform("../image.jpg")[None]
    assert (found["images"] - expected).abs().max() < 2.5 / 255 / min(ours.info.std)
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    close(model(images(**changes)), ours(images(**changes)))
    assert model.num_classes == 0
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (ours.info.in_chans, *ours.info.img_size)
    assert (data["mean"], data["std"]) == ([*ours.info.mean], [*ours.info.std])
    assert (data["crop_pct"], data["interpolation"]) == (1.0, "bicubic")
    # It is a start of ours as well, with all that it said before.
    again = mae_vit.load_encoder(tmp_path / "out" / "model.safetensors")
    assert (again.info.mean, again.info.vit.num_heads) == (ours.info.mean, ours.info.vit.num_heads)
    assert again.pool == pool


@pytest.mark.parametrize(
    ("to", "pool"),
    [
        ("timm", "cls"),
        ("official", "mean"),
        ("torch", "mean"),
        pytest.param("onnx", "mean", marks=pytest.mark.slow),
    ],
)
def test_a_classifier_keeps_its_head(tmp_path, pool, to):
    logits = classifier_file(tmp_path / "run" / "model.safetensors", pool=pool)
    out = tmp_path / "out"
    assert export(tmp_path / "run", "--to", to, "--out", out) == 0
    if to in PROGRAMS:
        found = run_program(out, images())
    else:
        own = {"global_pool": "avg"} if pool == "mean" else {}
        model = timm.create_model(
            "vit_tiny_patch16_224",
            **{"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4},
            num_classes=2,
            **own,
        ).eval()
        file = out / ("model.safetensors" if to == "timm" else "model.pth")
        state = load_file(file) if to == "timm" else torch.load(file, weights_only=True)["model"]
        model.load_state_dict(state, strict=True)
        found = model(images())
    close(found, logits(images()))
    assert "cat, dog" in (out / "README.md").read_text()


@pytest.mark.parametrize(("to", "changes"), [("hf", GEOMETRIES[0]), ("timm", GEOMETRIES[1])])
def test_what_was_done_to_the_images_of_training_is_in_the_export(tmp_path, monkeypatch, changes, to):
    how = Preprocessing(exif_orientation="apply", resize=40, quality=90)
    path, out = encoder_file(tmp_path / "encoder.safetensors", preprocessing=how, **changes), tmp_path / "out"
    assert export(path, "--to", to, "--out", out) == 0
    sentence = how.describe(in_bands=False)
    assert sentence in (out / "README.md").read_text()
    if to == "hf":
        assert json.loads((out / "preprocessor_config.json").read_text())["mae_vit_beforehand"] == sentence
        AutoImageProcessor.from_pretrained(out)
    exif = Image.Exif()
    exif[274] = 6
    images = run_on_photograph(out, monkeypatch, sides=(120, 90), exif=exif)["images"][0]
    expected = mae_vit.load_encoder(path).transform(tmp_path / "image.jpg")
    assert (images - expected).abs().max() < 3 / 255 / min(read_info(path).std)
    if to == "timm":
        again = mae_vit.load_encoder(out / "model.safetensors")
        assert torch.equal(again.transform(tmp_path / "image.jpg"), expected)
    plain = encoder_file(tmp_path / "plain.safetensors", **changes)
    assert (images - mae_vit.load_encoder(plain).transform(tmp_path / "image.jpg")).abs().max() > 0.2


@pytest.mark.parametrize(
    ("to", "changes"),
    [
        ("torch", GEOMETRIES[0]),
        ("torch", GEOMETRIES[1]),
        ("onnx", GEOMETRIES[1]),
        pytest.param("onnx", GEOMETRIES[0], marks=pytest.mark.slow),
    ],
)
def test_programs_take_any_number_of_images(tmp_path, monkeypatch, to, changes):
    path = encoder_file(tmp_path / "encoder.safetensors", **changes)
    out = tmp_path / "out"
    assert export(path, "--to", to, "--out", out, "--pool", "mean") == 0
    ours = mae_vit.load_encoder(path, pool="mean")
    for count in (1, 2, 7):
        close(run_program(out, images(count, **changes)), ours(images(count, **changes)))
    found = run_on_photograph(out, monkeypatch)
    close(torch.as_tensor(found["features"]), ours(found["images"]))
    names_no_files(out / ("model.pt2" if to == "torch" else "model.onnx"))
    metadata = json.loads(metadata_of_program(out))
    assert metadata["pool"] == "mean"
    info = json.loads(json.dumps(read_info(path).to_dict()))
    info.pop("class_tokens", None)  # files of one class token do not state it
    assert {name: metadata[name] for name in info} == info


def metadata_of_program(out: Path) -> str:
    """What a program says of itself, as its own library reads it."""
    if (out / "model.pt2").exists():
        extra = {"mae_vit.json": ""}
        torch.export.load(out / "model.pt2", extra_files=extra)
        return extra["mae_vit.json"]
    import onnx

    return {prop.key: prop.value for prop in onnx.load(out / "model.onnx").metadata_props}["mae_vit"]


def names_no_files(program: Path) -> None:
    """Traces name the lines that they were made from."""
    parts = [program.read_bytes()]
    if program.suffix == ".pt2":
        with zipfile.ZipFile(program) as archive:
            parts += [archive.read(name) for name in archive.namelist()]
    home = str(Path(mae_vit.__file__).parents[1]).encode()
    assert not any(word in part for part in parts for word in (home, b"site-packages"))


@pytest.mark.parametrize("changes", GEOMETRIES)
def test_transformers_loads_it(tmp_path, monkeypatch, changes):
    path = encoder_file(tmp_path / "encoder.safetensors", **changes)
    out = tmp_path / "out"
    assert export(path, "--to", "hf", "--out", out) == 0
    ours = mae_vit.load_encoder(path)
    model = ViTModel.from_pretrained(out, add_pooling_layer=False).eval()
    close(model(images(**changes)).last_hidden_state[:, 1:].mean(dim=1), ours(images(**changes)))
    # Too little to be seen in features of such small networks.
    assert model.config.layer_norm_eps == 1e-6
    assert not (out / "mae").exists()
    # With sides by which its box is the same.
    found = run_on_photograph(out, monkeypatch, sides=(60, 40))
    if ours.info.img_size[0] == ours.info.img_size[1]:
        picture = Image.open("../image.jpg").convert("L" if ours.info.in_chans == 1 else "RGB")
        pixels = AutoImageProcessor.from_pretrained(out)(images=picture, return_tensors="pt").pixel_values
        assert (pixels - found["images"]).abs().max() < 4 / 255 / min(ours.info.std)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_pix_loss": False, "mask_ratio": 0.6, "pos_embed": "learnable"},
        {"in_chans": 1, "mean": (0.3,), "std": (0.2,), "joint": True},
    ],
)
def test_transformers_reconstructs_as_we_do(tmp_path, monkeypatch, changes):
    mae = mae_run(tmp_path / "run", **changes)
    out = tmp_path / "out"
    assert export(tmp_path / "run", "--to", "hf", "--out", out) == 0
    theirs = ViTMAEForPreTraining.from_pretrained(out / "mae").eval()
    changes = {
        key: value for key, value in changes.items() if key in ("pos_embed", "in_chans", "mean", "std")
    }
    pixels, noise = images(**changes), torch.rand(5, 16)
    with torch.no_grad():
        found = theirs(pixels, noise=noise)
        masking = random_masking(noise, mae.mask_ratio)
        prediction, mask = mae.predict_all(pixels, masking), masking.mask
        assert torch.equal(found.mask, mask)
        close(found.logits, prediction)
        loss = mae.squared_error(pixels, prediction)[mask.bool()].mean()
        assert found.loss.item() == pytest.approx(loss.item(), rel=1e-5)
        model = ViTModel.from_pretrained(out, add_pooling_layer=False).eval()
        close(model(pixels).last_hidden_state, mae.encoder.forward_features(pixels))
    assert run_on_photograph(out, monkeypatch)["prediction"].shape == (1, 16, 16 * pixels.shape[1])


def test_a_classifier_of_the_cls_token_is_transformers_too(tmp_path):
    logits = classifier_file(tmp_path / "model.safetensors", pool="cls")
    assert export(tmp_path / "model.safetensors", "--to", "hf", "--out", tmp_path / "out") == 0
    model = ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    close(model(images()).logits, logits(images()))
    assert model.config.id2label == {0: "cat", 1: "dog"}
    # It is a classifier of ours as well.
    close(mae_vit.load_classifier(tmp_path / "out")(images()), logits(images()))
    assert export(tmp_path / "out", "--to", "timm", "--out", tmp_path / "timm") == 0
    again = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    close(again(images()), logits(images()))


@pytest.mark.parametrize("mlp_ratio", [4.0, 2.0])
def test_the_official_layout_comes_back_to_the_bit(tmp_path, monkeypatch, capsys, mlp_ratio):
    # Its geometry can be read from shapes alone: width and depth are those of "tiny-cifar".
    mae = mae_run(tmp_path / "run", embed_dim=128, depth=6, mlp_ratio=mlp_ratio)
    out = tmp_path / "out"
    assert export(tmp_path / "run", "--to", "official", "--out", out) == 0
    # The official code has one ratio for both.
    assert ("once its decoder_blocks have mlp_ratio=4" in capsys.readouterr().out) == (mlp_ratio != 4)
    content = torch.load(out / "model.pth", weights_only=True)
    assert list(content) == ["model"]
    own = {name.removeprefix("encoder."): value for name, value in mae.state_dict().items()}
    assert content["model"].keys() == own.keys()
    assert all(torch.equal(content["model"][name], value) for name, value in own.items())
    weights = read_weights(str(out / "model.pth"))
    assert weights.objective == "mae"
    again, first = (mae_vit.load_encoder(path, pool="mean") for path in (out / "model.pth", tmp_path / "run"))
    assert torch.equal(again(images()), first(images()))
    assert run_on_photograph(out, monkeypatch)["features"].shape == (1, 128)


def test_an_official_file_of_the_official_decoder_goes_to_transformers(tmp_path, capsys):
    """Of another's file nothing tells the decoder's heads: those of the official width are known."""
    from mae_vit.objectives.config import MAEConfig

    info = info_of(embed_dim=128, depth=6)
    mae = MAEConfig(name="mae", decoder_depth=1).build(info.geometry.build(), mean=info.mean, std=info.std)
    tensors = {name.removeprefix("encoder."): value for name, value in mae.state_dict().items()}
    torch.save({"model": tensors}, tmp_path / "mae.pth")
    assert export(tmp_path / "mae.pth", "--to", "hf", "--out", tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "mae" / "config.json").read_text())
    assert config["decoder_num_attention_heads"] == 16
    assert "norm_pix_loss=" in capsys.readouterr().out


@pytest.mark.parametrize(
    "to",
    [
        "timm",
        "official",
        "torch",
        pytest.param("hf", marks=pytest.mark.slow),
        pytest.param("onnx", marks=pytest.mark.slow),
    ],
)
def test_the_card_of_five_bands_reads_raw_values_as_transform_does(tmp_path, monkeypatch, to):
    path, out = encoder_file(tmp_path / "encoder.safetensors", **OF_FIVE), tmp_path / "out"
    assert export(path, "--to", to, "--out", out) == 0
    raw = np.random.default_rng(0).integers(0, 1000, (5, 16, 20)).astype(np.uint16)
    raw[1, 3:6] = 7
    np.save(tmp_path / "image.npy", raw)
    card = (out / "README.md").read_text()
    for words in ("| nir | 3 | 900 | 0.4 | 0.5 |", "Missing values (7)", "uint16 (5, height, width)"):
        assert words in card
    found = run_card(out, monkeypatch)
    encoder = mae_vit.load_encoder(path)
    images = encoder.transform(raw)[None]
    torch.testing.assert_close(found["images"], images, atol=1e-5, rtol=1e-5)
    close(torch.as_tensor(found["features"]), encoder(images))
