"""The probe on masks of encoders of others: timm's own maps below a linear layer, and nothing else is trained."""

import json

import pytest
import torch
import torch.nn.functional as F
from helpers.commands import ROOT, one_line
from helpers.finetune import SMALL
from helpers.weights.foreign import KINDS, build, write_backbone
from safetensors import safe_open
from safetensors.torch import load_file

from mae_vit.finetuning.command import main
from mae_vit.finetuning.segmentation.segmenter import ForeignSegmenter
from mae_vit.weights.encoder import load_encoder

WIDTHS = {"dinov2": 24, "swin": 96, "convnext": 20}


@pytest.fixture
def probe(pairs, tmp_path):
    """probe(start, "key=value", ..., mode="segment_probe", name="run") -> exit code, run folder."""

    def run(start, *overrides, mode="segment_probe", name="run"):
        words = [
            "--config",
            str(ROOT / "configs" / "finetune" / "finetune_cifar_tiny.yaml"),
            "--ckpt",
            start,
            *SMALL,
        ]
        place = [f"data.path={pairs}", f"run.dir={tmp_path / name}", "train.effective_batch_size=8"]
        place += ["data.augment.crop=random_resized"]
        return main([*words, *place, f"finetune.mode={mode}", *overrides]), tmp_path / name

    return run


def segmenter_of(file, **options) -> ForeignSegmenter:
    encoder = load_encoder(f"frozen:{file}")
    mean, std = encoder.input.mean, encoder.input.std
    return ForeignSegmenter(encoder, num_classes=3, label_smoothing=0.0, mean=mean, std=std, **options)


@pytest.mark.parametrize("kind", WIDTHS)
def test_its_map_is_timms(kind, tmp_path):
    side = KINDS[kind][2]
    file = write_backbone(tmp_path, kind)
    model, network = segmenter_of(file), build(kind, side, file=file)
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    facts = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    mean, std = (torch.tensor(facts[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        normed = (images / 255 - mean) / std
        expected = network.forward_intermediates(normed, intermediates_only=True, norm=True)[-1]
        drawn = model.feature_map(model.normalize(images))
        torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-6)
        assert drawn.shape[1] == WIDTHS[kind]
        torch.nn.init.normal_(model.decode_head.classifier.weight)
        scores = F.conv2d(
            expected / (1 + 1e-6) ** 0.5,
            model.decode_head.classifier.weight,
            model.decode_head.classifier.bias,
        )
        logits = F.interpolate(scores, (side, side), mode="bilinear", align_corners=False)
        torch.testing.assert_close(model.eval().logits(images), logits, rtol=1e-4, atol=1e-4)


def test_the_head_alone_is_trained(tmp_path):
    model = segmenter_of(write_backbone(tmp_path, "dinov2"))
    model.train()
    assert not any(one.training for one in model.encoder.modules())
    assert model.decode_head.training
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {"decode_head.classifier.weight", "decode_head.classifier.bias"}


@pytest.mark.parametrize(
    "kind", ["dinov2", *(pytest.param(one, marks=pytest.mark.slow) for one in WIDTHS if one != "dinov2")]
)
def test_a_run_keeps_its_weights_and_says_whose_they_are(kind, probe, tmp_path, capsys):
    file = write_backbone(tmp_path / kind, kind)
    start = f"frozen:{file}"
    assert probe(start, "--dry-run")[0] == 0
    assert "trained by others on other data" in capsys.readouterr().out
    code, folder = probe(start, "data.label_draw=1")
    assert code == 0
    assert "trained by others on other data" in capsys.readouterr().out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["start_origin"] == "trained by others on other data"
    assert summary["model"] == f"timm:{KINDS[kind][0]}"
    assert 0 < summary["test_miou"] <= 1
    before, after = load_file(file), load_file(folder / "model.safetensors")
    heads = tuple(
        json.loads((tmp_path / kind / "config.json").read_text())["pretrained_cfg"]["classifier"].split(" ")
    )
    kept = {name for name in before if not name.startswith(heads) and not name.startswith("head.")}
    assert kept <= after.keys()
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert after["decode_head.classifier.weight"].abs().sum() > 0
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert json.loads(weights.metadata()["mae_vit"])["origin"] == "trained by others on other data"
    assert probe(start, "data.label_draw=1")[0] == 0
    assert "is finished" in capsys.readouterr().out
    write_backbone(tmp_path / kind, kind, seed=1)
    assert probe(start, "data.label_draw=1")[0] == 2
    assert "finetune.start_digest was" in one_line(capsys)


@pytest.mark.parametrize(
    ("mode", "overrides", "expected"),
    [
        (
            "segment",
            [],
            "never trained here: give finetune.mode=knn, few_shot, linear_probe or segment_probe",
        ),
        ("segment_probe", ["finetune.pool=cls"], 'finetune.pool="cls" has no effect'),
        ("segment_probe", ["model.img_size=30"], "does not take images of 30x30 px"),
    ],
)
def test_what_does_not_fit_is_one_line(probe, tmp_path, capsys, mode, overrides, expected):
    code, folder = probe(f"frozen:{write_backbone(tmp_path / 'dinov2', 'dinov2')}", *overrides, mode=mode)
    assert code == 2
    assert expected in one_line(capsys)
    assert not folder.exists()
