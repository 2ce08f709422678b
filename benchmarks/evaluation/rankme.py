"""Does RankMe order encoders as probes with labels do?

For each encoder: RankMe and the standard deviation of its features of training images, and how well two
probes with labels, fitted on the same images, classify images of a held-out split. Then Spearman's rank
correlation of each measure with each probe, with the share of permutations whose correlation is as far from
0. Prints JSON.

    python benchmarks/evaluation/rankme.py [NAME=]START ... --data data/cifar10 [--images 5000] [--queries 2000]
        [--out FILE]

START is what `--ckpt` takes, or `random`: the first encoder's network with initial weights.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.reports import add_out, publish
from mae_vit.core.errors import InputError
from mae_vit.data.index import open_index
from mae_vit.evaluation.feature_rank import feature_metrics, feature_sums
from mae_vit.evaluation.few_shot import least_squares_scores
from mae_vit.evaluation.knn import knn_scores
from mae_vit.inspection.images import Samples, draw_samples
from mae_vit.models.attention import choose_attention
from mae_vit.weights.encoder import PretrainedEncoder, load_vit

RANDOM = "random"
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
        InputError: if one cannot be loaded, or two have the same name.
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
        encoders[name] = PretrainedEncoder(
            first.info.build(),
            fc_norm=torch.nn.Identity(),
            pool="mean",
            info=first.info,
            start=replace(first.start, tensors={}),
        )
    return encoders


@torch.no_grad()
def encode(encoder: PretrainedEncoder, samples: Samples) -> torch.Tensor:
    """Encodes images in float32: (n, D)."""
    choose_attention(encoder, torch.device("cpu"))
    return torch.cat([encoder(encoder.normalize(images)) for images in samples.images.split(_BATCH)])


def measure(encoder: PretrainedEncoder, support: Samples, query: Samples) -> dict[str, float]:
    """Computes the measures of `support`, and the accuracy of probes fitted on it, on `query`."""
    fitted, asked = encode(encoder, support), encode(encoder, query)
    values = feature_metrics(feature_sums(fitted), encoder.embed_dim)
    for name, score in PROBES.items():
        guess = score(fitted, support.labels, asked, num_classes=len(support.classes)).argmax(dim=1)
        values[name] = (guess == query.labels).double().mean().item()
    return values


def spearman(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Returns Spearman's rank correlation, and the two-sided p of scipy's permutation test; NaN if undefined."""
    fixed = np.asarray(second, float)
    with warnings.catch_warnings():
        # Of constant values, whose correlation is NaN.
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        rho = float(stats.spearmanr(first, fixed).statistic)
        if not np.isfinite(rho):
            return {"rho": np.nan, "p": np.nan}
        tested = stats.permutation_test(
            (np.asarray(first, float),),
            lambda shuffled: stats.spearmanr(shuffled, fixed).statistic,
            permutation_type="pairings",
            n_resamples=_PERMUTATIONS,
            rng=np.random.default_rng(0),
        )
    return {"rho": round(rho, 3), "p": round(float(tested.pvalue), 4)}


def correlations(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Correlates each measure with each probe."""
    return {
        f"{measured}, {probe}": spearman([row[measured] for row in rows], [row[probe] for row in rows])
        for measured in MEASURES
        for probe in PROBES
    }


def main() -> None:
    """Measures all encoders and prints the correlations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("starts", nargs="+", metavar="[NAME=]START", help="encoders, at least three")
    parser.add_argument("--data", required=True, metavar="DIR", help="prepared data with labels")
    parser.add_argument("--split", default="train", help="whose features are measured (train)")
    parser.add_argument("--held-out", default="val", help="whose images are classified (val)")
    parser.add_argument("--images", type=int, default=5000, metavar="N", help="of --split (5000)")
    parser.add_argument("--queries", type=int, default=2000, metavar="N", help="of --held-out (2000)")
    add_out(parser)
    arguments = parser.parse_args()
    try:
        encoders = read_encoders(arguments.starts)
        if len(encoders) < 3:
            raise InputError("a rank correlation takes three encoders or more")
        rows = []
        for name, encoder in encoders.items():
            support, query = (
                draw_samples(arguments.data, count=count, split=split, encoder=encoder.info)
                for split, count in (
                    (arguments.split, arguments.images),
                    (arguments.held_out, arguments.queries),
                )
            )
            labels = encoder.start.labels is not None and name != RANDOM
            rows.append({"name": name, "saw_labels": labels, **measure(encoder, support, query)})
            print(rows[-1], file=sys.stderr, flush=True)
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
    unlabeled = [row for row in rows if not row["saw_labels"]]
    report = {
        "benchmark": "rankme",
        **{name: getattr(arguments, name) for name in ("split", "held_out", "images", "queries")},
        "fingerprints": {
            split: open_index(Path(arguments.data), split).fingerprint
            for split in (arguments.split, arguments.held_out)
        },
        "encoders": rows,
        "correlations": correlations(rows),
        "correlations_without_labels": correlations(unlabeled) if len(unlabeled) > 2 else None,
    }
    publish(report, arguments.out)


if __name__ == "__main__":
    main()
