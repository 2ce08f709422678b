"""Whatever runs on a GPU stays there: on a fake one, where a tensor of the CPU in an operation raises.

Each case runs twice: as it is, and with one tensor left on the CPU, which must be noticed.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.commands import ROOT
from helpers.fake_cuda import CUDA, fake_cuda, on_cuda
from helpers.objectives import VARIANTS, build

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.evaluation.few_shot import least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.finetuning.frozen import closed_form
from mae_vit.finetuning.frozen.closed_form import score_in_closed_form
from mae_vit.finetuning.frozen.features import Frozen
from mae_vit.finetuning.frozen.linear_probe import LinearProbe, probe_top1, train_probe
from mae_vit.finetuning.models.classifiers import NetworkClassifier, ViTClassifier
from mae_vit.finetuning.results import as_predictions, predict_classes
from mae_vit.inspection.measures import (
    attention_maps,
    attention_weights,
    head_entropy,
    mean_attention_distance,
    rollout,
)
from mae_vit.inspection.reconstructions import reconstruct
from mae_vit.inspection.views import patch_features
from mae_vit.models.attention import choose_attention
from mae_vit.models.encoders.baselines import BASELINES, build_network
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives import OBJECTIVES
from mae_vit.objectives.label_loss import LabelLoss
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.engines.precision import Autocast
from mae_vit.training.evals import HeldOut, OnlineProbe
from mae_vit.weights.embed.embed import Settings, _encode
from mae_vit.weights.encoder import ViTFeatures, load_encoder
from mae_vit.weights.feature_encoder import ImageInput

CLASSES, COLORS = 5, {"mean": [0.5] * 3, "std": [0.25] * 3}
behind = pytest.mark.parametrize("left_behind", [False, True], ids=["moved", "left behind"])


def encoder_of() -> ViTEncoder:
    return ViTEncoder(img_size=(16, 16), patch_size=4, embed_dim=16, depth=2, num_heads=2)


def batch_of(size: int = 8) -> Batch:
    """On the CPU, as from a loader."""
    images, index = torch.zeros(size, 3, 16, 16, dtype=torch.uint8), torch.arange(size)
    return Batch(images, index % CLASSES, SampleKeys(0, 0, index))


def engine_of(task) -> SimpleNamespace:
    """What evaluation asks of an engine."""
    choose_attention(task, CUDA)
    return SimpleNamespace(
        ranks=Ranks(),
        objective=task,
        device=CUDA,
        module=Autocast(task, CUDA, "bf16"),
        all_reduce_sum=lambda values: values,
    )


def noticed(left_behind: bool):
    """Open around what mixes devices where a tensor was left behind."""
    # Where autocast leaves what is not on the GPU, types differ first.
    return pytest.raises(RuntimeError, match=r"device|same") if left_behind else nullcontext()


def on_device(*tensors) -> bool:
    return all(tensor.device == CUDA for tensor in tensors)


@behind
@pytest.mark.parametrize("name", [*OBJECTIVES, *VARIANTS])
def test_objectives(name, left_behind):
    """A step's forward pass, and what is measured and drawn of held-out images."""
    task = build(name, "tiny")
    with fake_cuda():
        on_cuda(task, but="encoder.blocks.1.norm1.weight" if left_behind else "")
        engine = engine_of(task)
        with noticed(left_behind):
            output = engine.module(batch_of().to(CUDA))
            assert on_device(output.loss, *(part for value in output.values.values() for part in value))
        held_out = HeldOut([batch_of()], batch_of(4))
        with noticed(left_behind):
            assert all(on_device(value) for value in task.evaluation_sums(batch_of().to(CUDA)).values())
        with noticed(left_behind):
            assert held_out.evaluate(engine)
        with noticed(left_behind):
            assert on_device(*(row.images for row in held_out.pictures(engine)))


@behind
def test_the_online_probe(left_behind):
    task, labels = build("mae", "tiny"), torch.arange(8) % 2
    with fake_cuda():
        on_cuda(task, but="encoder.norm.bias" if left_behind else "")
        probe = OnlineProbe([batch_of(4), batch_of(4)], torch.arange(8), labels, 4, 2)
        with noticed(left_behind):
            assert set(probe.evaluate(engine_of(task))) == {
                "few_shot_top1",
                "knn_top1",
                "chance_top1",
                "seconds",
            }


@behind
@pytest.mark.parametrize("score", [knn_scores, least_squares_scores])
@pytest.mark.parametrize("width", [4, 64])
def test_closed_forms(score, width, left_behind):
    with fake_cuda():
        labels = torch.zeros(20, dtype=torch.int64, device="cpu" if left_behind else CUDA)
        support, query = torch.zeros(20, width, device=CUDA), torch.zeros(9, width, device=CUDA)
        if left_behind and score is knn_scores:
            query = torch.zeros(9, width)
        with noticed(left_behind):
            assert on_device(score(support, labels, query, num_classes=3))


