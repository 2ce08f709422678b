"""The section `data`: where images come from, their order, and their augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from mae_vit.config.section import Options, Section
from mae_vit.config.typed_yaml import PathText
from mae_vit.core.messages import nearest
from mae_vit.core.urls import is_url

if TYPE_CHECKING:  # imports torch
    from mae_vit.data.images.augment import BatchPolicy, Policy

# Name in `data.augment.policy` -> module and class, which takes the options of that name; "none" has no class.
POLICIES = {
    "none": "",
    "randaugment": "mae_vit.data.images.auto_augment:RandAugment",
    "autoaugment_cifar": "mae_vit.data.images.auto_augment:AutoAugmentCifar",
    "color": "mae_vit.data.images.color:ColorJitter",
}


def register_policy(policy: type[Policy | BatchPolicy]) -> None:
    """Adds a plug-in's augmentation policy under its `name`; raises ValueError if there is another."""
    where = f"{policy.__module__}:{policy.__qualname__}"
    if POLICIES.setdefault(policy.name, where) != where:
        raise ValueError(f'there is already a policy "{policy.name}"; choose another name')


def _check_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(nearest(name, POLICIES))
    return name


# Plug-ins add to the names.
PolicyName = Annotated[str, AfterValidator(_check_policy)]


class AugmentSection(Section):
    """Keyed augmentation: a sample of an epoch gets the same crop on every rank and worker.

    Attributes:
        crop: shift after padding, or random resized crop.
        pad_px: padding of `crop=pad`, in pixels.
        scale: range of the share of the area that `crop=random_resized` takes.
        ratio: range of width over height of `crop=random_resized`.
        flip: mirror half of the images.
        policy: color and shape augmentation: `none`, `randaugment`, `autoaugment_cifar`, `color`, or a plug-in's.
        num_ops: operations of `randaugment` for each image.
        magnitude: strength of an operation of `randaugment`, 0 to 10.
        magnitude_std: standard deviation of the strength of `randaugment`.
        brightness: range of brightness of `color`.
        contrast: range of contrast of `color`.
        saturation: range of saturation of `color`.
        hue: range of hue of `color`.
        gray: probability that `color` makes an image gray.
        erasing: probability that a box of an image is erased.
        device: where small images in memory are cropped, flipped and colored: by data workers on the host, or on the
            training device, which then holds the images. Both give the same pixels. `auto` takes a GPU with room for
            them.
    """

    options: ClassVar[Options] = {
        "crop": {"pad": ("pad_px",), "random_resized": ("scale", "ratio")},
        "policy": {
            "randaugment": ("num_ops", "magnitude", "magnitude_std"),
            "color": ("brightness", "contrast", "saturation", "hue", "gray"),
        },
    }

    crop: Literal["none", "pad", "random_resized"] = "none"
    pad_px: int = Field(default=4, gt=0)  # as usual for CIFAR
    # The scale of MAE Sec. A.1, torchvision's ratio.
    scale: list[float] = Field(default=[0.2, 1.0], min_length=2, max_length=2)
    ratio: list[float] = Field(default=[3 / 4, 4 / 3], min_length=2, max_length=2)
    flip: bool = True
    policy: PolicyName = "none"
    # MAE's fine-tuning (Sec. A.1: RandAugment "9, 0.5"), which is timm's rand-m9-mstd0.5-inc1.
    num_ops: int = Field(default=2, gt=0)
    magnitude: float = Field(default=9.0, ge=0, le=10)
    magnitude_std: float = Field(default=0.5, ge=0)
    # SimCLR for CIFAR-10 (arXiv 2002.05709, App. A and B.9: strength 0.5).
    brightness: float = Field(default=0.4, ge=0, le=1)
    contrast: float = Field(default=0.4, ge=0, le=1)
    saturation: float = Field(default=0.4, ge=0, le=1)
    hue: float = Field(default=0.1, ge=0, le=0.5)
    gray: float = Field(default=0.2, ge=0, le=1)
    erasing: float = Field(default=0.0, ge=0, le=1)
    device: Literal["auto", "host", "device"] = "auto"

    @model_validator(mode="after")
    def _check(self) -> AugmentSection:
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale}: must have 0 < low <= high <= 1 (shares of the area)")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio}: must have 0 < low <= high (width / height)")
        return self

    @property
    def changes_nothing(self) -> bool:
        """Whether all views of an image are equal."""
        return self.crop == self.policy == "none" and not (self.flip or self.erasing)


