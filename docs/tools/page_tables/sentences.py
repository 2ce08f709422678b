"""Figures outside marked tables: sentences, and rows of tables whose other cells are words.

A sentence is found in its page by its words; `{}` stands for each figure. Line breaks do not matter.
"""

from __future__ import annotations

from page_tables import (
    choosing,
    engine_and_loader,
    gpu,
    pretraining,
    results_page,
    segmentation,
    small_machine,
    steps,
)
from page_tables import comparisons as of
from page_tables.comparisons import (
    CNN,
    CONTRAST,
    FIVE_K,
    LABELS,
    MAE,
    MEAN_COLOR,
    RESNET,
    SCRATCH,
    TRANSFER,
)
from page_tables.files import results
from page_tables.headers import HEADERS
from page_tables.values import (
    DEMO,
    DEMO_ROWS,
    LABELS_ELSEWHERE,
    MAE_100,
    MAE_ELSEWHERE,
    Values,
    above,
    accuracies,
    contrast_over_the_longer_cnn,
    first_seed,
    frozen_labels_over_mae_elsewhere,
    lifts,
    longer_cnn_on_photos,
    mae_on_masks_over_others,
    million_parameters,
    mious,
    over_labels,
    over_mae,
    own_head,
    profile,
    profiled,
    ratio,
    scratch_500_beside_mae,
    whole_over_scratch,
)

