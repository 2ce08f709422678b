"""Values of figures: what sentences of pages and headers of configs take from the result files."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import mean

from page_tables import comparisons as of
from page_tables import pretraining, segmentation, steps
from page_tables.comparisons import (
    CONTRAST,
    FIVE_K,
    LABELS,
    MEAN_COLOR,
    SCRATCH,
)
from page_tables.files import results

Values = Callable[[], tuple[str, ...]]
LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE = (
    LABELS,
    f"{MEAN_COLOR} of other images",
    f"{of.MAE} of other images",
)
DEMO = "compare_demo"
DEMO_ROWS = (
    "ViT from scratch",
    "ViT from mean color",
    "ViT supervised on 1,097 other labels",
    "ViT from MAE",
)
MAE_100, COLORS_40 = "mae_cifar_tiny_100", "masked_patch_cifar_tiny_40"


def accuracies(comparison: str, *entries: str) -> Values:
    """Test accuracies of entries, in percent."""
    return lambda: tuple(of.accuracy(comparison, entry) for entry in entries)


def above(comparison: str, entry: str, other: str) -> Values:
    """Points above another entry, with their interval."""
    return lambda: of.above(comparison, entry, other)


def spreads(comparison: str, *entries: str) -> Values:
    """Test accuracies with their spread over seeds."""
    return lambda: tuple(of.spread(of.percent(comparison, entry)) for entry in entries)


def plain(part: str, model: str = "vit") -> Values:
    """Accuracy of a network in plain_small_data.json, with its spread."""
    return lambda: (of.spread(of.plain(part, model)),)


def frozen(entry: str) -> list[float]:
    """Test accuracies of an entry's frozen encoder, seed by seed."""
    return of.percent(FIVE_K, entry, mode="few_shot")


def million_parameters(comparison: str, entry: str) -> Values:
    """Parameters of an entry, in millions."""
    return lambda: (f"{int(of.rows(comparison)[entry][0]['parameters']) / 1e6:.1f}",)


def mious(*entries: str) -> Values:
    """Mean IoU of entries, in percent."""
    return lambda: tuple(segmentation.mean_miou(entry) for entry in entries)


def ratio(comparison: str, entry: str, scratch: str = SCRATCH) -> float:
    """Compute of an entry over that of scratch, pretraining included."""
    return of.whole_pflop(comparison, entry) / of.whole_pflop(comparison, scratch)


def whole_over_scratch(comparison: str, entry: str, scratch: str = SCRATCH) -> Values:
    """How many times the compute of scratch a row has, pretraining included."""

    def values() -> tuple[str]:
        times = ratio(comparison, entry, scratch)
        return (f"{times:.1f}" if times < 100 else f"{times:,.0f}",)

    return values


def pretraining_over_fine_tuning() -> tuple[str]:
    """Compute of the longest pretraining on digits over that of its fine-tuning."""
    pretraining, fine_tuning = (
        of.pflop(of.LENGTH, "MAE, 5,400 steps", f"{what}_flops") for what in ("pretrain", "finetune")
    )
    return (f"{pretraining / fine_tuning:.0f}",)


def mae_on_masks_over_others() -> tuple[str, ...]:
    """How many times the compute of scratch and of SmallResNet MAE's row on masks has."""
    others = (SCRATCH, of.RESNET)
    return sum((whole_over_scratch(segmentation.COMPARISON, of.MAE, other)() for other in others), ())


def over_labels(entry: str) -> tuple[str, ...]:
    """Points of an entry above supervised pretraining, both ends of the interval, and times the compute."""
    times = of.whole_pflop(FIVE_K, entry) / of.whole_pflop(FIVE_K, LABELS)
    return (*of.above(FIVE_K, entry, LABELS), f"{times:.1f}")


def first_seed(*entries: str) -> tuple[str, ...]:
    """Test accuracies of the first seed."""
    return tuple(of.decimal(of.percent(FIVE_K, entry)[0]) for entry in entries)


