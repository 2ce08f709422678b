"""The mode "linear_probe": encodes each image once, trains one layer at several rates, and tests the best one.

Held-out images choose the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import nn
from tqdm import tqdm

from mae_vit.config.batch import check_same_batch
from mae_vit.config.plan import Plan, make_plan
from mae_vit.core.errors import InputError
from mae_vit.core.progress import progress
from mae_vit.data.data_path import describe_place
from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.evaluation.linear_probe import LinearProbe, best_of, probe_top1, train_probe
from mae_vit.evaluation.metrics import Predictions
from mae_vit.finetuning.config.schema import FinetuneConfig
from mae_vit.finetuning.data import FinetuneData
from mae_vit.finetuning.frozen.features import read_features
from mae_vit.finetuning.frozen.initial_model import Measured
from mae_vit.finetuning.models.build import classifier_optimizer_options
from mae_vit.finetuning.plan_text import describe_test
from mae_vit.finetuning.results.predict import Predictor, predictions_of
from mae_vit.finetuning.results.write import Outputs, measured_on_test
from mae_vit.models.encoder_file import to_metadata
from mae_vit.training.optim.lr_schedule import lr_at
from mae_vit.training.optim.optimizers import make_optimizer
from mae_vit.weights.feature_encoder import FeatureEncoder
from mae_vit.weights.start import origin_of

WEIGHTS = "linear.safetensors"
# Multiplications per step from which several threads are worth it. Measured with two cores, both busy:
# steps of a tenth of this took 1-6 ms with one thread and 200 ms with two; steps of ten times this took 580
# and 830 ms.
_WORTH_THREADS = 1 << 28


def plan_probe(config: FinetuneConfig, data: FinetuneData, *, same_batch: bool = False) -> Plan:
    """Derives the probe's training plan for the rate factor 1.

    Every rank does the whole training, so the plan is that of one process.

    Args:
        config: of the run.
        data: labeled images.
        same_batch: refuse a batch larger than the data, which shrinks otherwise.

    Raises:
        InputError: if batch size, warm-up or rates do not fit.
    """
    if same_batch:
        check_same_batch(config, num_samples=len(data.train))
    plan = make_plan(config, num_samples=len(data.train), world_size=1)
    lowest = min(config.finetune.lr_factors) * plan.lr
    if config.optim.min_lr > lowest:
        raise InputError(
            f"optim.min_lr={config.optim.min_lr:g} is above the lowest peak rate {lowest:g} of finetune.lr_factors"
        )
    if plan.effective_batch_size < 2:
        raise InputError("one image to train on: the norm of a linear probe needs 2 or more")
    return plan


def describe_probe(config: FinetuneConfig, data: FinetuneData, plan: Plan, forward_flops: float) -> str:
    """Returns the plan that `--dry-run` prints, one fact per line."""
    rates = ", ".join(f"{factor * plan.lr:.3g}" for factor in config.finetune.lr_factors)
    choice = (
        f"{len(data.held_out):,} images of the same split"
        if len(data.held_out)
        else "none: there is one rate"
    )
    height, width = config.model.image_hw
    pooling = origin_of(config.finetune.start) or f"{config.finetune.pool} normed"
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
    lines = [f"{name:<12}{text}" for name, text in facts.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def score_by_probe(
    config: FinetuneConfig, data: FinetuneData, measured: Measured, plan: Plan, outputs: Outputs
) -> tuple[dict[str, Any], Predictions | None, bytes]:
    """Trains a probe at each rate, chooses by held-out images, and reads the test split once; collective.

    All ranks do the same training, so no rank waits longer than an all-reduce takes.

    Returns:
        Entries of the summary, predictions (None if the test split is not read), and the content
        of the file `WEIGHTS`.

    Raises:
        InputError: if every rate is too large.
    """
    predictor, encoder = outputs.predictor, measured.encoder
    support = _labeled(encoder, data, data.train, predictor)
    held_out = _labeled(encoder, data, data.held_out, predictor) if len(data.held_out) else None
    probes = _train_all(config, data, measured.head, plan, support, predictor)
    # Without held-out images there is only one rate; its score only shows whether it is too large.
    scores = [probe_top1(probe, *(held_out or support)) for probe in probes]
    best = best_of(scores)
    if best is None:
        raise InputError(
            f"all rates of finetune.lr_factors={config.finetune.lr_factors} are too large for these features: "
            "give smaller ones"
        )
    rates = [
        {"factor": factor, "lr": factor * plan.lr, "val_top1": score if held_out else None}
        for factor, score in zip(config.finetune.lr_factors, scores, strict=True)
    ]
    chosen = probes[best]
    known = np.searchsorted(data.train, data.some_of_train(config.finetune.train_images))
    train = predictions_of(support[1][known].cpu().numpy(), _chances(chosen, support[0][known]))
    summary: dict[str, Any] = {
        "train_top1": train.top1,
        "val_top1": rates[best]["val_top1"],
        "probe_lr": rates[best]["lr"],
        "probe_rates": rates,
        **feature_metrics(feature_sums(support[0]), support[0].shape[1]),
        "num_features": support[0].shape[1],
        "probe_steps": plan.total_steps,
        "probe_epochs": plan.total_steps / plan.steps_per_epoch,
        "train_images_measured": len(known),
    }
    weights = _bytes_of(chosen, config, data, outputs)
    if not config.finetune.test:
        return summary, None, weights
    query = read_features(encoder, data, data.open_test(), data.test, predictor)
    asked = np.asarray(data.test_index.labels)[data.test].astype(np.int64)
    test = predictions_of(asked, _chances(chosen, query))
    return summary | measured_on_test(data, train, test), test, weights


def describe_results(summary: dict[str, Any], outputs: Outputs) -> list[str]:
    """Returns the lines to print about rates and files."""
    lines = [
        f"  rate {row['lr']:<9.3g} held-out "
        + ("too large" if row["val_top1"] is None else f"{row['val_top1']:.2%}")
        + (", chosen" if row["lr"] == summary["probe_lr"] else "")
        for row in summary["probe_rates"]
        if len(summary["probe_rates"]) > 1
    ]
    lines += [f"  reading   {summary['reading']}"] if "reading" in summary else []
    onto = "the start's encoder" if outputs.config.finetune.start else "random weights, which are not kept"
    return [*lines, f"  weights   {outputs.folder.path / WEIGHTS} (onto {onto})"]


def _labeled(
    encoder: FeatureEncoder, data: FinetuneData, samples: np.ndarray, predictor: Predictor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns features (n, D) and labels int64 (n,) of samples of the training split, on the device."""
    features = read_features(encoder, data, data.plain, samples, predictor)
    labels = torch.from_numpy(np.asarray(data.index.labels)[samples].astype(np.int64))
    return features, labels.to(predictor.device)