class DataSection(Section):
    """The images: their folder, order, loading and augmentation.

    Attributes:
        path: folder of prepared shards, or its URL; or a folder, an archive or a table of images.
        cache_dir: the folder for shards fetched from a URL, or prepared from a folder of images (null: the user's
            cache folder).
        cache_gib: if `path` is a URL, the most that fetched shards may take there (null: 50 GiB).
        split: split to train on.
        source: keep decoded images in memory, or read the shards. `auto` keeps images of one size, if they fit.
        order: "global" permutes all images. With "blocks" a rank reads only the shards of its lanes, a few at a time.
        lanes: parts of an epoch that read different shards, with `order=blocks` (null: 8).
        block_shards: shards of a lane that `order=blocks` mixes (null: 4).
        workers: decoding processes of a rank.
        memory_limit_gib: largest size of the images that are kept in memory.
        repeats: the number of views (crops) of each image in a batch. The image is decoded once for all of them
            (repeated augmentation, Hoffer et al. 2020). It helps if training waits for decoding. The number of views in
            an epoch stays the same, so each image occurs in one of `repeats` epochs.
        normalize: mean and standard deviation: those of the data, of ImageNet, 0.5, or `[means, stds]`.
        leave_out_per_class: N leaves out the images that fine-tuning's `data.labels_per_class=N` takes. Use it
            for pretraining with labels, so that it does not see the labels of fine-tuning.
        leave_out_draws: N leaves out those images of N draws: `label_draw` and the numbers after it. Use it with
            `label_draws: true` of a comparison, whose draws are its seeds.
        label_draw: number of the draw of labeled images, and of the validation images among them. Each number
            takes other images. Results over several draws hold for more than one choice of labels.
        damage_budget: the share of training images that may be damaged before the run stops.
            Intact images replace them. 0 stops at the first damaged image.
    """

    options: ClassVar[Options] = {
        # Eight lanes suit a usual node of 8 ranks, and any power of two ranks. Every step then draws from 8 x 4 shards,
        # which is 320,000 samples with 10,000 per shard. webdataset's examples shuffle within 1,000 to 5,000 samples.
        "order": {"blocks": {"lanes": 8, "block_shards": 4}},
        "source": {"auto": ("memory_limit_gib",), "memory": ("memory_limit_gib",)},
    }

    path: PathText
    cache_dir: PathText | None = None
    cache_gib: float | None = Field(default=None, gt=0)
    split: str = "train"
    source: Literal["auto", "memory", "tar"] = "auto"
    order: Literal["global", "blocks"] = "global"
    lanes: int | None = Field(default=None, gt=0, le=65536)
    block_shards: int | None = Field(default=None, gt=0, le=65536)
    workers: int | Literal["auto"] = "auto"
    memory_limit_gib: float = Field(default=4.0, gt=0)
    repeats: int = Field(default=1, gt=0, le=64)
    normalize: Literal["dataset", "imagenet", "half"] | list[list[float]] = "dataset"
    leave_out_per_class: int | None = Field(default=None, gt=0)
    leave_out_draws: int = Field(default=1, gt=0, le=1000)
    label_draw: int = Field(default=0, ge=0)
    damage_budget: float = Field(default=0.001, ge=0, lt=1)
    augment: AugmentSection = AugmentSection()

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        if self.leave_out_draws > 1 and self.leave_out_per_class is None:
            raise ValueError("leave_out_draws has no effect without leave_out_per_class")
        if self.cache_gib is not None and not is_url(self.path):
            raise ValueError("cache_gib has no effect unless path is a URL")
        if isinstance(self.workers, int) and not 0 <= self.workers <= 512:
            raise ValueError(f"workers={self.workers}: must be 0 to 512, or auto")
        return self


def fitting_lanes(lanes: int, batch: int, world_size: int = 1) -> int:
    """Returns the number of lanes nearest to `lanes` that divides the batch and fits the ranks (`lanes_fit`)."""
    numbers = (lanes + way for away in range(lanes) for way in (-away, away))
    # The search ends at 1 at the latest, which always fits.
    return next(number for number in numbers if batch % number == 0 and lanes_fit(number, world_size))


def lanes_fit(lanes: int, world_size: int) -> bool:
    """Returns whether each rank computes whole lanes, or a whole number of ranks shares each lane."""
    return lanes % world_size == 0 or world_size % lanes == 0
