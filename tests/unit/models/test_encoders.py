"""What the families of encoders promise beyond the objectives' contract tests."""

from functools import partial

import pytest
import timm
import torch
from safetensors.torch import load_file

from mae_vit.config.encoders import ENCODERS, family_of
from mae_vit.core.errors import InputError
from mae_vit.finetuning.models.classifiers import NetworkClassifier, ViTClassifier
from mae_vit.models.encoder_file import EncoderInfo, encoder_bytes, read_info
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.encoders.baselines import build_network
from mae_vit.models.encoders.vit_rope import ViTRopeEncoder
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.training.optim import layer_scales
from mae_vit.weights.encoder import load_encoder
from mae_vit.weights.read import read_weights

ROPE = {
    "family": "vit_rope",
    "name": "tiny-cifar",
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
}
NETWORKS = ("SimpleCNN", "SmallBiT", "timm:resnet18", "timm:convnext_atto")
NORMALIZED = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


def encoder_of(img_size: int | list[int] = 16, **options) -> Encoder:
    torch.manual_seed(0)
    values = {"img_size": img_size, **options}
    return ENCODERS[family_of(values)].model_validate(values).geometry().build().eval()


def written(encoder: Encoder, folder, geometry) -> str:
    path = folder / "encoder.safetensors"
    path.write_bytes(encoder_bytes(encoder, EncoderInfo(geometry, **NORMALIZED, objective="simmim")))
    return str(path)


def test_rotary_attention_is_that_of_timms_dinov3():
    """timm's own forward pass, on timm's own model, from the same state."""
    encoder = encoder_of([8, 24], **ROPE)
    theirs = timm.create_model(
        "vit_small_patch16_dinov3_qkvb",
        **{"img_size": (8, 24), "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2},
        **{"init_values": 1.0, "num_classes": 0, "norm_layer": partial(timm.layers.LayerNorm, eps=1e-6)},
    ).eval()
    missing, unexpected = theirs.load_state_dict(encoder.state_dict(), strict=False)
    assert not unexpected
    assert {name.rpartition(".")[2] for name in missing} == {"gamma_1", "gamma_2"}  # layer scale, of ones
    images = torch.randn(3, 3, 8, 24)
    torch.testing.assert_close(encoder.forward_features(images), theirs.forward_features(images))


def test_rotary_weights_take_any_size_of_images(tmp_path):
    encoder = encoder_of(**ROPE)
    geometry = ENCODERS["vit_rope"].model_validate({"img_size": 16, **ROPE}).geometry()
    path = written(encoder, tmp_path, geometry)
    larger = load_encoder(path, img_size=[24, 8])
    assert isinstance(larger.encoder, ViTRopeEncoder)
    assert larger.encoder.grid_size == (6, 2)
    for name, value in larger.encoder.state_dict().items():
        assert torch.equal(value, encoder.state_dict()[name]), name
    assert read_info(tmp_path / "encoder.safetensors").geometry == geometry
    again = load_encoder(path)
    images = torch.randn(2, 3, 16, 16)
    expected = encoder.forward_features(images)[:, 5:].mean(dim=1)
    torch.testing.assert_close(again.features(images), expected)
    assert again.patch_map(images).shape == (2, 32, 4, 4)


def test_a_network_whose_layers_timm_does_not_define_is_an_encoder():
    encoder = encoder_of(32, name="timm:poolformerv2_s12")
    with pytest.raises(InputError, match="layer_decay"):
        encoder.layer_of(next(iter(dict(encoder.named_parameters()))))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_gives_the_features_that_its_head_reads(name):
    encoder = encoder_of(32, name=name)
    torch.manual_seed(0)
    whole = build_network(name, num_classes=2, in_chans=3, img_size=(32, 32)).eval()
    missing, unexpected = whole.load_state_dict(encoder.weights(), strict=False)
    assert not unexpected
    assert len(missing) == 2  # weight and bias of the head
    classifier = NetworkClassifier(whole, **NORMALIZED, labels=LabelLoss(2))
    for held, _ in encoder.named_parameters():
        assert encoder.layer_of(held) == classifier.layer_of(held), held
    scales = layer_scales(classifier, 0.5)
    by_layer = [scales[f"network.{name}"] for name, _ in whole.named_parameters()]
    assert by_layer[-1] == max(by_layer) == 1
    assert min(by_layer) == by_layer[0] < 0.25
    images = torch.randn(2, 3, 32, 32)
    layers = torch.nn.Linear | torch.nn.Conv2d
    head = next(module for module in reversed([*whole.modules()]) if isinstance(module, layers))
    features = []
    head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].flatten(1)))
    whole(images)
    tokens = encoder.forward_features(images)
    assert tokens.shape == (2, encoder.feature_grid[0] * encoder.feature_grid[1], encoder.embed_dim)
    if name != "timm:convnext_atto":  # its head norms the mean
        torch.testing.assert_close(tokens.mean(dim=1), features[0], rtol=1e-4, atol=1e-5)


def test_a_pretrained_network_is_fine_tuned_with_a_new_head(tmp_path):
    encoder = encoder_of(16, name="SmallResNet")
    geometry = ENCODERS["network"].model_validate({"img_size": 16, "name": "SmallResNet"}).geometry()
    with torch.no_grad():
        for value in encoder.parameters():
            value.add_(1.0)
    weights = read_weights(written(encoder, tmp_path, geometry))
    network = build_network("SmallResNet", num_classes=5, in_chans=3, img_size=(16, 16))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    model = NetworkClassifier(network, **NORMALIZED, labels=LabelLoss(5))
    report = model.load(weights)
    assert report.share == 1
    for name, value in network.state_dict().items():
        source = before if name.startswith("11.") else encoder.weights()
        assert torch.equal(value, source[name]), name
    features = load_encoder(str(tmp_path / "encoder.safetensors"))
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(features.features(images), encoder.forward_features(images).mean(dim=1))


def test_weights_of_another_family_are_refused(tmp_path):
    geometry = ENCODERS["vit_rope"].model_validate({"img_size": 16, **ROPE}).geometry()
    weights = read_weights(written(encoder_of(**ROPE), tmp_path, geometry))
    vit = encoder_of(name="tiny-cifar", patch_size=4, embed_dim=32, depth=2, num_heads=2)
    model = ViTClassifier(vit, pool="mean", head_init="zero", **NORMALIZED, labels=LabelLoss(2))
    with pytest.raises(ValueError, match="vit_rope"):
        model.load(weights)


def test_weights_of_a_network_with_other_channels_are_one_line(tmp_path):
    section = ENCODERS["network"].model_validate({"img_size": 32, "name": "SmallResNet", "in_chans": 1})
    weights = read_weights(
        written(encoder_of(32, name="SmallResNet", in_chans=1), tmp_path, section.geometry())
    )
    network = build_network("SmallResNet", num_classes=2, in_chans=3, img_size=(32, 32))
    with pytest.raises(InputError, match=r"\[16, 1, 3, 3\] there, \[16, 3, 3, 3\] here"):
        NetworkClassifier(network, **NORMALIZED, labels=LabelLoss(2)).load(weights)


def test_files_hold_timms_names(tmp_path):
    geometry = ENCODERS["network"].model_validate({"img_size": 32, "name": "timm:resnet18"}).geometry()
    path = written(encoder_of(32, name="timm:resnet18"), tmp_path, geometry)
    timm.create_model("resnet18", num_classes=0).load_state_dict(load_file(path))
