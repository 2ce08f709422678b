"""Distillation against formulas in NumPy, and what of the teacher reaches the student."""

import numpy as np
import pytest
import torch

from mae_vit.core.batch import Batch
from mae_vit.core.keyed_rng import SampleKeys
from mae_vit.finetuning.models.classifiers import Distillation, DistilledViTClassifier
from mae_vit.models.encoders.vit import ViTEncoder
from mae_vit.objectives.label_loss import LabelLoss

CLASSES = 5


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def student(distillation: Distillation, **options) -> DistilledViTClassifier:
    torch.manual_seed(0)
    encoder = ViTEncoder(img_size=(8, 8), patch_size=4, embed_dim=16, depth=2, num_heads=2)
    model = DistilledViTClassifier(
        encoder,
        head_init="small",
        mean=[0.5] * 3,
        std=[0.25] * 3,
        labels=LabelLoss(CLASSES, **options),
        distillation=distillation,
    )
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.normal_(model.head_dist.weight)
    return model


def batch_of(size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (size, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Batch(images, torch.arange(size) % CLASSES, SampleKeys(0, 0, torch.arange(size)))


def teacher(images: torch.Tensor) -> torch.Tensor:
    """Some function of raw pixels."""
    return images.float().flatten(1)[:, : 7 * CLASSES : 7] / 64


@pytest.mark.parametrize(("kind", "tau"), [("soft", 1.0), ("soft", 3.0), ("hard", 1.0)])
def test_the_loss_is_deits(kind, tau):
    logits, taught = np.random.default_rng(0).normal(size=(2, 4, CLASSES))
    p, q = softmax(taught / tau), softmax(logits / tau)
    # Eq. 2: tau^2 KL(student, teacher), a mean over images; Eq. 3.
    expected = tau**2 * (p * (np.log(p) - np.log(q))).sum(-1).mean()
    if kind == "hard":
        expected = -np.log(q)[np.arange(4), taught.argmax(-1)].mean()
    loss = Distillation(teacher, kind, 0.1, tau).loss(torch.tensor(logits), torch.tensor(taught))
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "weight", "temperature"), [("hard", 0.5, 1.0), ("soft", 0.1, 3.0)])
def test_both_losses_are_weighted(kind, weight, temperature):
    distillation = Distillation(teacher, kind, weight, temperature)
    model, batch = student(distillation, label_smoothing=0.1), batch_of()
    first, second = (x.detach() for x in model.both(model.normalize(batch.images)))
    logs = np.log(softmax(first.numpy().astype(np.float64)))
    labeled = -(0.9 * logs[np.arange(6), batch.labels] + 0.1 * logs.mean(-1)).mean()
    taught = distillation.loss(second, teacher(batch.images)).item()
    output = model(batch)
    assert output.loss.item() == pytest.approx((1 - weight) * labeled + weight * taught, rel=1e-5)
    assert output.values["label_loss"][0].item() == pytest.approx(labeled, rel=1e-5)
    assert output.values["teacher_loss"][0].item() == pytest.approx(taught, rel=1e-5)


def test_measured_is_the_mean_of_both_heads():
    model, batch = student(Distillation(teacher, "hard", 0.5)), batch_of()
    with torch.no_grad():
        first, second = (softmax(x.numpy()) for x in model.both(model.normalize(batch.images)))
        chances = model.classify(batch).softmax(-1).numpy()
    assert not np.allclose(first, second, atol=1e-3)
    np.testing.assert_allclose(chances, (first + second) / 2, rtol=1e-5)


def test_the_teacher_sees_what_the_student_sees():
    seen = []

    def watching(images: torch.Tensor) -> torch.Tensor:
        seen.append(images.clone())
        return teacher(images)

    model = student(Distillation(watching, "hard", 0.5), mixup=0.8)
    images, _ = model.labels.targets(batch_of())
    model(batch_of())
    assert torch.equal(seen[0], images)
    assert not torch.equal(images, batch_of().images.float())


def test_every_parameter_learns():
    model = student(Distillation(teacher, "hard", 0.5))
    model(batch_of()).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_without_the_token_it_is_another_network():
    """The token takes part in attention: [CLS]'s scores depend on it."""
    model, batch = student(Distillation(teacher, "hard", 0.5)), batch_of()
    images = model.normalize(batch.images)
    with torch.no_grad():
        before = model.both(images)[0]
        model.dist_token.add_(torch.randn(16))
        assert not torch.allclose(model.both(images)[0], before, atol=1e-4)
