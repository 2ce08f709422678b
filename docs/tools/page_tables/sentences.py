"""Figures outside marked tables: sentences, and rows of tables whose other cells are words.

A sentence is found in its page by its words; `{}` stands for each figure. Line breaks do not matter.
"""

from __future__ import annotations

from statistics import mean

from page_tables import comparisons as of
from page_tables import engine_and_loader, pretraining, segmentation, steps
from page_tables.comparisons import (
    BIT,
    CNN,
    CONTRAST,
    FIVE_K,
    LABELS,
    MAE,
    MEAN_COLOR,
    RESNET,
    SCRATCH,
    SMALL_BIT,
    TRANSFER,
)
from page_tables.files import results
from page_tables.headers import HEADERS
from page_tables.values import (
    COLORS_40,
    COLORS_ELSEWHERE,
    DEMO,
    DEMO_ROWS,
    LABELS_ELSEWHERE,
    MAE_100,
    MAE_ELSEWHERE,
    Values,
    above,
    accuracies,
    colors,
    contrast_over_labels,
    frozen,
    image_gflop,
    lifts,
    million_parameters,
    mious,
    over_mae,
    plain,
    pretraining_over_fine_tuning,
    profile,
    profiled,
    psnr,
    ratio,
    spreads,
    whole_over_scratch,
)

