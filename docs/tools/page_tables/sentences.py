"""Figures outside marked tables: sentences, and rows of tables whose other cells are words.

A sentence is found in its page by its words; `{}` stands for each figure. Line breaks do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from page_tables import comparisons as of
from page_tables import engine_and_loader, pretraining, segmentation, steps
from page_tables.comparisons import (
    BIT,
    CNN,
    CONTRAST,
    FIVE_K,
    MAE,
    MEAN_COLOR,
    RESNET,
    SCRATCH,
    SMALL_BIT,
    TRANSFER,
)
from page_tables.files import results

Values = Callable[[], tuple[str, ...]]
LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE = of.OTHER_IMAGES.values()
DEMO = "compare_demo"
DEMO_ROWS = (
    "ViT from scratch",
    "ViT from mean color",
    "ViT supervised on 1,097 other labels",
    "ViT from MAE",
)
MAE_100, COLORS_40 = "mae_cifar_tiny_100", "masked_patch_cifar_tiny_40"


def _accuracies(comparison: str, *entries: str) -> Values:
    return lambda: tuple(of.accuracy(comparison, entry) for entry in entries)


def _above(comparison: str, entry: str, other: str) -> Values:
    return lambda: of.above(comparison, entry, other)


def _spreads(comparison: str, *entries: str) -> Values:
    return lambda: tuple(of.spread(of.percent(comparison, entry)) for entry in entries)


def _plain(part: str, model: str = "vit") -> Values:
    return lambda: (of.spread(of.plain(part, model)),)


def _frozen(entry: str) -> list[float]:
    return of.percent(FIVE_K, entry, mode="few_shot")


def _million_parameters(comparison: str, entry: str) -> Values:
    return lambda: (f"{int(of.rows(comparison)[entry][0]['parameters']) / 1e6:.1f}",)


def _mious(*entries: str) -> Values:
    return lambda: tuple(segmentation.mean_miou(entry) for entry in entries)


def _ratio(comparison: str, entry: str, scratch: str = SCRATCH) -> float:
    return of.whole_pflop(comparison, entry) / of.whole_pflop(comparison, scratch)


def _whole_over_scratch(comparison: str, entry: str, scratch: str = SCRATCH) -> Values:
    """How many times the compute of scratch a row has, pretraining included."""

    def values() -> tuple[str]:
        ratio = _ratio(comparison, entry, scratch)
        return (f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}",)

    return values


def _pretraining_over_fine_tuning() -> tuple[str]:
    pretraining, fine_tuning = (
        of.pflop(of.LENGTH, "MAE, 5,400 steps", f"{what}_flops") for what in ("pretrain", "finetune")
    )
    return (f"{pretraining / fine_tuning:.0f}",)


def _lifts() -> tuple[str, ...]:
    return tuple(f"{float(of.above(FIVE_K, entry, SCRATCH)[0]):.0f}" for entry in (MEAN_COLOR, CONTRAST))


def _psnr(*runs: str) -> Values:
    return lambda: tuple(cell for run in runs for cell in (pretraining.db(run), str(pretraining.epochs(run))))


def _colors(*runs: str) -> Values:
    return lambda: tuple(
        cell for run in runs for cell in (pretraining.percent(run), str(pretraining.epochs(run)))
    )


def _profile(measure: Callable[[dict[str, float]], float]) -> Values:
    return lambda: tuple(
        f"{100 * measure(results('profile_step.json')[config]):.0f}"
        for config in ("mae_cifar_tiny", "mae_base")
    )


def _profiled(config: str) -> tuple[str, str]:
    each = results("profile_step.json")[config]
    median = each["ms_per_step"]["median"]
    # Three digits.
    return str(each["batch"]), str(round(median, -1 if median >= 1000 else None)).removesuffix(".0")


def _image_gflop() -> tuple[str, ...]:
    measured = results("objectives.json")
    gflop = [measured[name]["model_gflops_per_image"] for name in ("mae", "masked_patch")]
    return tuple(f"{each:.2f}" for each in (*gflop, pretraining.encoder_gflop("supervised_cifar_tiny")))


def _over_mae() -> tuple[str, ...]:
    names = ("mae decode_ratio=0.5", "mae decode_ratio=0.25", "masked_patch")
    return (*steps.range_widths(names), *(cell for name in names for cell in steps.over_mae(name)))


README = (
    ("a ViT reaches {} % from scratch and {} % after MAE,", _accuracies(DEMO, DEMO_ROWS[0], DEMO_ROWS[3])),
    ("SimpleCNN {} % and SmallResNet {} %", _accuracies(DEMO, CNN, RESNET)),
    (
        "scratch fits just {} % of its own training images.",
        lambda: (of.accuracy(DEMO, DEMO_ROWS[0], "train_top1", digits=0),),
    ),
    ("MAE's row has {} times the compute of scratch.", _whole_over_scratch(DEMO, DEMO_ROWS[3], DEMO_ROWS[0])),
    ("MAE's row costs {} times that of scratch", _whole_over_scratch(segmentation.COMPARISON, MAE)),
    ("The run, compiled, took {} hours on one CPU core", lambda: pretraining.hours(MAE_100)[:1]),
    ("at its median rate it would take {} hours", lambda: pretraining.hours(MAE_100)[1:]),
    ("The ViT has {} M parameters", _million_parameters(FIVE_K, MAE)),
    (
        "a mean IoU of {} % from scratch and {} % after MAE; SmallResNet reaches {} %.",
        _mious(SCRATCH, MAE, RESNET),
    ),
    (
        "The ViT reaches {} % from scratch, {} % after masked patch prediction, {} % after MAE, and {} % after MAE "
        "with a contrast.",
        _accuracies(FIVE_K, SCRATCH, MEAN_COLOR, MAE, CONTRAST),
    ),
    (
        "MAE takes {} times the compute of training from scratch, and {} times with the contrast;",
        lambda: tuple(f"{_ratio(FIVE_K, entry):.1f}" for entry in (MAE, CONTRAST)),
    ),
    ("A small CNN reaches {} %, a small ResNet {} %.", _accuracies(FIVE_K, CNN, RESNET)),
    (
        "points above the small ResNet; this may be chance ({} to {}).",
        lambda: _above(FIVE_K, CONTRAST, RESNET)()[1:],
    ),
    ("MAE with a contrast is {} points above", lambda: _above(FIVE_K, CONTRAST, RESNET)()[:1]),
    (
        "beats supervised pretraining by {} points.",
        lambda: of.above(TRANSFER, MAE_ELSEWHERE, LABELS_ELSEWHERE)[:1],
    ),
)
RESULTS = (
    (
        "SmallBiT ({} M parameters) reached {} % with",
        lambda: (*_million_parameters(BIT, SMALL_BIT)(), *_spreads(BIT, SMALL_BIT)()),
    ),
    ("6 blocks ({} M parameters)", _million_parameters(FIVE_K, MAE)),
    ("MAE lifts the ViT by {} points over scratch (95 % interval: {} to {}),", _above(FIVE_K, MAE, SCRATCH)),
    ("mean color by {} ({} to {}).", _above(FIVE_K, MEAN_COLOR, SCRATCH)),
    ("the contrast's recipe, it is {} points above MAE alone ({} to {}).", _above(FIVE_K, CONTRAST, MAE)),
    ("With the contrast it is {} points above SmallResNet ({} to {})", _above(FIVE_K, CONTRAST, RESNET)),
    ("It is {} points above SimpleCNN ({} to {}). Both may be chance.", _above(FIVE_K, CONTRAST, CNN)),
    ("MAE alone is worse than SimpleCNN by {} points ({} to {})", _above(FIVE_K, CNN, MAE)),
    ("and than SmallResNet by {} ({} to {}).", _above(FIVE_K, RESNET, MAE)),
    (
        "the contrast's encoder is {} points above that of MAE in the mean.",
        lambda: (f"{mean(_frozen(CONTRAST)) - mean(_frozen(MAE)):.1f}",),
    ),
    (
        "right on {} % and {} % of their training images",
        lambda: tuple(of.accuracy(FIVE_K, entry, "train_top1", digits=0) for entry in (MAE, CONTRAST)),
    ),
    (
        "MAE's row takes {} times the compute of scratch, and {} times with the contrast. SmallResNet takes {} times.",
        lambda: tuple(f"{_ratio(FIVE_K, entry):.1f}" for entry in (MAE, CONTRAST, RESNET)),
    ),
    (
        "scratch, mean color and MAE give the same accuracies to the last image: {}, {} and {} %.",
        lambda: tuple(f"{of.percent(FIVE_K, entry)[0]:.2f}" for entry in (SCRATCH, MEAN_COLOR, MAE)),
    ),
    ("(`benchmarks/plain_small_data.py`) reaches {} %", _plain("runs")),
    ("With the same recipe, our code reaches {} %", _plain("runner")),
    ("with PyTorch's initialization reached {} %.", _plain("vit_of_pytorch")),
    (
        "on the same images by {} points ({} to {})",
        _above(TRANSFER, MAE_ELSEWHERE, LABELS_ELSEWHERE),
    ),
)
CHOOSING = (
    (
        "it fits {} % of its own 400 training images.",
        lambda: (of.accuracy(of.LENGTH, "from scratch", "train_top1", digits=0),),
    ),
    (
        "for 5,400 steps takes {} times the compute of fine-tuning.",
        _pretraining_over_fine_tuning,
    ),
    ("SimpleCNN reaches {} % on as many", _accuracies(DEMO, CNN)),
    (
        "this recipe is {} points better by neighbors. After fine-tuning it is {} points better in the mean, by {} "
        "and {} points in the two seeds.",
        pretraining.contrast_gains,
    ),
    ("than mean color ({} points, 95 % interval {} to {}).", _above(FIVE_K, MAE, MEAN_COLOR)),
    (
        "on other images the difference may be chance ({} points, {} to {}).",
        _above(TRANSFER, MAE_ELSEWHERE, COLORS_ELSEWHERE),
    ),
    ("| cost of an image, ViT-Tiny/4 on 32 px (model GFLOP) | {} | {} | {} |", _image_gflop),
    (
        "MAE's PSNR is {} dB after {} epochs and {} dB after {}.",
        _psnr("mae_cifar_tiny", MAE_100),
    ),
    (
        "The accuracy of mean-color prediction is {} % after {} epochs and {} % after {}.",
        _colors("masked_patch_cifar_tiny", COLORS_40),
    ),
    ("lifts a Vision Transformer by {} to {} points", _lifts),
    (
        "The pretrained rows take {} to {} times the compute of scratch;",
        lambda: tuple(f"{_ratio(FIVE_K, entry):.0f}" for entry in (MEAN_COLOR, CONTRAST)),
    ),
    ("SmallResNet reaches {} % with a third of the compute", _accuracies(FIVE_K, RESNET)),
    ("of `contrastive_mae`, gives {} %. Plain MAE gives {} %,", _accuracies(FIVE_K, CONTRAST, MAE)),
    (
        "on the same labels reach {} %, and {} % after MAE alone.",
        lambda: tuple(f"{mean(_frozen(entry)):.1f}" for entry in (CONTRAST, MAE)),
    ),
    (
        "One of these six seeds reached only {} %.",
        lambda: (f"{min(of.plain('runner', 'vit')):.1f}",),
    ),
    ("initialization, reached {} %.", lambda: (of.spread(of.plain("vit_of_pytorch", "vit")).split(" ")[0],)),
    (
        "The test accuracy is {} % after supervised pretraining, {} % after mean color and {} % after MAE.",
        _spreads(TRANSFER, LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE),
    ),
    (
        "The chosen batch size was {} for both self-supervised rows and {} for the supervised one.",
        lambda: tuple(str(of.batch_of(TRANSFER, entry)) for entry in (MAE_ELSEWHERE, LABELS_ELSEWHERE)),
    ),
)
PERFORMANCE = (
    (
        "with only ours compiled. They are {}, {} and {}: all missed.",
        lambda: tuple(
            steps.speedup("step.json", "bf16", library, kind).split(" ")[0]
            for library, kind in (
                ("transformers", "eager"),
                ("official", "eager"),
                ("transformers", "ours_compiled"),
            )
        ),
    ),
    (
        "Matrix products take {}% of the small model's step and {}% of ViT-B's",
        _profile(lambda each: each["time_in_products"]),
    ),
    ("They run at {}% and {}% of the machine's", _profile(lambda each: each["share_within_products"])),
    (
        "The whole step reaches {}% and {}% of that rate.",
        _profile(lambda each: each["share_of_matrix_rate"]["median"]),
    ),
    (
        "Its step takes {} times as long as MAE's",
        lambda: (f"{results('objectives.json')['masked_patch']['time_over_mae']['median']:.1f}",),
    ),
    ("| `mae_cifar_tiny` (ranges of {} to {} %) | {} ({}) | {} ({}) | {} ({}) |", _over_mae),
    (
        "a step of `contrastive_mae` takes {} times as long as MAE's.",
        lambda: steps.over_mae("contrastive_mae")[:1],
    ),
    (
        "without the contrast takes {} times as long.",
        lambda: steps.over_mae("mae mask_ratio=0.5 decode_ratio=0.5")[:1],
    ),
    ("a deep decoder) takes {} times as long.", lambda: steps.over_mae("pixio")[:1]),
    ("`mae_cifar_tiny` with a batch of {} takes {} ms:", lambda: _profiled("mae_cifar_tiny")),
    ("A step of ViT-B at 224 px with a batch of {} takes {} ms:", lambda: _profiled("mae_base")),
    (
        "with crop and flip, takes {} ({}-{}) times as long",
        lambda: engine_and_loader.from_shards()[:3],
    ),
    ("waited for data {}% of the time", lambda: engine_and_loader.from_shards()[3:]),
    (
        "Through a worker ours has {} to {} times the rate of simplejpeg",
        lambda: engine_and_loader.range_over("over_plain"),
    ),
    (
        "ours has {} to {} times the rate of the fastest peer with a worker.",
        lambda: engine_and_loader.range_over("over_fastest_with_a_worker"),
    ),
    (
        "Photographs come at {}% of the rate of bare `os.pread`, small files at {}%.",
        lambda: (
            engine_and_loader.share_of_reading("raw_large"),
            engine_and_loader.share_of_reading("raw_small"),
        ),
    ),
    (
        "to what `os.pread` alone reaches: {} times the rate of the stream.",
        engine_and_loader.reading_over_stream,
    ),
)
FAQ = (("On our CIFAR-10 the baseline is {} dB", lambda: (pretraining.db(MAE_100, "psnr_baseline_db"),)),)
SENTENCES: dict[str, tuple[tuple[str, Values], ...]] = {
    "README.md": README,
    "docs/results.md": RESULTS,
    "docs/choosing.md": CHOOSING,
    "docs/performance.md": PERFORMANCE,
    "docs/faq.md": FAQ,
    "docs/pretraining.md": (
        (
            "of RankMe is {} with the few-shot probe and {} with neighbors. Without the supervised encoder it is {} "
            "and {}.",
            pretraining.rank_correlations,
        ),
        (
            "For the standard deviation it is {} and {}; without the supervised encoder {} and {}.",
            lambda: pretraining.rank_correlations("feature_std"),
        ),
    ),
    "docs/segmentation.md": (
        (
            "MAE's row costs {} times the row from scratch.",
            _whole_over_scratch(segmentation.COMPARISON, MAE),
        ),
        (
            "Scratch reaches only {} % on its own training masks",
            lambda: (segmentation.mean_miou(SCRATCH, column="train_miou"),),
        ),
    ),
    "configs/compare_demo.yaml": (
        ("scratch {} %, mean color {} %, supervised {} %, MAE {} %,", _accuracies(DEMO, *DEMO_ROWS)),
        ("SimpleCNN {} %, SmallResNet {} % (two seeds;", _accuracies(DEMO, CNN, RESNET)),
        (
            "Scratch fits {} % of its own training images",
            lambda: (of.accuracy(DEMO, DEMO_ROWS[0], "train_top1", digits=0),),
        ),
        ("MAE's row has {} times its compute", _whole_over_scratch(DEMO, DEMO_ROWS[3], DEMO_ROWS[0])),
    ),
    "configs/compare_cifar10_5k.yaml": (
        (
            "ViT-Tiny {} % from scratch, {} % after MAE, {} % with the contrast;",
            _accuracies(FIVE_K, SCRATCH, MAE, CONTRAST),
        ),
        ("SmallResNet {} % (three seeds)", _accuracies(FIVE_K, RESNET)),
    ),
    "configs/study_length.yaml": (
        (
            "from scratch {} %, after 200 steps {} %, 600 steps {} %, 1,800 steps {} %, 5,400 steps {} % (three",
            lambda: tuple(of.accuracy(of.LENGTH, entry) for entry in of.rows(of.LENGTH)),
        ),
    ),
    "configs/compare_cifar10_transfer.yaml": (
        ("over three seeds: scratch {} %.", _accuracies(TRANSFER, SCRATCH)),
        (
            "supervised {} %, mean color {} %, MAE {} % (",
            _accuracies(TRANSFER, LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE),
        ),
    ),
    "configs/compare_segmentation.yaml": (
        ("mIoU {} % from scratch, {} % after MAE;", _mious(SCRATCH, MAE)),
        ("SmallResNet {} % (three seeds)", _mious(RESNET)),
    ),
    "configs/mae_cifar_tiny.yaml": (
        (
            "masked patches {} dB, {} dB above the true",
            lambda: tuple(
                pretraining.db("mae_cifar_tiny", metric, 1) for metric in ("psnr_db", "psnr_gain_db")
            ),
        ),
        (
            "{} dB, {} hours on a shared core ({} at the median",
            lambda: (pretraining.db(MAE_100, digits=1), *pretraining.hours(MAE_100)),
        ),
    ),
    "configs/masked_patch_cifar_tiny.yaml": (
        (
            "{} minutes on a machine with other work ({} at the median",
            lambda: pretraining.minutes("masked_patch_cifar_tiny"),
        ),
        ("{} % accuracy on [mask] positions", lambda: (pretraining.percent("masked_patch_cifar_tiny"),)),
        (
            "patch gives {} % (1 seed); train.epochs=40: {} %, {} hours on a shared core ({} at the median",
            lambda: (
                pretraining.percent(COLORS_40, "accuracy_nearest_visible"),
                pretraining.percent(COLORS_40),
                *pretraining.hours(COLORS_40),
            ),
        ),
    ),
    "configs/joint_cifar_tiny.yaml": (
        ("{} minutes on one core", lambda: pretraining.minutes("joint_cifar_tiny")[:1]),
        (
            "PSNR {} dB (baseline {}), accuracy on [mask] positions {} %",
            lambda: (
                pretraining.db("joint_cifar_tiny", "mae_psnr_db"),
                pretraining.db("joint_cifar_tiny", "mae_psnr_baseline_db"),
                pretraining.percent("joint_cifar_tiny", "masked_patch_accuracy_on_mask"),
            ),
        ),
    ),
    "configs/supervised_cifar_tiny.yaml": (
        ("{} minutes on one core", lambda: pretraining.minutes("supervised_cifar_tiny")[:1]),
        ("held-out accuracy {} %", lambda: (pretraining.percent("supervised_cifar_tiny", "accuracy"),)),
    ),
}
