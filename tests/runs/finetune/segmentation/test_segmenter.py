"""A segmentation network by itself: the probe and the loss, written out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import jaccard_score

from mae_vit.config.load import ConfigValues, load_config
from mae_vit.core.bands import RGB8
from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.models.build import build_segmenter
from mae_vit.finetuning.models.segmenter import Segmenter
from mae_vit.models.encoders.network import NetworkEncoder
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.weights.read import Weights


def small_encoder(patch_size: int = 2, **options) -> ViTEncoder:
    sizes = {"img_size": (8, 8), "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return ViTEncoder(patch_size=patch_size, **sizes, **options)


def segmenter(*, probe: bool, patch_size: int = 2, classes: int = 3) -> Segmenter:
    torch.manual_seed(0)
    encoder = small_encoder(patch_size, drop_path_rate=0.2)
    return Segmenter(encoder, num_classes=classes, probe=probe, label_smoothing=0.0, mean=[0.5], std=[0.2])


def batch_of(images: torch.Tensor, truth: torch.Tensor) -> Batch:
    index = torch.arange(len(images))
    return Batch(images, torch.full((len(images),), -1), SampleKeys(0, 0, index), (), truth + 1)


def random_batch(count: int, classes: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=generator, dtype=torch.uint8)
    noise = torch.randint(0, classes, (count, 8, 8), generator=generator)
    # Half of the pixels tell their class by their gray value: neither random nor separable.
    told = torch.rand(noise.shape, generator=generator) < 0.5
    truth = torch.where(told, images[:, 0].long() * classes // 256, noise)
    truth[torch.rand(noise.shape, generator=generator) < 0.2] = -1
    return batch_of(images, truth)


@pytest.mark.parametrize(("optimizer", "std"), [("sgd", 0), ("lars", 0.01)])
def test_the_layer_of_a_probe_begins_as_its_optimizer_needs(optimizer, std):
    """As that of "linear_probe"."""
    overrides = ["data.path=x", "finetune.mode=segment_probe", "optim.blr=0.1", f"optim.name={optimizer}"]
    config = load_config(
        FinetuneConfig,
        ConfigValues("model: {name: tiny-cifar, img_size: 8, patch_size: 2}"),
        [*overrides, "train.steps=1", "run.name=x", "train.effective_batch_size=2"],
    )
    data = SimpleNamespace(classes=["a"] * 40, mean=[0.5] * 3, std=[0.2] * 3, bands=RGB8)
    info = SimpleNamespace(geometry=SimpleNamespace(build=lambda **_: small_encoder(2)))
    weight = build_segmenter(config, data, info).decode_head.classifier.weight
    assert weight.std().item() == pytest.approx(std, rel=0.2)


def test_the_probe_is_a_linear_layer_on_standardized_tokens():
    """With one pixel a token, nothing is between the linear layer and the pixels."""
    model, batch = segmenter(probe=True, patch_size=1), random_batch(40)
    layer = model.decode_head.classifier
    torch.nn.init.normal_(layer.weight)  # it begins with zeros
    torch.nn.init.normal_(layer.bias)
    with torch.no_grad():
        tokens = model.encoder.forward_features(model.normalize(batch.images))[:, 1:]
        logits = model.logits(batch.images).permute(0, 2, 3, 1)
    features = tokens.reshape(-1, 16)
    features = (features - features.mean(dim=0)) / (features.var(dim=0, unbiased=False) + 1e-6).sqrt()
    expected = features @ layer.weight.flatten(1).T + layer.bias
    torch.testing.assert_close(logits.reshape(-1, 3), expected, atol=1e-4, rtol=1e-4)


def test_the_loss_is_that_of_a_plain_loop():
    model, batch = segmenter(probe=False).eval(), random_batch(5)
    truth = batch.class_map()
    truth[2] = -1  # an image in which nothing counts
    batch = batch_of(batch.images, truth)
    output = model(batch)
    chances = model.logits(batch.images).softmax(dim=1).detach()
    means, hits, counted = [], 0, 0
    for number in range(5):
        losses = []
        for row, column in np.ndindex(8, 8):
            k = int(truth[number, row, column])
            if k >= 0:
                losses.append(-float(chances[number, k, row, column].log()))
                hits += int(chances[number, :, row, column].argmax()) == k
                counted += 1
        means.append(sum(losses) / max(len(losses), 1))
    assert float(output.loss) == pytest.approx(sum(means) / 5, rel=1e-5)
    assert [int(value) for value in output.values["pixel_accuracy"]] == [hits, counted]
    parts = [
        model(batch_of(batch.images[cut], truth[cut])).loss * (cut.stop - cut.start)
        for cut in (slice(0, 2), slice(2, 5))
    ]
    assert float(sum(parts) / 5) == pytest.approx(float(output.loss), rel=1e-6)


def test_held_out_metrics_are_scikit_learns():
    model, batch = segmenter(probe=False).eval(), random_batch(6)
    with torch.no_grad():
        sums: dict[str, np.ndarray] = {}
        for cut in (slice(0, 4), slice(4, 6)):
            part = batch_of(batch.images[cut], batch.class_map()[cut])
            for name, value in model.evaluation_sums(part).items():
                sums[name] = sums.get(name, 0.0) + value.double().numpy()
        metrics = model.evaluation_metrics(sums)
        guess = model.logits(batch.images).argmax(dim=1)
    counted = batch.class_map() >= 0
    truth, guess = batch.class_map()[counted].numpy(), guess[counted].numpy()
    assert metrics["miou"] == pytest.approx(jaccard_score(truth, guess, average="macro"))
    assert metrics["pixel_accuracy"] == pytest.approx((truth == guess).mean())


def test_a_norm_behind_the_mean_norms_each_token():
    """Of weights that were fine-tuned as a classifier that pools the mean."""
    tensors = {name: value + 1 for name, value in small_encoder().state_dict().items()}
    renamed = {f"fc_{name}" if name.startswith("norm.") else name: value for name, value in tensors.items()}
    model = segmenter(probe=True)
    model.load(Weights("weights", renamed))
    assert torch.equal(model.encoder.norm.weight, tensors["norm.weight"])


def test_a_probe_trains_its_head_alone():
    model, batch = segmenter(probe=True).train(), random_batch(4)
    before = model.decode_head.norm.running_mean.clone()
    model(batch).loss.backward()
    trained = {name for name, value in model.named_parameters() if value.grad is not None}
    assert trained == {"decode_head.classifier.weight", "decode_head.classifier.bias"}
    assert (model.encoder.training, model.decode_head.training) == (False, True)
    assert not torch.equal(before, model.decode_head.norm.running_mean)
    whole = segmenter(probe=False).train()
    whole(batch).loss.backward()
    assert all(value.grad is not None for value in whole.parameters())


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("SimpleCNN", 128),
        ("SmallResNet", 64),
        ("SmallBiT", 128),
        ("timm:resnet10t", 512),
    ],
)
def test_networks_are_segmented_by_their_last_map(name, width):
    encoder = NetworkEncoder(name, img_size=(32, 32), patch_size=1, in_chans=3)
    common = {"num_classes": 3, "label_smoothing": 0.0, "mean": [0.5] * 3, "std": [0.2] * 3}
    model = Segmenter(encoder, probe=False, **common)
    side = 1 if name.startswith("timm") else 8
    assert model.feature_map(torch.rand(2, 3, 32, 32)).shape == (2, width, side, side)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    assert model.logits(images).shape == (2, 3, 32, 32)
    model.logits(images).square().mean().backward()
    assert [n for n, value in model.named_parameters() if value.grad is None and value.requires_grad] == []
