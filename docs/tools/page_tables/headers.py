"""Figures in the headers of configs: see sentences.py."""

from __future__ import annotations

from page_tables import comparisons as of
from page_tables import pretraining
from page_tables.comparisons import (
    CNN,
    CONTRAST,
    FIVE_K,
    LABELS,
    MAE,
    RESNET,
    SCRATCH,
    TRANSFER,
)
from page_tables.values import (
    COLORS_40,
    COLORS_ELSEWHERE,
    DEMO,
    DEMO_ROWS,
    LABELS_ELSEWHERE,
    MAE_100,
    MAE_ELSEWHERE,
    Values,
    accuracies,
    longer_cnn_on_photos,
    mious,
    whole_over_scratch,
)

HEADERS: dict[str, tuple[tuple[str, Values], ...]] = {
    "configs/compare_demo.yaml": (
        ("scratch {} %, mean color {} %, supervised {} %, MAE {} %,", accuracies(DEMO, *DEMO_ROWS)),
        ("SimpleCNN {} %, SmallResNet {} % (two seeds;", accuracies(DEMO, CNN, RESNET)),
        (
            "Scratch fits {} % of its own training images",
            lambda: (of.accuracy(DEMO, DEMO_ROWS[0], "train_top1", digits=0),),
        ),
        ("MAE's row has {} times its compute", whole_over_scratch(DEMO, DEMO_ROWS[3], DEMO_ROWS[0])),
    ),
    "configs/compare_cifar10_5k.yaml": (
        (
            "ViT-Tiny {} % from scratch, {} % after MAE, {} % with the contrast;",
            accuracies(FIVE_K, SCRATCH, MAE, CONTRAST),
        ),
        (
            "SmallResNet {} %, ViT-Tiny from labels of other images {} % (three seeds)",
            accuracies(FIVE_K, RESNET, LABELS),
        ),
    ),
    "configs/study_length.yaml": (
        (
            "from scratch {} %, after 200 steps {} %, 600 steps {} %, 1,800 steps {} %, 5,400 steps {} % (three",
            lambda: tuple(of.accuracy(of.LENGTH, entry) for entry in of.rows(of.LENGTH)),
        ),
    ),
    "configs/study_length_tiny_imagenet.yaml": (
        (
            "from scratch {} %, after 2,000 steps {} %, 6,000 steps {} %; SmallResNet {} % (three",
            lambda: tuple(of.accuracy(of.LENGTH_PHOTOS, entry) for entry in of.rows(of.LENGTH_PHOTOS)),
        ),
    ),
    "configs/study_length_tiny_imagenet_cnn.yaml": (
        ("SmallResNet {} % after 257 epochs, {} % after 30 (seed 0;", lambda: longer_cnn_on_photos()[:2]),
    ),
    "configs/compare_cifar10_longer.yaml": (
        (
            "SmallResNet {} % after 30 epochs and {} % after 314 (three seeds), "
            "SimpleCNN {} % and {} % (287 epochs",
            lambda: (
                of.accuracy(of.LONGER, RESNET),
                of.accuracy(of.LONGER, of.RESNET_LONGER),
                *(of.decimal(of.percent(of.LONGER, entry)[0]) for entry in (CNN, of.CNN_LONGER)),
            ),
        ),
        (
            "SmallBiT {} % (three seeds",
            accuracies(of.LONGER, of.SMALL_BIT),
        ),
    ),
    "configs/compare_cifar10_finetune_longer.yaml": (
        (
            "{} % after 30 epochs, {} % after 100 (three seeds",
            accuracies(of.FINETUNE_LONGER, CONTRAST, of.CONTRAST_100),
        ),
    ),
    "configs/compare_cifar10_scratch_longer.yaml": (
        (
            "{} % after 30 epochs (three seeds), {} % after 500 (one",
            lambda: tuple(of.accuracy(of.SCRATCH_500, entry) for entry in (SCRATCH, of.EPOCHS_500)),
        ),
    ),
    "configs/compare_cifar10_transfer.yaml": (
        ("over three seeds: scratch {} %.", accuracies(TRANSFER, SCRATCH)),
        (
            "supervised {} %, mean color {} %, MAE {} % (",
            accuracies(TRANSFER, LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE),
        ),
    ),
    "configs/compare_segmentation.yaml": (
        ("mIoU {} % from scratch, {} % after MAE;", mious(SCRATCH, MAE)),
        ("SmallResNet {} % (three seeds)", mious(RESNET)),
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
