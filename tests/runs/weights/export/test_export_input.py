"""What cannot be exported is one line, and leaves nothing; and what cards say."""

import resource
import sys

import pytest
import timm
import torch
from helpers.encoders import encoder_file
from helpers.export import classifier_file, export, mae_run
from helpers.objectives import section_of
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from mae_vit.core.errors import InputError
from mae_vit.models.encoder_file import EncoderInfo, encoder_bytes, read_metadata, to_metadata
from mae_vit.weights.export import to_timm
from mae_vit.weights.export.source import Written


@pytest.fixture
def path(tmp_path):
    return encoder_file(tmp_path / "encoder.safetensors")


def refused(capsys, *arguments) -> str:
    assert export(*arguments) == 2
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    assert printed.out == ""
    return lines[0]


def test_what_is_computed_otherwise_is_an_error_and_leaves_nothing(path, tmp_path, capsys, monkeypatch):
    create = timm.create_model

    def tampered(name, **options):
        model = create(name, **options)
        with torch.no_grad():
            model.norm.bias[3] += 0.01
        return model

    monkeypatch.setattr(to_timm.timm, "create_model", tampered)
    line = refused(capsys, path, "--to", "timm", "--out", tmp_path / "out")
    assert "differ by 0.0" in line
    assert [child.name for child in tmp_path.iterdir()] == ["encoder.safetensors"]


def test_weights_that_are_not_finite_are_refused(tmp_path, capsys, said):
    path = encoder_file(tmp_path / "encoder.safetensors")
    tensors = load_file(path)
    tensors["norm.bias"][0] = torch.nan
    save_file(tensors, path, metadata=to_metadata(read_metadata(path)))
    said(refused(capsys, path, "--to", "timm", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["timm", "hf", "official", "torch"])
def test_a_full_disk_leaves_the_earlier_export(path, tmp_path, capsys, to):
    out = tmp_path / "out"
    assert export(path, "--to", "timm", "--out", out) == 0
    before = (out / "model.safetensors").read_bytes()
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        line = refused(capsys, path, "--to", to, "--out", out, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{out}: file too large" in line
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(child.name for child in tmp_path.iterdir()) == ["encoder.safetensors", "out"]


def test_an_export_is_replaced_by_force_alone_and_nothing_else_ever(
    path, tmp_path, capsys, said, monkeypatch
):
    out = tmp_path / "out"
    assert export(path, "--to", "timm", "--out", out) == 0
    capsys.readouterr()
    said(refused(capsys, path, "--to", "torch", "--out", out))
    assert export(path, "--to", "official", "--out", out, "--force") == 0
    assert sorted(child.name for child in out.iterdir()) == ["README.md", "model.pth"]
    capsys.readouterr()
    (out / "notes.txt").write_text("mine")
    said(refused(capsys, path, "--to", "timm", "--out", out, "--force"))
    # A folder of runs, of which one is named as a part of an export is.
    runs = tmp_path / "runs"
    (runs / "mae").mkdir(parents=True)
    said(refused(capsys, path, "--to", "timm", "--out", runs, "--force"))
    assert (runs / "mae").is_dir()
    said(refused(capsys, path, "--to", "timm", "--out", out / "notes.txt"))
    monkeypatch.chdir(runs / "mae")
    said(refused(capsys, path, "--to", "timm", "--out", "."))


@pytest.mark.parametrize(
    "words",
    [
        *("--to tim", "--to hf --overwrite", "--to onnx --out a.onnx", "--to hf --pool mean"),
        "--to official --pool cls",
    ],
)
def test_options_that_do_not_fit(path, capsys, words, said):
    said(refused(capsys, path, *words.split()))


def test_what_others_cannot_represent(tmp_path, capsys, said):
    wide = encoder_file(tmp_path / "wide.safetensors", img_size=(16, 24))
    said(refused(capsys, wide, "--to", "official", "--out", tmp_path / "out"))
    classifier_file(tmp_path / "model.safetensors", pool="mean")
    said(refused(capsys, tmp_path / "model.safetensors", "--to", "hf", "--out", tmp_path / "out"))
    said(refused(capsys, tmp_path / "model.safetensors", "--to", "timm", "--pool", "cls"))
    assert not (tmp_path / "out").exists()
    # An encoder is exported all the same where only its decoder cannot be.
    mae_run(tmp_path / "run", img_size=(16, 24))
    assert export(tmp_path / "run", "--to", "hf", "--out", tmp_path / "out") == 0
    assert "without its decoder" in capsys.readouterr().out
    assert not (tmp_path / "out" / "mae").exists()


@pytest.mark.parametrize("to", ["torch", "timm"])
@pytest.mark.parametrize("encoder", ["rotary", "convolutions", "bands of a timm network"])
def test_other_families_are_refused(tmp_path, capsys, said, encoder, to):
    geometry = section_of(encoder).geometry()
    facts = {"mean": [0.5] * geometry.in_chans, "std": [0.2] * geometry.in_chans, "objective": "simmim"}
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(encoder_bytes(geometry.build(), EncoderInfo(geometry, **facts)))
    said(refused(capsys, path, "--to", to, "--out", tmp_path / "out"))


def test_a_missing_library_is_named_with_what_installs_it(path, tmp_path, capsys, monkeypatch, said):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    said(refused(capsys, path, "--to", "onnx", "--out", tmp_path / "out"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    said(refused(capsys, path, "--to", "hf", "--out", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_card_tells_what_the_weights_say(tmp_path):
    path = encoder_file(tmp_path / "encoder.safetensors", images_seen=700, flops=1.5e12)
    assert export(path, "--to", "timm", "--out", tmp_path / "out") == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "timm"
    assert "vision-transformer" in card.data.tags
    for words in (
        "7 steps, 700 images seen",
        "1.5e+12 model FLOPs",
        "mean [0.4, 0.5, 0.6]",
        "Objective: mae",
    ):
        assert words in card.text, words
    assert str(tmp_path) not in card.content


@pytest.mark.parametrize(
    ("size", "error", "same"), [(0.1, 5e-5, True), (0.1, 2e-4, False), (300, 2e-2, True), (300, 0.1, False)]
)
def test_outputs_agree_to_a_share_of_the_largest(size, error, same):
    ours = torch.full((3, 4), float(size))
    written = Written({"features": (ours, ours + error)}, "")
    if same:
        assert written.largest_difference("timm") <= 1e-4
    else:
        with pytest.raises(InputError, match="features differ by"):
            written.largest_difference("timm")
