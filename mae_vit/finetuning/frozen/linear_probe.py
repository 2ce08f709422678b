"""The mode "linear_probe" trains a layer on features at several rates; held-out images choose the one to test.

The layer is that of MAE Sec. A.1, trained by gradient descent. Shapes: n images, B batch, D width, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from mae_vit.config.plan import Plan
from mae_vit.core.errors import InputError
from mae_vit.core.progress import progress
from mae_vit.data.data_path import describe_place
from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.evaluation.metrics import Predictions
from mae_vit.finetuning.frozen.features import Frozen
from mae_vit.finetuning.plan_text import describe_test
from mae_vit.finetuning.results import as_predictions, compare_with_test, network_facts
from mae_vit.finetuning.setup import Setup
from mae_vit.models.encoder_file import to_metadata
from mae_vit.training.optim import lr_at, make_optimizer
from mae_vit.training.plan_text import plan_lines

# Official MAE code, main_linprobe.py.
_EPS = 1e-6
# Multiplications per step above which several threads pay. Measured on two busy cores: steps of a tenth of this
# took 1-6 ms with one thread and 200 ms with two; steps of ten times this took 580 and 830 ms.
_WORTH_THREADS = 1 << 28


class LinearProbe(nn.Module):
    """BatchNorm without affine parameters, then one linear layer (MAE Sec. A.1).

    The norm uses statistics of the whole batch; the official code uses those of each GPU's part.
    """

    def __init__(self, head: nn.Linear) -> None:
        """Copies `head`, D -> K."""
        super().__init__()
        self.norm = nn.BatchNorm1d(head.in_features, eps=_EPS, affine=False)
        self.head = nn.Linear(head.in_features, head.out_features)
        self.head.load_state_dict(head.state_dict())

    def forward(self, features: Tensor) -> Tensor:
        """Classifies features: (B, D) -> logits (B, K)."""
        return self.head(self.norm(features))

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Folds the norm's running statistics into the layer: weight (K, D), bias (K,)."""
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        scale = (self.norm.running_var.double() + self.norm.eps).rsqrt()  # (D,)
        weight = self.head.weight.double() * scale
        bias = self.head.bias.double() - weight @ self.norm.running_mean.double()
        return weight.float(), bias.float()


def train_probe(
    probe: LinearProbe,
    features: Tensor,
    labels: Tensor,
    steps: Iterable[tuple[float, np.ndarray]],
    optimizer: torch.optim.Optimizer,
    *,
    label_smoothing: float = 0.0,
) -> None:
    """Trains a probe, in float32, and leaves it in evaluation mode.

    Each of the `steps` has a learning rate and row numbers (B,). Features (n, D) are the same in every epoch; the
    paper crops, flips and encodes each image anew.
    """
    probe.train()
    for rate, numbers in steps:
        chosen = torch.from_numpy(numbers).to(features.device)  # (B,)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(probe(features[chosen]), labels[chosen], label_smoothing=label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    probe.eval()


@torch.no_grad()
def probe_top1(probe: LinearProbe, features: Tensor, labels: Tensor) -> float | None:
    """Computes top-1 accuracy; None if a logit is not finite, because the learning rate was too large."""
    logits = probe(features)  # (n, K)
    if not torch.isfinite(logits).all():
        return None
    return float((logits.argmax(dim=-1) == labels).double().mean())


def describe_probe(setup: Setup, plan: Plan, forward_flops: float) -> str:
    """Returns the plan that `--dry-run` prints, one fact per line."""
    config, data = setup.config, setup.data
    rates = ", ".join(f"{factor * plan.lr:.3g}" for factor in config.finetune.lr_factors)
    choice = (
        f"{len(data.held_out):,} images of the same split"
        if len(data.held_out)
        else "none: there is one rate"
    )
    height, width = config.model.image_hw
    pooling = f"{config.finetune.pool} normed" if setup.info else f"{setup.origin}"
    facts = {
        "weights": config.finetune.start or "random weights",
        "model": f"{config.model.name}, {height}x{width} px, frozen; {pooling}",
        "compute": f"{forward_flops / 1e9:.3f} GFLOP per image, which is encoded once; then one linear layer trains",
        "data": f'{describe_place(config.data.path, data.index.folder)}, split "{config.data.split}": '
        f"{len(data.train):,} images of {len(data.classes)} classes, without augmentation",
        "length": f"{plan.total_steps:,} steps = {plan.total_steps / plan.steps_per_epoch:.2f} epochs of "
        f"{plan.steps_per_epoch:,}, for each rate; batch {plan.effective_batch_size:,}",
        "rates": f"{rates} after {plan.warmup_steps:,} steps of warm-up, cosine to "
        f"{config.optim.min_lr:g}; {config.optim.name}",
        "chosen by": choice,
        "tested on": describe_test(config, data),
    }
    return plan_lines(facts, plan.notes, [])