def _train_all(
    config: FinetuneConfig,
    data: FinetuneData,
    head: nn.Linear,
    plan: Plan,
    support: tuple[torch.Tensor, torch.Tensor],
    predictor: Predictor,
) -> list[LinearProbe]:
    """Trains one probe per rate. All start from the same head and see the same images in each step."""
    factors, probes = config.finetune.lr_factors, list[LinearProbe]()
    bar = progress(
        total=plan.total_steps * len(factors),
        desc="linear probe",
        unit=" steps",
        delay=2,
        leave=False,
        disable=predictor.ranks.rank > 0,
    )
    multiplications = plan.effective_batch_size * head.weight.numel()
    with bar, _threads_for(multiplications, predictor.device):
        for factor in factors:
            probe = LinearProbe(head).to(predictor.device)
            train_probe(
                probe,
                *support,
                _steps(config, data, plan, factor * plan.lr, bar),
                make_optimizer(probe, classifier_optimizer_options(config)),
                label_smoothing=config.finetune.label_smoothing,
            )
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


def _steps(
    config: FinetuneConfig, data: FinetuneData, plan: Plan, peak_lr: float, bar: tqdm
) -> Iterator[tuple[float, np.ndarray]]:
    """Yields learning rate and row numbers (B,) of each step; the rows do not depend on the rate."""
    batch = plan.effective_batch_size
    for step in range(plan.total_steps):
        rate = lr_at(
            step,
            peak_lr=peak_lr,
            warmup_steps=plan.warmup_steps,
            total_steps=plan.total_steps,
            min_lr=config.optim.min_lr,
        )
        epoch, at = plan.position(step)
        yield rate, data.order.samples(epoch, at * batch, (at + 1) * batch)
        bar.update()


@torch.no_grad()
def _chances(probe: LinearProbe, features: torch.Tensor) -> torch.Tensor:
    return probe(features).softmax(dim=-1)


def _bytes_of(probe: LinearProbe, config: FinetuneConfig, data: FinetuneData, outputs: Outputs) -> bytes:
    """Returns the layer as a safetensors file by timm's names: a head for the pretrained encoder.

    The norm before the layer is folded into it.
    """
    weight, bias = (tensor.cpu().contiguous() for tensor in probe.folded())
    metadata: dict[str, Any] = {"classes": data.classes, "mean": data.mean, "std": data.std}
    if outputs.info is not None:
        metadata |= {**outputs.info.to_dict(), "pool": config.finetune.pool}
    else:
        metadata |= {"network": config.model.name, "img_size": list(config.model.image_hw)}
    metadata |= {"objective": "linear_probe", "start": config.finetune.start}
    return save_tensors({"head.weight": weight, "head.bias": bias}, metadata=to_metadata(metadata))