# Of the README, and of the first page of the documentation.
IN_SHORT = (
    (
        "100 epochs of MAE lift a small ViT from {} % to {} %, and 40 more with a contrast to {} %. A small ResNet "
        "that is not pretrained reaches {} %, and {} % if it trains longer",
        lambda: (
            *accuracies(FIVE_K, SCRATCH, MAE, CONTRAST, RESNET)(),
            of.accuracy(of.LONGER, of.RESNET_LONGER),
        ),
    ),
)
README = (
    ("A compiled step of ViT-B/16 reaches {} images/s, {} % of the peak rate.", gpu.compiled),
    (
        "A run from JPEGs reaches {}, and waits for data in {} % of its time",
        gpu.fed,
    ),
    *IN_SHORT,
    (
        "a ViT reaches {} % from scratch and {} % after MAE, SimpleCNN {} % without pretraining",
        accuracies(DEMO, DEMO_ROWS[0], DEMO_ROWS[3], CNN),
    ),
    (
        "MAE's row costs {} times that of scratch, and {} times that of SmallResNet.",
        mae_on_masks_over_others,
    ),
    ("The run, compiled, took {} hours on one CPU core", lambda: pretraining.hours(MAE_100)[:1]),
    ("at its median rate it would take {} hours", lambda: pretraining.hours(MAE_100)[1:]),
    ("The ViT has {} M parameters", million_parameters(FIVE_K, MAE)),
    (
        "a mean IoU of {} % from scratch and {} % after MAE; SmallResNet reaches {} %.",
        mious(SCRATCH, MAE, RESNET),
    ),
    (
        "The ViT reaches {} % from scratch, {} % after masked patch prediction (40 epochs), {} % after MAE "
        "(100 epochs), and {} % after 40 more epochs with a contrast.",
        accuracies(FIVE_K, SCRATCH, MEAN_COLOR, MAE, CONTRAST),
    ),
    ("Pretraining without labels lifts the ViT by {} to {} points.", lifts),
    (
        "MAE takes {} times the compute of training from scratch, and {} times with the contrast.",
        lambda: tuple(f"{ratio(FIVE_K, entry):.1f}" for entry in (MAE, CONTRAST)),
    ),
    (
        "MAE for 15 epochs, as in its config, gives {} %. With the compute of that row, scratch reaches {} % in the "
        "one seed that was run, and MAE {} % in it.",
        lambda: (of.accuracy(FIVE_K, of.MAE_15), *first_seed(of.SCRATCH_LONGER, of.MAE_15)),
    ),
    (
        "With the compute of 100 epochs, scratch reaches {} % and MAE {} %, again in one seed.",
        lambda: scratch_500_beside_mae()[::2],
    ),
    (
        "There the ViT reaches {} % from scratch, and {} % after 6,000 steps of MAE on all 25,000 training images of "
        "these classes, without labels. SmallResNet reaches {} %.",
        accuracies(choosing.PHOTOS, "from scratch", choosing.PHOTOS_MAE[1], RESNET),
    ),
    (
        "SmallResNet reaches {} % with the compute of MAE's row (257 epochs), and MAE {} % in that seed.",
        lambda: longer_cnn_on_photos()[::2],
    ),
    (
        "there has {} times the compute of scratch",
        whole_over_scratch(choosing.PHOTOS, choosing.PHOTOS_MAE[1], "from scratch"),
    ),
    ("In 30 epochs SimpleCNN reaches {} %, SmallResNet {} %.", accuracies(FIVE_K, CNN, RESNET)),
    ("the compute of MAE for 15, SmallResNet reaches {} %.", accuracies(of.LONGER, of.RESNET_LONGER)),
    ("whose compute is {} times as much.", contrast_over_the_longer_cnn),
    (
        "Fine-tuned for 100 epochs in place of 30, MAE with a contrast reaches {} %",
        accuracies(of.FINETUNE_LONGER, of.CONTRAST_100),
    ),
    (
        "points above the latter; this may be chance ({} to {}).",
        lambda: above(FIVE_K, CONTRAST, RESNET)()[1:],
    ),
    ("MAE with a contrast is {} points above", lambda: above(FIVE_K, CONTRAST, RESNET)()[:1]),
    ("and their labels give {} % (20 epochs,", accuracies(FIVE_K, LABELS)),
    (
        "MAE is {} points above it, with {} times the compute; the gain may be chance ({} to {}).",
        lambda: tuple(over_labels(MAE)[place] for place in (0, 3, 1, 2)),
    ),
    ("the supervised network reaches {} %.", own_head),
    (
        "is {} points above supervised pretraining; this may be chance ({} to {}).",
        above(TRANSFER, MAE_ELSEWHERE, LABELS_ELSEWHERE),
    ),
    ("Frozen, the supervised encoder is {} points better", frozen_labels_over_mae_elsewhere),
)
PERFORMANCE = (
    ("A square matrix product of 8,192 reaches {} TFLOP/s there.", gpu.matrix_rate),
    ("decoding alone gave {} images/s (JPEGs of 500 x 375).", gpu.decoding),
    ("a run of 80 compiled steps reached {} images/s and waited in {} % of the time", gpu.fed),
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
    ("a deep decoder) takes {} ({} to {}) times as long.", steps.pixio_over_mae),
    ("Plain MAE's own time varied from {} to {} ms in these rounds.", steps.range_of_mae),
    ("Their ranges overlap ({} to {}, and {} to {})", steps.ranges_with_and_without_contrast),
    ("{} of the {} ranges include 1 before rounding", steps.ranges_with_one),
    ("ours is {} times as fast with a random crop", lambda: (engine_and_loader.rrc_in_memory(),)),
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
        "Ours has {} to {} times the rate of the fastest peer with a worker, on the same single core;",
        lambda: engine_and_loader.range_over("over_fastest_with_a_worker"),
    ),
    (
        "they are {} and {} times as fast as ours, and no peer.",
        engine_and_loader.one_box_a_batch,
    ),
    (
        "Photographs come at {}% of the rate of bare `os.pread`, small files at {}%.",
        lambda: (
            engine_and_loader.share_of_reading("raw_large"),
            engine_and_loader.share_of_reading("raw_small"),
        ),
    ),
    (
        "`os.pread` alone reaches {} times the rate of the stream.",
        engine_and_loader.reading_over_stream,
    ),
)
FAQ = (
    ("On our CIFAR-10 the baseline is {} dB", lambda: (pretraining.db(MAE_100, "psnr_baseline_db"),)),
    (
        "from {} to {} % with 5,000 labels of CIFAR-10",
        lambda: tuple(of.accuracy(FIVE_K, entry, digits=0) for entry in (SCRATCH, MAE)),
    ),
)
SENTENCES: dict[str, tuple[tuple[str, Values], ...]] = {
    "README.md": README,
    "docs/index.md": IN_SHORT,
    "docs/results.md": results_page.RESULTS,
    "docs/choosing.md": choosing.CHOOSING,
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
    "docs/tutorial.md": choosing.TUTORIAL,
    "docs/scaling.md": (
        ("in {} rounds of {} to {} and {} to {} images/s.", small_machine.ranges_of_ranks),
        (
            "the slowest start took {} s.",
            small_machine.slowest_start,
        ),
    ),
    "docs/segmentation.md": (
        (
            "MAE's row costs {} times the row from scratch, and {} times that of SmallResNet.",
            mae_on_masks_over_others,
        ),
        (
            "Scratch reaches only {} % on its own training masks",
            lambda: (segmentation.mean_miou(SCRATCH, column="train_miou"),),
        ),
    ),
    **HEADERS,
}
