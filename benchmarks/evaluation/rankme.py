"""Does RankMe order encoders as probes with labels do?

For each encoder: RankMe and the standard deviation of its features of training images, and how well two
probes with labels, fitted on the same images, classify images of a held-out split. Then Spearman's rank
correlation of each measure with each probe, with the share of permutations whose correlation is as far from 0.

    python benchmarks/evaluation/rankme.py [NAME=]START ... --data data/cifar10 [--out FILE]

START is what `--ckpt` takes, or `random`: the first encoder's network with initial weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.command import make_parser, parse, publish, run
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.evaluation.few_shot import least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.inspection.images import Samples, draw_samples
from mae_vit.models.attention import choose_attention
from mae_vit.weights.encoder import PretrainedEncoder, load_vit

RANDOM, TRAIN = "random", "train"
MEASURES = ("rankme", "feature_std")
PROBES: dict[str, Callable[..., torch.Tensor]] = {
    "few_shot_top1": least_squares_scores,
    "knn_top1": knn_scores,
}
_BATCH = 250
_PERMUTATIONS = 10_000


def read_encoders(words: Sequence[str]) -> dict[str, PretrainedEncoder]:
    """Loads the encoders by name; each pools the mean of its patch tokens.

    Raises:
        InputError: if one cannot be loaded, two have the same name, or there are fewer than three.
    """
    encoders: dict[str, PretrainedEncoder] = {}
    for word in words:
        name, _, start = word.rpartition("=")
        name = name or start
        if name in encoders:
            raise InputError(f'two encoders have the name "{name}": give NAME=START')
        if start != RANDOM:
            encoders[name] = load_vit(start, pool="mean")
            continue
        if not encoders:
            raise InputError(f'"{RANDOM}" takes the network of the first encoder: give it later')
        first = next(iter(encoders.values()))
        torch.manual_seed(0)
        initial = replace(first.start, tensors={})
        encoders[name] = PretrainedEncoder(
            first.info.geometry.build(),
            fc_norm=torch.nn.Identity(),
            pool="mean",
            info=first.info,
            start=initial,
        )
    if len(encoders) < 3:
        raise InputError("a rank correlation takes three encoders or more")
    return encoders


@torch.no_grad()
def measure(encoder: PretrainedEncoder, support: Samples, query: Samples) -> dict[str, float]:
    """Computes the measures of `support`, and the accuracy of probes fitted on it, on `query`; in float32."""
    choose_attention(encoder, torch.device("cpu"))
    fitted, asked = (
        torch.cat([encoder(encoder.normalize(images)) for images in samples.images.split(_BATCH)])
        for samples in (support, query)
    )
    values = feature_metrics(feature_sums(fitted), encoder.embed_dim)
    for name, score in PROBES.items():
        guess = score(fitted, support.labels, asked, num_classes=int(support.labels.max()) + 1).argmax(dim=1)
        values[name] = (guess == query.labels).double().mean().item()
    return values


def spearman(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Returns Spearman's rank correlation, and the two-sided p of scipy's permutation test; NaN if undefined."""
    tested = stats.permutation_test(
        (np.asarray(first, float),),
        lambda shuffled: stats.spearmanr(shuffled, second).statistic,
        permutation_type="pairings",
        n_resamples=_PERMUTATIONS,
        rng=np.random.default_rng(0),
    )
    return {"rho": round(float(tested.statistic), 3), "p": round(float(tested.pvalue), 4)}


def correlations(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Correlates each measure with each probe."""
    return {
        f"{measured}, {probe}": spearman([row[measured] for row in rows], [row[probe] for row in rows])
        for measured in MEASURES
        for probe in PROBES
    }


def main() -> None:
    """Measures all encoders and prints the correlations."""
    parser = make_parser(__doc__)
    parser.add_argument("starts", nargs="+", metavar="[NAME=]START", help="encoders, at least three")
    parser.add_argument("--data", required=True, metavar="DIR", help="prepared data with labels")
    parser.add_argument("--held-out", default="val", help="the split whose images are classified (val)")
    parser.add_argument("--images", type=int, default=5000, metavar="N", help="of the split train (5000)")
    parser.add_argument("--queries", type=int, default=2000, metavar="N", help="of --held-out (2000)")
    arguments = parse(parser)
    counts = {TRAIN: arguments.images, arguments.held_out: arguments.queries}
    rows = []
    for name, encoder in read_encoders(arguments.starts).items():
        support, query = (
            draw_samples(arguments.data, count=count, split=split, encoder=encoder.info)
            for split, count in counts.items()
        )
        labels = encoder.start.labels is not None and name != RANDOM
        rows.append({"name": name, "saw_labels": labels, **measure(encoder, support, query)})
        print(rows[-1], file=sys.stderr, flush=True)
    unlabeled = [row for row in rows if not row["saw_labels"]]
    prints = {split: open_index(Path(arguments.data), split).fingerprint for split in counts}
    report = {
        "benchmark": "rankme",
        "split": TRAIN,
        "fingerprints": prints,
        "encoders": rows,
        "correlations": correlations(rows),
        "correlations_without_labels": correlations(unlabeled) if len(unlabeled) > 2 else None,
    }
    publish(report, arguments, "held_out", "images", "queries", threads=torch.get_num_threads())


if __name__ == "__main__":
    run(main)
