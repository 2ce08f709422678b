"""Figures in the sentences of docs/results.md."""

from __future__ import annotations

from statistics import mean

from page_tables import choosing
from page_tables import comparisons as of
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
from page_tables.values import (
    COLORS_ELSEWHERE,
    DEMO,
    DEMO_ROWS,
    LABELS_ELSEWHERE,
    MAE_ELSEWHERE,
    above,
    accuracies,
    contrast_over_the_longer_cnn,
    epoch_of_scratch_500,
    first_seed,
    frozen,
    frozen_labels_over_mae_elsewhere,
    longer_cnn_on_photos,
    million_parameters,
    over_labels,
    own_head,
    plain,
    ratio,
    scratch_500_beside_mae,
    spreads,
    whole_over_scratch,
)

RESULTS = (
    (
        "With as much compute SmallResNet reaches {} % in the one seed that was run, and MAE has {} % in it",
        lambda: longer_cnn_on_photos()[::2],
    ),
    (
        "6,000 steps of MAE lift the ViT from {} to {} %. That is {} points, against {} after 100 epochs on CIFAR-10, "
        "but here the ViT is above SmallResNet, which reaches {} % with less than an eighth of the compute.",
        lambda: (
            *accuracies(choosing.PHOTOS, "from scratch", choosing.PHOTOS_MAE[1])(),
            of.above(choosing.PHOTOS, choosing.PHOTOS_MAE[1], "from scratch")[0],
            of.above(FIVE_K, MAE, SCRATCH)[0],
            of.accuracy(choosing.PHOTOS, RESNET),
        ),
    ),
    (
        "SmallBiT ({} M parameters) reached {} % with",
        lambda: (*million_parameters(BIT, SMALL_BIT)(), *spreads(BIT, SMALL_BIT)()),
    ),
    ("6 blocks ({} M parameters)", million_parameters(FIVE_K, MAE)),
    ("MAE lifts the ViT by {} points over scratch (95 % interval: {} to {}),", above(FIVE_K, MAE, SCRATCH)),
    ("mean color by {} ({} to {}).", above(FIVE_K, MEAN_COLOR, SCRATCH)),
    ("the ViT with the contrast reaches {} %. The", spreads(of.FINETUNE_LONGER, of.CONTRAST_100)),
    (
        "difference to 30 epochs, {} points ({} to {}), may be chance.",
        lambda: of.above_reference(of.FINETUNE_LONGER, of.CONTRAST_100),
    ),
    (
        "The long runs are right on {} % of their training images.",
        lambda: (of.accuracy(of.FINETUNE_LONGER, of.CONTRAST_100, "train_top1"),),
    ),
    ("the contrast's recipe, it is {} points above MAE alone ({} to {}).", above(FIVE_K, CONTRAST, MAE)),
    ("With the contrast it is {} points above SmallResNet ({} to {})", above(FIVE_K, CONTRAST, RESNET)),
    ("It is {} points above SimpleCNN ({} to {}). Both may be chance.", above(FIVE_K, CONTRAST, CNN)),
    ("MAE alone is worse than SimpleCNN by {} points ({} to {})", above(FIVE_K, CNN, MAE)),
    ("and than SmallResNet by {} ({} to {}).", above(FIVE_K, RESNET, MAE)),
    ("with their labels, lifts it to {} %.", accuracies(FIVE_K, LABELS)),
    (
        "MAE is {} points above that, which may be chance ({} to {}), with {} times the compute.",
        lambda: over_labels(MAE),
    ),
    (
        "With the contrast it is {} points above ({} to {}), with {} times the compute.",
        lambda: over_labels(CONTRAST),
    ),
    (
        "labels are {} points above it ({} to {}), with {} times the compute. Frozen, they are {} points above it.",
        lambda: (
            *of.above(FIVE_K, LABELS, of.MAE_15),
            f"{of.whole_pflop(FIVE_K, LABELS) / of.whole_pflop(FIVE_K, of.MAE_15):.1f}",
            f"{mean(frozen(LABELS)) - mean(frozen(of.MAE_15)):.1f}",
        ),
    ),
    (
        "The small CNNs are {} and {} points above it, too.",
        lambda: tuple(of.above(FIVE_K, entry, LABELS)[0] for entry in (CNN, RESNET)),
    ),
    ("it is right on {} % of the test images.", own_head),
    ("as it was pretrained: {} points better, too little to replace it.", of.gain_through_cls),
    (
        "the contrast's encoder is {} points above that of MAE in the mean. The supervised one is {} points above "
        "MAE's,",
        lambda: tuple(f"{mean(frozen(other)) - mean(frozen(MAE)):.1f}" for other in (CONTRAST, LABELS)),
    ),
    (
        "right on {} % and {} % of their training images",
        lambda: tuple(of.accuracy(FIVE_K, entry, "train_top1", digits=0) for entry in (MAE, CONTRAST)),
    ),
    (
        "MAE's row takes {} times the compute of scratch, and {} times with the contrast. Supervised pretraining takes "
        "{} times, MAE for 15 epochs {} times, and SmallResNet {} times.",
        lambda: tuple(f"{ratio(FIVE_K, entry):.1f}" for entry in (MAE, CONTRAST, LABELS, of.MAE_15, RESNET)),
    ),
    (
        "its preset's length, lifts the ViT to {} %. With as much compute as that whole row, scratch reaches {} % in "
        "the one seed that was run.",
        accuracies(FIVE_K, of.MAE_15, of.SCRATCH_LONGER),
    ),
    (
        "In that seed MAE reaches {} %, {} points more, and scratch for 30 epochs {} %.",
        lambda: (
            *first_seed(of.MAE_15),
            of.above(FIVE_K, of.MAE_15, of.SCRATCH_LONGER)[0],
            *first_seed(SCRATCH),
        ),
    ),
    (
        "scratch reaches {} % in 500 epochs, again in one seed. That is {} points more than in 30 epochs in that seed; "
        "MAE reaches {} % in it, {} points more.",
        scratch_500_beside_mae,
    ),
    (
        "The long run is right on {} % of its training images.",
        lambda: (of.accuracy(of.SCRATCH_500, of.EPOCHS_500, "train_top1", digits=0),),
    ),
    ("On held-out images its epoch {} is the best.", epoch_of_scratch_500),
    (
        "The ViT and SmallResNet fit their training images ({} % and {} %),",
        lambda: (
            of.accuracy(of.SCRATCH_500, of.EPOCHS_500, "train_top1", digits=0),
            of.accuracy(of.LONGER, of.RESNET_LONGER, "train_top1", digits=0),
        ),
    ),
    (
        "So it reaches {} %, a gain of {} points ({} to {}).",
        lambda: (
            *spreads(of.LONGER, of.RESNET_LONGER)(),
            *of.above(of.LONGER, of.RESNET_LONGER, RESNET),
        ),
    ),
    ("whose compute is {} times as much.", contrast_over_the_longer_cnn),
    (
        "SimpleCNN reaches {} % in 287 epochs, in the one seed that was run, and {} % in 30 epochs in that seed",
        lambda: (of.accuracy(of.LONGER, of.CNN_LONGER), of.decimal(of.percent(of.LONGER, CNN)[0])),
    ),
    ("SmallBiT reaches {} % in 30 epochs", spreads(of.LONGER, SMALL_BIT)),
    (
        "scratch, mean color and MAE give the same accuracies to the last image: {}, {} and {} %.",
        lambda: tuple(f"{of.percent(FIVE_K, entry)[0]:.2f}" for entry in (SCRATCH, MEAN_COLOR, MAE)),
    ),
    ("(`benchmarks/plain_small_data.py`) reaches {} %", plain("runs")),
    (
        "Scratch reaches {} % ({} and {}), MAE {} %, SimpleCNN {} % and SmallResNet {} %.",
        lambda: (
            of.accuracy(DEMO, DEMO_ROWS[0]),
            *map(of.decimal, of.percent(DEMO, DEMO_ROWS[0])),
            *accuracies(DEMO, DEMO_ROWS[3], CNN, RESNET)(),
        ),
    ),
    ("With more steps scratch is better: {} % after", accuracies(of.LENGTH, "from scratch")),
    (
        "scratch fits just {} % of its own training images.",
        lambda: (of.accuracy(DEMO, DEMO_ROWS[0], "train_top1", digits=0),),
    ),
    (
        "MAE's row here has {} times the compute of scratch.",
        whole_over_scratch(DEMO, DEMO_ROWS[3], DEMO_ROWS[0]),
    ),
    ("With the same recipe, our code reaches {} %", plain("runner")),
    ("with PyTorch's initialization reached {} %.", plain("vit_of_pytorch")),
    (
        "MAE is {} points above supervised pretraining on the same images ({} to {}),",
        above(TRANSFER, MAE_ELSEWHERE, LABELS_ELSEWHERE),
    ),
    (
        "whole rows take {} times that of scratch after labels, {} after mean color and {} after MAE.",
        lambda: tuple(
            f"{ratio(TRANSFER, entry):.1f}" for entry in (LABELS_ELSEWHERE, COLORS_ELSEWHERE, MAE_ELSEWHERE)
        ),
    ),
    (
        "In the first comparison it gains {} points by {} times its compute",
        lambda: (
            of.above(FIVE_K, of.SCRATCH_LONGER, SCRATCH)[0],
            f"{ratio(FIVE_K, of.SCRATCH_LONGER):.1f}",
        ),
    ),
    ("Mean color is {} points above it ({} to {}),", above(TRANSFER, COLORS_ELSEWHERE, LABELS_ELSEWHERE)),
    ("MAE {} points above mean color ({} to {}).", above(TRANSFER, MAE_ELSEWHERE, COLORS_ELSEWHERE)),
    ("the supervised encoder is the best: {} points above that of MAE", frozen_labels_over_mae_elsewhere),
)