README = (
    ("a ViT reaches {} % from scratch and {} % after MAE,", accuracies(DEMO, DEMO_ROWS[0], DEMO_ROWS[3])),
    ("SimpleCNN {} % and SmallResNet {} %", accuracies(DEMO, CNN, RESNET)),
    (
        "scratch fits just {} % of its own training images.",
        lambda: (of.accuracy(DEMO, DEMO_ROWS[0], "train_top1", digits=0),),
    ),
    ("MAE's row has {} times the compute of scratch.", whole_over_scratch(DEMO, DEMO_ROWS[3], DEMO_ROWS[0])),
    ("MAE's row costs {} times that of scratch", whole_over_scratch(segmentation.COMPARISON, MAE)),
    ("The run, compiled, took {} hours on one CPU core", lambda: pretraining.hours(MAE_100)[:1]),
    ("at its median rate it would take {} hours", lambda: pretraining.hours(MAE_100)[1:]),
    ("The ViT has {} M parameters", million_parameters(FIVE_K, MAE)),
    (
        "a mean IoU of {} % from scratch and {} % after MAE; SmallResNet reaches {} %.",
        mious(SCRATCH, MAE, RESNET),
    ),
    (
        "The ViT reaches {} % from scratch, {} % after masked patch prediction, {} % after MAE, and {} % after MAE "
        "with a contrast.",
        accuracies(FIVE_K, SCRATCH, MEAN_COLOR, MAE, CONTRAST),
    ),
    (
        "MAE takes {} times the compute of training from scratch, and {} times with the contrast;",
        lambda: tuple(f"{ratio(FIVE_K, entry):.1f}" for entry in (MAE, CONTRAST)),
    ),
    ("A small CNN reaches {} %, a small ResNet {} %.", accuracies(FIVE_K, CNN, RESNET)),
    (
        "points above the small ResNet; this may be chance ({} to {}).",
        lambda: above(FIVE_K, CONTRAST, RESNET)()[1:],
    ),
    ("MAE with a contrast is {} points above", lambda: above(FIVE_K, CONTRAST, RESNET)()[:1]),
    (
        "(20 epochs, not tuned) gives {} %: {} points less than MAE with the contrast, which uses no labels and {} times "
        "the compute.",
        lambda: (of.accuracy(FIVE_K, LABELS), contrast_over_labels()[0], contrast_over_labels()[3]),
    ),
    (
        "beats supervised pretraining by {} points.",
        lambda: of.above(TRANSFER, MAE_ELSEWHERE, LABELS_ELSEWHERE)[:1],
    ),
)
RESULTS = (
    (
        "SmallBiT ({} M parameters) reached {} % with",
        lambda: (*million_parameters(BIT, SMALL_BIT)(), *spreads(BIT, SMALL_BIT)()),
    ),
    ("6 blocks ({} M parameters)", million_parameters(FIVE_K, MAE)),
    ("MAE lifts the ViT by {} points over scratch (95 % interval: {} to {}),", above(FIVE_K, MAE, SCRATCH)),
    ("mean color by {} ({} to {}).", above(FIVE_K, MEAN_COLOR, SCRATCH)),
    ("the contrast's recipe, it is {} points above MAE alone ({} to {}).", above(FIVE_K, CONTRAST, MAE)),
    ("With the contrast it is {} points above SmallResNet ({} to {})", above(FIVE_K, CONTRAST, RESNET)),
    ("It is {} points above SimpleCNN ({} to {}). Both may be chance.", above(FIVE_K, CONTRAST, CNN)),
    ("MAE alone is worse than SimpleCNN by {} points ({} to {})", above(FIVE_K, CNN, MAE)),
    ("and than SmallResNet by {} ({} to {}).", above(FIVE_K, RESNET, MAE)),
    ("in 20 epochs of supervised pretraining, lift it to {} %.", accuracies(FIVE_K, LABELS)),
    (
        "without labels, is {} points above that ({} to {}), with {} times the compute.",
        contrast_over_labels,
    ),
    ("by no more than chance may explain ({} points, {} to {}).", above(FIVE_K, MAE, LABELS)),
    (
        "the contrast's encoder is {} points above that of MAE in the mean, and {} points above the supervised one.",
        lambda: tuple(f"{mean(frozen(CONTRAST)) - mean(frozen(other)):.1f}" for other in (MAE, LABELS)),
    ),
    (
        "right on {} % and {} % of their training images",
        lambda: tuple(of.accuracy(FIVE_K, entry, "train_top1", digits=0) for entry in (MAE, CONTRAST)),
    ),
    (
        "MAE's row takes {} times the compute of scratch, and {} times with the contrast. SmallResNet takes {} times.",
        lambda: tuple(f"{ratio(FIVE_K, entry):.1f}" for entry in (MAE, CONTRAST, RESNET)),
    ),
    (
        "scratch, mean color and MAE give the same accuracies to the last image: {}, {} and {} %.",
        lambda: tuple(f"{of.percent(FIVE_K, entry)[0]:.2f}" for entry in (SCRATCH, MEAN_COLOR, MAE)),
    ),
    ("(`benchmarks/plain_small_data.py`) reaches {} %", plain("runs")),
    ("With the same recipe, our code reaches {} %", plain("runner")),
    ("with PyTorch's initialization reached {} %.", plain("vit_of_pytorch")),
    (
        "on the same images by {} points ({} to {})",
        above(TRANSFER, MAE_ELSEWHERE, LABELS_ELSEWHERE),
    ),
)
CHOOSING = (
    (
        "it fits {} % of its own 400 training images.",
        lambda: (of.accuracy(of.LENGTH, "from scratch", "train_top1", digits=0),),
    ),
    (
        "for 5,400 steps takes {} times the compute of fine-tuning.",
        pretraining_over_fine_tuning,
    ),
    ("SimpleCNN reaches {} % on as many", accuracies(DEMO, CNN)),
    (
        "Beside the second control, it is {} points better by neighbors. After fine-tuning it is {} points better in the "
        "mean, by {} and {} points in the two seeds.",
        lambda: pretraining.contrast_gains("mae_cifar_tiny_crops_40"),
    ),
    (
        "the same crops and masks are {} points below the encoder that they began from, by neighbors.",
        lambda: pretraining.contrast_gains("mae_cifar_tiny_crops_40", "mae_cifar_tiny_100")[:1],
    ),
    (
        "the contrast is {} points better by neighbors, and {} points after fine-tuning.",
        lambda: pretraining.contrast_gains()[:2],
    ),
    ("the PSNR on held-out images is {} dB with it and {} dB without.", pretraining.contrast_psnr),
    ("than mean color ({} points, 95 % interval {} to {}).", above(FIVE_K, MAE, MEAN_COLOR)),
    (
        "on other images the difference may be chance ({} points, {} to {}).",
        above(TRANSFER, MAE_ELSEWHERE, COLORS_ELSEWHERE),
    ),
    ("| cost of an image, ViT-Tiny/4 on 32 px (model GFLOP) | {} | {} | {} |", image_gflop),
    (
        "MAE's PSNR is {} dB after {} epochs and {} dB after {}.",
        psnr("mae_cifar_tiny", MAE_100),
    ),
    (
        "The accuracy of mean-color prediction is {} % after {} epochs and {} % after {}.",
        colors("masked_patch_cifar_tiny", COLORS_40),
    ),
    ("lifts a Vision Transformer by {} to {} points", lifts),
    (
        "The pretrained rows take {} to {} times the compute of scratch;",
        lambda: tuple(f"{ratio(FIVE_K, entry):.0f}" for entry in (MEAN_COLOR, CONTRAST)),
    ),
    ("SmallResNet reaches {} % with a third of the compute", accuracies(FIVE_K, RESNET)),
    ("of `contrastive_mae`, gives {} %. Plain MAE gives {} %,", accuracies(FIVE_K, CONTRAST, MAE)),
    (
        "on the same labels reach {} %, and {} % after MAE alone.",
        lambda: tuple(f"{mean(frozen(entry)):.1f}" for entry in (CONTRAST, MAE)),
    ),
    (
        "One of these six seeds reached only {} %.",
        lambda: (f"{min(of.plain('runner', 'vit')):.1f}",),
    ),
    ("initialization, reached {} %.", lambda: (of.spread(of.plain("vit_of_pytorch", "vit")).split(" ")[0],)),
    (
        "The test accuracy is {} % after supervised pretraining, {} % after mean color and {} % after MAE.",
        spreads(TRANSFER, LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE),
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
        profile(lambda each: each["time_in_products"]),
    ),
    ("They run at {}% and {}% of the machine's", profile(lambda each: each["share_within_products"])),
    (
        "The whole step reaches {}% and {}% of that rate.",
        profile(lambda each: each["share_of_matrix_rate"]["median"]),
    ),
    (
        "Its step takes {} times as long as MAE's",
        lambda: (f"{results('objectives.json')['masked_patch']['time_over_mae']['median']:.1f}",),
    ),
    ("| `mae_cifar_tiny` (ranges of {} to {} %) | {} ({}) | {} ({}) | {} ({}) |", over_mae),
    (
        "a step of `contrastive_mae` takes {} times as long as MAE's.",
        lambda: steps.over_mae("contrastive_mae")[:1],
    ),
    (
        "without the contrast takes {} times as long.",
        lambda: steps.over_mae("mae mask_ratio=0.5 decode_ratio=0.5")[:1],
    ),
    ("a deep decoder) takes {} times as long.", lambda: steps.over_mae("pixio")[:1]),
    ("`mae_cifar_tiny` with a batch of {} takes {} ms:", lambda: profiled("mae_cifar_tiny")),
    ("A step of ViT-B at 224 px with a batch of {} takes {} ms:", lambda: profiled("mae_base")),
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
            whole_over_scratch(segmentation.COMPARISON, MAE),
        ),
        (
            "Scratch reaches only {} % on its own training masks",
            lambda: (segmentation.mean_miou(SCRATCH, column="train_miou"),),
        ),
    ),
    **HEADERS,
}