def score_by_probe(frozen: Frozen, plan: Plan) -> tuple[dict[str, Any], Predictions | None, LinearProbe]:
    """Trains a probe at each rate, chooses by held-out images, and reads the test split once; collective.

    `plan` is for rate factor 1. All ranks do the same training, so no rank waits longer than an all-reduce takes.

    Returns:
        Entries of the summary, predictions (None if the test split is not read), and the chosen layer.

    Raises:
        InputError: if every rate is too large.
    """
    data, finetune = frozen.setup.data, frozen.setup.config.finetune

    def labeled(samples: np.ndarray) -> tuple[Tensor, Tensor]:  # features (n, D), labels int64 (n,)
        return frozen.features(data.plain, samples), frozen.train_labels(samples)

    support = labeled(data.train)
    held_out = labeled(data.held_out) if len(data.held_out) else None
    probes = _train_all(frozen, plan, support)
    # Without held-out images there is only one rate; its score only shows whether it is too large.
    scores = [probe_top1(probe, *(held_out or support)) for probe in probes]
    known_scores = [-math.inf if score is None else score for score in scores]
    best = known_scores.index(max(known_scores))
    if scores[best] is None:
        raise InputError(
            f"all of finetune.lr_factors={finetune.lr_factors} are too large for these features; lower them"
        )
    rates = [
        {"factor": factor, "lr": factor * plan.lr, "val_top1": score if held_out else None}
        for factor, score in zip(finetune.lr_factors, scores, strict=True)
    ]
    known = np.searchsorted(data.train, data.some_of_train())
    train = as_predictions(support[1][known].cpu().numpy(), _chances(probes[best], support[0][known]))
    width = support[0].shape[1]
    summary: dict[str, Any] = {
        "train_top1": train.top1,
        "val_top1": rates[best]["val_top1"],
        "probe_lr": rates[best]["lr"],
        "probe_rates": rates,
        **feature_metrics(feature_sums(support[0]), width),
        "num_features": width,
        "train_images_measured": len(known),
    }
    if not finetune.test:
        return summary, None, probes[best]
    test = as_predictions(frozen.test_labels, _chances(probes[best], frozen.test_features()))
    return summary | compare_with_test(data, train, test), test, probes[best]


def _train_all(frozen: Frozen, plan: Plan, support: tuple[Tensor, Tensor]) -> list[LinearProbe]:
    """Trains one probe per rate. All start from the same head and see the same images in each step."""
    setup, head, device = frozen.setup, frozen.head, frozen.setup.device
    config, factors = setup.config, setup.config.finetune.lr_factors
    total, batch, warmup = plan.total_steps, plan.effective_batch_size, plan.warmup_steps
    min_lr = config.optim.min_lr
    bar = progress(
        total=total * len(factors),
        desc="linear probe",
        unit=" steps",
        delay=2,
        leave=False,
        disable=setup.ranks.rank > 0,
    )

    def steps(peak_lr: float) -> Iterator[tuple[float, np.ndarray]]:  # learning rate and row numbers (B,)
        for step in range(total):
            rate = lr_at(step, peak_lr=peak_lr, warmup_steps=warmup, total_steps=total, min_lr=min_lr)
            epoch, at = plan.position(step)
            rows = setup.data.order.samples(epoch, at * batch, (at + 1) * batch)
            yield rate, rows
            bar.update()

    probes = []
    with bar, _threads_for(batch * head.weight.numel(), device):
        for factor in factors:
            probe = LinearProbe(head).to(device)
            optimizer = make_optimizer(probe, setup.optimizer)
            smoothing = config.finetune.label_smoothing
            train_probe(probe, *support, steps(factor * plan.lr), optimizer, label_smoothing=smoothing)
            probes.append(probe)
    return probes


@contextmanager
def _threads_for(multiplications: int, device: torch.device) -> Iterator[None]:
    """Uses one CPU thread for small steps, in which waiting for a second thread takes longer than the work."""
    held = torch.get_num_threads()
    if device.type == "cpu" and multiplications < _WORTH_THREADS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(held)


@torch.no_grad()
def _chances(probe: LinearProbe, features: Tensor) -> Tensor:
    return probe(features).softmax(dim=-1)


def probe_bytes(probe: LinearProbe, setup: Setup) -> bytes:
    """Returns the layer, with its norm folded in, as a safetensors file: an encoder's head by timm's names."""
    weight, bias = (tensor.cpu().contiguous() for tensor in probe.folded())
    finetune, pool = setup.config.finetune, {} if setup.info is None else {"pool": setup.config.finetune.pool}
    metadata = {
        "classes": setup.data.classes,
        **network_facts(setup.config, setup.data, setup.info),
        **pool,
        "objective": "linear_probe",
        "start": finetune.start,
    }
    return save_tensors({"head.weight": weight, "head.bias": bias}, metadata=to_metadata(metadata))