def longer_cnn_on_photos() -> tuple[str, ...]:
    """SmallResNet with the compute of 6,000 steps of MAE, in 30 epochs, and MAE, all of seed 0."""
    longer, shorter = (of.percent(of.PHOTOS_CNN, entry)[0] for entry in (of.RESNET_257, of.RESNET))
    return tuple(map(of.decimal, (longer, shorter, of.percent(of.LENGTH_PHOTOS, "MAE, 6,000 steps")[0])))


def scratch_500_beside_mae() -> tuple[str, ...]:
    """Scratch with the compute of MAE's 100 epochs, points above 30 epochs; MAE in that seed, points above."""
    (long,) = of.percent(of.SCRATCH_500, of.EPOCHS_500)
    short, mae = (
        of.percent(comparison, entry)[0]
        for comparison, entry in ((of.SCRATCH_500, SCRATCH), (FIVE_K, of.MAE))
    )
    return tuple(map(of.decimal, (long, long - short, mae, mae - long)))


def epoch_of_scratch_500() -> tuple[str]:
    """The epoch that held-out images chose of the 500."""
    (row,) = of.rows(of.SCRATCH_500)[of.EPOCHS_500]
    steps = int(row["train_size"]) // json.loads(row["settings"])["train.effective_batch_size"]
    return (str(round(int(row["best_step"]) / steps)),)


def contrast_over_the_longer_cnn() -> tuple[str]:
    """The contrast's compute over that of the longer CNN."""
    return (f"{of.whole_pflop(FIVE_K, CONTRAST) / of.whole_pflop(of.LONGER, of.RESNET_LONGER):.1f}",)


def frozen_labels_over_mae_elsewhere() -> tuple[str]:
    """Points of the supervised encoder above MAE's, frozen, both pretrained on other images."""
    labels, mae = (
        of.percent(of.TRANSFER, entry, mode="few_shot") for entry in (LABELS_ELSEWHERE, MAE_ELSEWHERE)
    )
    return (of.decimal(mean(labels) - mean(mae)),)


def own_head() -> tuple[str]:
    """Test accuracy of the network pretrained on labels of other images, with its own head."""
    return (pretraining.percent("supervised_other_labels", "accuracy"),)


def lifts() -> tuple[str, ...]:
    """Points above scratch of the weakest and of the best pretraining."""
    return tuple(f"{float(of.above(FIVE_K, entry, SCRATCH)[0]):.0f}" for entry in (MEAN_COLOR, CONTRAST))


def psnr(*runs: str) -> Values:
    """Held-out PSNR and epochs of runs."""
    return lambda: tuple(cell for run in runs for cell in (pretraining.db(run), str(pretraining.epochs(run))))


def colors(*runs: str) -> Values:
    """Held-out accuracy of mean color and epochs of runs."""
    return lambda: tuple(
        cell for run in runs for cell in (pretraining.percent(run), str(pretraining.epochs(run)))
    )


def profile(measure: Callable[[dict[str, float]], float]) -> Values:
    """A share of both profiled steps, in percent."""
    return lambda: tuple(
        f"{100 * measure(results('profile_step.json')[config]):.0f}"
        for config in ("mae_cifar_tiny", "mae_base")
    )


def profiled(config: str) -> tuple[str, str]:
    """Batch of a profiled step, and its milliseconds."""
    each = results("profile_step.json")[config]
    median = each["ms_per_step"]["median"]
    # Three digits.
    return str(each["batch"]), str(round(median, -1 if median >= 1000 else None)).removesuffix(".0")


def image_gflop() -> tuple[str, ...]:
    """GFLOP of an image under MAE, mean color and labels."""
    measured = results("objectives.json")
    gflop = [measured[name]["model_gflops_per_image"] for name in ("mae", "masked_patch")]
    return tuple(f"{each:.2f}" for each in (*gflop, pretraining.encoder_gflop("supervised_cifar_tiny")))


def over_mae() -> tuple[str, ...]:
    """Ranges, times and FLOPs of objectives' steps as multiples of plain MAE's."""
    names = ("mae decode_ratio=0.5", "mae decode_ratio=0.25", "masked_patch")
    return (*steps.range_widths(names), *(cell for name in names for cell in steps.over_mae(name)))
