"""Held-out metrics and the online probe, with the same images and masks each time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mae_vit.config.plan import Due
from mae_vit.core.batch import Batch
from mae_vit.core.image_rows import Picture, in_colors
from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.evaluation.few_shot import least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.models.encoders.base import pool_tokens
from mae_vit.objectives.objective import Objective, Task, as_numbers
from mae_vit.runtime.watchdog import Watchdog
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.state import BestWeights, weights_of
from mae_vit.training.outputs.run_outputs import RunOutputs

# Number of held-out images in each picture.
SHOWN_IMAGES = 8
# Number of held-out images whose features are measured: an upper bound of their rank.
MOST_RANKED = 2048


@contextmanager
def _evaluating(engine: Engine) -> Iterator[Task]:
    """Yields the objective in evaluation mode, in the precision of the run."""
    engine.objective.eval()
    with engine.module.context():
        yield engine.objective
    engine.objective.train()


@dataclass(frozen=True)
class HeldOut:
    """Fixed images of a split that is not trained on.

    Attributes:
        batches: this rank's part, without augmentation, with the same keys in every run.
        shown: the few images to draw.
    """

    batches: Iterable[Batch]
    shown: Batch
    picture_bands: Sequence[int | str] | None = None

    @torch.no_grad()
    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Computes the metrics of the objective and of its encoder's features over all ranks; collective."""
        totals: dict[str, torch.Tensor] = {}
        with _evaluating(engine) as objective:
            for batch in self.batches:
                for name, value in objective.evaluation_sums(batch.to(engine.device)).items():
                    totals[name] = totals.get(name, 0.0) + value.double()
        names = sorted(totals)
        sums = engine.all_reduce_sum(torch.cat([totals[name].flatten() for name in names])).cpu()
        parts = zip(names, sums.split([totals[name].numel() for name in names]), strict=True)
        metrics = engine.objective.evaluation_metrics(
            as_numbers({name: part.reshape(totals[name].shape) for name, part in parts})
        )
        if not isinstance(engine.objective, Objective):
            return metrics
        return {**metrics, **self._feature_metrics(engine, engine.objective)}

    def _feature_metrics(self, engine: Engine, objective: Objective) -> dict[str, float]:
        """Measures `rankme` and `feature_std` of the online probe's features; collective.

        The images do not depend on the number of ranks.
        """
        width = objective.encoder.embed_dim
        left = len(range(engine.ranks.rank, MOST_RANKED, engine.ranks.world_size))
        sums = torch.zeros(width**2 + 2 * width + 1, dtype=torch.float64, device=engine.device)
        with _evaluating(engine):
            for batch in self.batches:
                images = batch.images[:left]
                left -= len(images)
                if len(images):
                    sums += feature_sums(mean_features(objective, images.to(engine.device)))
        return feature_metrics(engine.all_reduce_sum(sums), width)

    @torch.no_grad()
    def pictures(self, engine: Engine) -> list[Picture]:
        """Draws the images in `shown`; not collective."""
        with _evaluating(engine) as objective:
            rows = objective.pictures(self.shown.to(engine.device))
        return in_colors(rows, objective.bands, self.picture_bands)


def mean_features(objective: Objective, images: Tensor) -> Tensor:
    """Encodes whole images: uint8 (B, C, H, W) -> float32 (B, D), the mean of the patch tokens after the final norm."""
    tokens = objective.encoder.forward_features(objective.normalize(images))
    return pool_tokens(objective.encoder, tokens.float(), "mean")


@dataclass(frozen=True)
class OnlineProbe:
    """Labeled images: some to fit on, held-out ones to score.

    Attributes:
        batches: this rank's part, without augmentation.
        places: int64, index of each image of this rank among the images of all ranks.
        labels: int64 (n + m,), labels of the images of all ranks, support first.
    """

    batches: Sequence[Batch]
    places: Tensor
    labels: Tensor
    num_support: int
    num_classes: int

    @torch.no_grad()
    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Scores mean-pooled features of the final norm; collective.

        Returns few_shot_top1 (least squares), knn_top1, chance_top1 (always the most frequent class), and the seconds.
        """
        begun = time.monotonic()
        objective = engine.objective
        assert isinstance(objective, Objective)
        features = torch.zeros(len(self.labels), objective.encoder.embed_dim, device=engine.device)
        with _evaluating(engine):
            parts = [mean_features(objective, batch.images.to(engine.device)) for batch in self.batches]
        features[self.places.to(engine.device)] = torch.cat(parts)
        features = engine.all_reduce_sum(features)
        labels = self.labels.to(engine.device)
        support, query = features[: self.num_support], features[self.num_support :]
        fitted, asked = labels[: self.num_support], labels[self.num_support :]
        scores = {}
        for name, score in (("few_shot_top1", least_squares_scores), ("knn_top1", knn_scores)):
            guess = score(support, fitted, query, num_classes=self.num_classes).argmax(dim=-1)
            scores[name] = (guess == asked).double().mean().item()
        chance = self.labels[self.num_support :].bincount().max().item() / len(asked)
        return {**scores, "chance_top1": chance, "seconds": time.monotonic() - begun}


class Evals:
    """The evaluations during training; all ranks make the same calls.

    Attributes:
        best: weights with the largest `selects` metric so far; None without `selects`.
    """

    def __init__(
        self,
        engine: Engine,
        watchdog: Watchdog,
        *,
        held_out: HeldOut | None,
        probe: OnlineProbe | None,
        selects: str | None = None,
        best: BestWeights | None = None,
    ) -> None:
        """Takes the evaluations to run; `selects` names the held-out metric that chooses the best weights."""
        self._engine, self._watchdog = engine, watchdog
        self.held_out, self._probe = held_out, probe
        self._selects, self.best = selects, best

    def run(self, due: Due, step: int, outputs: RunOutputs) -> dict[str, dict[str, float]]:
        """Runs the evaluations that are due after a step, and shows pictures; collective."""
        results = {}
        if due.evaluate and self.held_out is not None:
            results["heldout"] = self._evaluate(self.held_out, step, outputs)
        if due.probe and self._probe is not None:
            results["probe"] = self._measure(self._probe)
        return results

    def _measure(self, probe: OnlineProbe) -> dict[str, float]:
        with self._watchdog.long_phase("probing"), self._engine.full_weights():
            return probe.evaluate(self._engine)

    def probe_first(self, outputs: RunOutputs) -> None:
        """Probes the initial weights, as a reference for later probes; collective."""
        if self._probe is None:
            return
        scores = self._measure(self._probe)
        del scores["seconds"]
        outputs.note_first_probe({**scores, "images": len(self._probe.labels) - self._probe.num_support})

    def _evaluate(self, held_out: HeldOut, step: int, outputs: RunOutputs) -> dict[str, float]:
        with self._watchdog.long_phase("measuring held-out images"), self._engine.full_weights():
            metrics = held_out.evaluate(self._engine)
            score = metrics[self._selects] if self._selects is not None else None
            # The first of equal scores wins. All ranks choose the same step; rank 0 keeps the weights.
            if score is not None and (self.best is None or score > self.best.score):
                weights = weights_of(self._engine.objective) if outputs.writes else {}
                self.best = BestWeights(step, score, weights)
            if outputs.writes:
                outputs.show(held_out.pictures(self._engine), step)
        return metrics