@behind
def test_linear_probes(left_behind):
    probe = LinearProbe(torch.nn.Linear(16, 3))
    with fake_cuda():
        on_cuda(probe, but="norm.running_mean" if left_behind else "")
        features, labels = torch.zeros(20, 16, device=CUDA), torch.zeros(20, dtype=torch.int64, device=CUDA)
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.1)
        with noticed(left_behind):
            train_probe(probe, features, labels, [(0.1, np.arange(4))] * 2, optimizer)
        with noticed(left_behind):
            assert probe_top1(probe, features, labels) is not None
        with noticed(left_behind):
            assert on_device(*probe.folded())


def network_of(name: str) -> torch.nn.Module:
    return build_network(name, num_classes=CLASSES, in_chans=3, img_size=(16, 16))


def classifier_of(name: str):
    labels = LabelLoss(CLASSES, mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    common = {**COLORS, "labels": labels}
    if name in ("cls", "mean"):
        return ViTClassifier(encoder_of(), pool=name, head_init="small", **common)
    return NetworkClassifier(network_of(name), **common)


@behind
@pytest.mark.parametrize("name", ["cls", "mean", *BASELINES])
def test_classifiers(name, left_behind):
    """Trained with mixing, and measured."""
    task = classifier_of(name)
    with fake_cuda():
        last = [name for name, _ in task.named_parameters()][-1]
        engine = engine_of(on_cuda(task, but=last if left_behind else ""))
        with noticed(left_behind):
            assert on_device(engine.module(batch_of().to(CUDA)).loss)
        task.eval()
        with noticed(left_behind):
            assert all(on_device(value) for value in task.evaluation_sums(batch_of().to(CUDA)).values())
            assert on_device(*(row.images for row in task.pictures(batch_of().to(CUDA))))
        with noticed(left_behind):
            setup = SimpleNamespace(ranks=Ranks(), device=CUDA)
            predictions = predict_classes(
                task, [batch_of()], np.zeros(8, np.int64), setup, engine.module.context
            )
            assert len(predictions.classes) == 8


@behind
@pytest.mark.parametrize("mode", ["knn", "few_shot"])
def test_frozen_features(mode, left_behind, monkeypatch):
    """From images of the CPU to predictions on it; all between them on the device."""
    labels = np.arange(16) % CLASSES
    data = SimpleNamespace(
        index=SimpleNamespace(labels=labels),
        test_index=SimpleNamespace(labels=labels),
        train=np.arange(16),
        test=np.arange(8),
        classes=["a"] * CLASSES,
        plain=None,
        open_test=lambda: None,
        fixed=lambda source, samples, ranks, size: [batch_of(len(samples))],
    )

    def predictions_there(labels, chances):
        assert on_device(chances)
        return as_predictions(labels, chances)

    monkeypatch.setattr(closed_form, "as_predictions", predictions_there)
    options = SimpleNamespace(mode=mode, neighbors=3, shots=[1], draws=2)
    config = SimpleNamespace(
        finetune=options, run=SimpleNamespace(seed=0), train=SimpleNamespace(precision="bf16")
    )
    setup = SimpleNamespace(config=config, data=data, ranks=Ranks(), device=CUDA, batch_size=16)
    task = classifier_of("cls")
    images = ImageInput((8, 8), 1, [0.5], [0.5])
    encoder = ViTFeatures(task.encoder, images, pool="cls", fc_norm=torch.nn.Identity())
    with fake_cuda():
        on_cuda(encoder, but="encoder.norm.weight" if left_behind else "")
        with noticed(left_behind):
            _, guesses = score_in_closed_form(Frozen(setup, encoder, None))
            assert len(guesses.classes) == 8


@behind
def test_encoders_for_use(left_behind):
    """`load_encoder`, and `mae-vit embed`'s batches."""
    encoder = load_encoder(ROOT / "docs/results/encoders/mae_cifar_tiny_100.safetensors")
    pixels = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    with fake_cuda():
        on_cuda(encoder, but="encoder.norm.weight" if left_behind else "")
        with noticed(left_behind):
            assert on_device(encoder(encoder.normalize(pixels.to(CUDA))))
        settings = Settings(CUDA, precision="bf16")
        with noticed(left_behind):
            # The fake tensors of inference mode ask for a driver.
            features = _encode.__wrapped__(encoder, list(pixels.numpy()), settings)
            assert on_device(features)
            assert features.shape == (3, 128)


@behind
def test_inspection(left_behind):
    encoder = load_encoder(ROOT / "docs/results/encoders/mae_cifar_tiny_100.safetensors")
    task = build("mae", "tiny")
    with fake_cuda():
        on_cuda(encoder, but="encoder.norm.weight" if left_behind else "")
        on_cuda(task, but="encoder.blocks.0.norm1.bias" if left_behind else "")
        for one in (encoder, task):
            choose_attention(one, CUDA)
        with noticed(left_behind):
            assert on_device(patch_features(encoder, torch.zeros(5, 3, 32, 32, dtype=torch.uint8)))
        with noticed(left_behind):
            weights = attention_weights(task.encoder, task.normalize(batch_of().images.to(CUDA)))
            assert on_device(*weights, rollout(weights), attention_maps(weights[0], (4, 4), query="mean"))
            assert on_device(mean_attention_distance(weights[0], (4, 4), 4), head_entropy(weights[0]))
        with noticed(left_behind):
            for part in reconstruct(task, batch_of().to(CUDA), shown=2):
                assert on_device(*(row.images for row in part.rows))
