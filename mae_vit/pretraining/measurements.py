"""What pretraining gained where it was measured, for `mae-vit recommend`."""

from typing import NamedTuple


class Measured(NamedTuple):
    """A measured effect of the length: `docs/results/SOURCE/results.csv`, fine-tuned, mean over seeds.

    Attributes:
        what: the images, in words.
        side: their side in pixels.
        images: how many the encoder was pretrained on.
        labels: how many fine-tuning had.
        gains: steps of MAE -> points of test accuracy above the same ViT from scratch.
        cnn: what a small CNN reached against it.
        source: folder of the result.
    """

    what: str
    side: int
    images: int
    labels: int
    gains: dict[int, float]
    cnn: str
    source: str


MEASUREMENTS = (
    Measured(
        "handwritten digits of 8 px", 8, 1_497, 400, {200: -5.4, 600: 29.8, 1_800: 38.1, 5_400: 40.1},
        "small CNNs do as well without pretraining", "study_length",
    ),
    Measured(
        "CIFAR-10", 32, 50_000, 5_000, {2_925: 13.6, 19_500: 18.5},
        "a small CNN that trains for long is better still", "compare_cifar10_5k",
    ),
    Measured(
        "photographs of 64 px", 64, 1_000, 1_000, {2_000: 11.9},
        "a small CNN with as much compute and mixed images is better still", "study_thousand_photos",
    ),
    Measured(
        "photographs of 64 px", 64, 5_000, 1_000, {2_000: 12.4},
        "a small CNN with as much compute does as well", "study_few_images",
    ),
    Measured(
        "photographs of 64 px", 64, 25_000, 2_500, {2_000: 10.6, 6_000: 16.7},
        "a small CNN with as much compute does as well", "study_length_tiny_imagenet",
    ),
)  # fmt: skip
