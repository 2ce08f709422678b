"""Figures in the sentences of docs/choosing.md: see sentences.py."""

from __future__ import annotations

from statistics import mean

from page_tables import comparisons as of
from page_tables import pretraining
from page_tables.comparisons import (
    CNN,
    CONTRAST,
    FIVE_K,
    MAE,
    MEAN_COLOR,
    RESNET,
    SCRATCH,
    TRANSFER,
)
from page_tables.values import (
    COLORS_40,
    COLORS_ELSEWHERE,
    DEMO,
    LABELS_ELSEWHERE,
    MAE_100,
    MAE_ELSEWHERE,
    above,
    accuracies,
    colors,
    frozen,
    image_gflop,
    lifts,
    longer_cnn_on_photos,
    own_head,
    pretraining_over_fine_tuning,
    psnr,
    ratio,
    scratch_500_beside_mae,
    spreads,
    whole_over_scratch,
)

PHOTOS, PHOTOS_MAE = of.LENGTH_PHOTOS, ("MAE, 2,000 steps", "MAE, 6,000 steps")
CHOOSING = (
    (
        "it fits {} % of its own 400 training images.",
        lambda: (of.accuracy(of.LENGTH, "from scratch", "train_top1", digits=0),),
    ),
    (
        "The ViT gains {} points over scratch by 2,000 steps of MAE, and {} by 6,000.",
        lambda: tuple(of.above(PHOTOS, entry, "from scratch")[0] for entry in PHOTOS_MAE),
    ),
    ("The longer run is {} points better ({} to {})", lambda: of.above(PHOTOS, *reversed(PHOTOS_MAE))),
    (
        "After 6,000 steps the ViT is {} points above SmallResNet ({} to {}),",
        lambda: of.above(PHOTOS, PHOTOS_MAE[1], RESNET),
    ),
    (
        "After 2,000 it is {} points above, which may be chance ({} to {}).",
        lambda: of.above(PHOTOS, PHOTOS_MAE[0], RESNET),
    ),
    (
        "So after 6,000 steps, with {} times its compute, the pretrained ViT is better than SmallResNet",
        whole_over_scratch(PHOTOS, PHOTOS_MAE[1], RESNET),
    ),
    (
        "the rows of MAE take {} and {} times that of scratch, SmallResNet {} times.",
        lambda: tuple(f"{ratio(PHOTOS, entry, 'from scratch'):.1f}" for entry in (*PHOTOS_MAE, RESNET)),
    ),
    (
        "scratch is right on {} % of its training images and SmallResNet on {} %.",
        lambda: tuple(
            of.accuracy(PHOTOS, entry, "train_top1", digits=0) for entry in ("from scratch", RESNET)
        ),
    ),
    (
        "for 5,400 steps takes {} times the compute of fine-tuning.",
        pretraining_over_fine_tuning,
    ),
    ("SimpleCNN reaches {} % on as many", accuracies(DEMO, CNN)),
    (
        "beside the second control, the contrast is {} points better by neighbors.",
        lambda: pretraining.contrast_gains("mae_cifar_tiny_crops_40")[:1],
    ),
    (
        "the same crops and masks are {} points below the encoder that they began from.",
        lambda: pretraining.contrast_gains("mae_cifar_tiny_crops_40", "mae_cifar_tiny_100")[:1],
    ),
    (
        "the contrast is {} points better in the mean, by {} and {} points in the two seeds.",
        lambda: pretraining.contrast_gains("mae_cifar_tiny_crops_40")[1:],
    ),
    (
        "The second control is itself {} points above its start, by {} and {}.",
        lambda: pretraining.contrast_gains("mae_cifar_tiny_100", "mae_cifar_tiny_crops_40")[1:],
    ),
    (
        "the contrast is {} points better by neighbors, and {} points after fine-tuning.",
        lambda: pretraining.contrast_gains()[:2],
    ),
    (
        "the PSNR on the 10,000 test images is {} dB with the contrast and {} dB without.",
        pretraining.contrast_psnr,
    ),
    ("than mean color ({} points, 95 % interval {} to {}).", above(FIVE_K, MAE, MEAN_COLOR)),
    (
        "on other images the difference may be chance ({} points, {} to {}).",
        above(TRANSFER, MAE_ELSEWHERE, COLORS_ELSEWHERE),
    ),
    ("| cost of an image, ViT-Tiny/4 on 32 px (model GFLOP) | {} | {} | {} |", image_gflop),
    (
        "They lift the ViT by {} points over scratch, 100 epochs by {}.",
        lambda: tuple(of.above(FIVE_K, entry, SCRATCH)[0] for entry in (of.MAE_15, MAE)),
    ),
    (
        "scratch gains {} points in one seed, where MAE gains {}.",
        lambda: (
            of.above(FIVE_K, of.SCRATCH_LONGER, SCRATCH)[0],
            of.decimal(of.percent(FIVE_K, of.MAE_15)[0] - of.percent(FIVE_K, SCRATCH)[0]),
        ),
    ),
    (
        "In 257 epochs SmallResNet reaches {} %. In that seed it has {} % after 30 epochs, and MAE has {} %.",
        longer_cnn_on_photos,
    ),
    (
        "With that of 100 epochs it gains {} points, where MAE gains {}.",
        lambda: (
            scratch_500_beside_mae()[1],
            of.decimal(of.percent(FIVE_K, MAE)[0] - of.percent(FIVE_K, SCRATCH)[0]),
        ),
    ),
    ("with its own head it is right on {} % of the test images.", own_head),
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
        "rows pretrained without labels take {} to {} times the compute of scratch, and MAE for 15 epochs {} times.",
        lambda: (
            *(f"{ratio(FIVE_K, entry):.0f}" for entry in (MEAN_COLOR, CONTRAST)),
            f"{ratio(FIVE_K, of.MAE_15):.1f}",
        ),
    ),
    ("SmallResNet reaches {} % with a third of the compute", accuracies(FIVE_K, RESNET)),
    (
        "In 314 epochs, with {} times the compute of the ViT from scratch, it reaches {} %",
        lambda: (
            f"{of.whole_pflop(of.LONGER, of.RESNET_LONGER) / of.whole_pflop(FIVE_K, SCRATCH):.1f}",
            of.accuracy(of.LONGER, of.RESNET_LONGER),
        ),
    ),
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
        "The batch size was {} for both self-supervised rows and {} for the supervised one;",
        lambda: tuple(str(of.batch_of(TRANSFER, entry)) for entry in (MAE_ELSEWHERE, LABELS_ELSEWHERE)),
    ),
)
TUTORIAL = (
    (
        "network from {} % to {} % in 2,000 steps and to {} % in 6,000",
        accuracies(PHOTOS, "from scratch", *PHOTOS_MAE),
    ),
    (
        "no pretraining reaches {} % there in the one seed that was run; MAE has {} % in it, and",
        lambda: longer_cnn_on_photos()[::2],
    ),
)
