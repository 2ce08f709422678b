"""The convolutional baselines: published sizes, output shapes, names of timm's."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mae_vit.finetuning.models.classifiers import NetworkClassifier, ViTClassifier
from mae_vit.models.encoders.baselines import build_network, check_network
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.models.sizes import WITHOUT_DROP_PATH
from mae_vit.objectives.label_loss import LabelLoss

COUNTS = {"SimpleCNN": 141_354, "SmallResNet": 175_258, "SmallBiT": 696_234}


@pytest.mark.parametrize("name", COUNTS)
def test_networks_of_our_own_have_the_published_sizes(name):
    with torch.device("meta"):
        network = build_network(name, num_classes=10, in_chans=3, img_size=(32, 32), drop_path_rate=0.1)
    assert sum(p.numel() for p in network.parameters()) == COUNTS[name]
    rates = {getattr(module, "drop_prob", 0) or 0 for module in network.modules()}
    assert max(rates) == pytest.approx(0.1 if name not in WITHOUT_DROP_PATH else 0)
    has_batch_norm = any(isinstance(module, torch.nn.BatchNorm2d) for module in network.modules())
    assert has_batch_norm == (name in WITHOUT_DROP_PATH)
    other = build_network(name, num_classes=7, in_chans=1, img_size=(16, 24)).eval()
    assert other(torch.randn(2, 1, 16, 24)).shape == (2, 7)


@pytest.mark.parametrize(("head_init", "low", "high"), [("zero", 0, 0), ("small", 1e-5, 3e-5)])
def test_heads_begin_as_they_should(head_init, low, high):
    encoder = ViTEncoder(img_size=(8, 8), patch_size=2, embed_dim=64, depth=1, num_heads=2)
    model = ViTClassifier(
        encoder, pool="cls", head_init=head_init, mean=[0.5] * 3, std=[0.2] * 3, labels=LabelLoss(50)
    )
    assert low <= model.head.weight.std() <= high
    assert not model.head.bias.any()


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match=r'"resnet19".*"resnet18"'):
        check_network("timm:resnet19")


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "resnet18", "vgg11"])
def test_stochastic_depth_is_what_the_config_says(name):
    """Some architectures of timm's have another default; some have none."""

    def rates(network) -> set[float]:
        return {getattr(module, "drop_prob", 0.0) or 0.0 for module in network.modules()} - {0.0}

    size = {"num_classes": 2, "in_chans": 3, "img_size": (224, 224)}
    with torch.device("meta"):
        assert rates(build_network(f"timm:{name}", **size)) == set()
        if name != "vgg11":
            assert max(rates(build_network(f"timm:{name}", drop_path_rate=0.2, **size))) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "device"), [("SmallResNet", "cpu"), ("SmallResNet", "cuda"), ("timm:resnet18", "cuda")]
)
def test_convolutions_run_channels_last_and_weights_keep_their_layout(name, device):
    """By tensors that are on a device in name alone: shapes and strides are theirs, numbers they have none."""
    network = build_network(name, num_classes=5, in_chans=3, img_size=(32, 32))
    model = NetworkClassifier(network, mean=[0.5] * 3, std=[0.2] * 3, labels=LabelLoss(5))
    layouts = {}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for path, module in model.named_modules():
            for key, value in module._parameters.items():
                if value is not None:
                    module._parameters[key] = torch.nn.Parameter(mode.from_tensor(value.data).to(device))
            for key, value in module._buffers.items():
                module._buffers[key] = mode.from_tensor(value).to(device)
            if isinstance(module, torch.nn.Conv2d):
                module.register_forward_hook(
                    lambda _, inputs, output, path=path: layouts.update({path: output})
                )
        images = torch.empty(4, 3, 32, 32, dtype=torch.uint8, device=device)
        logits = model.logits(model.normalize(images))
        assert logits.shape == (4, 5)
        assert len(layouts) > 4
        for path, output in layouts.items():
            assert output.is_contiguous(memory_format=torch.channels_last), path
    assert all(parameter.is_contiguous() for parameter in model.parameters())
