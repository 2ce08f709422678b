"""Options of the pretraining objectives, and the dictionary of them below; checked without importing torch.

Config, command line and contract tests iterate over the dictionary. An objective has its network in a file of its own.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import Field, model_validator
from typing_extensions import Unpack

from mae_vit.config.encoders import ENCODERS, EncoderSection
from mae_vit.config.section import OneOf, Section
from mae_vit.models.sizes import Pool, count_units, num_masked_patches

if TYPE_CHECKING:
    from mae_vit.models.encoders.base import Encoder
    from mae_vit.models.geometry import Geometry
    from mae_vit.objectives.objective import Objective, Pixels


class Grouping(NamedTuple):
    """The rows of the global order that a loss needs together: 2j and 2j + 1, or 2jG to 2(j + 1)G - 1.

    Attributes:
        unit: number of consecutive rows. Each micro-batch has whole units, so the split of a batch does
            not change the loss.
        views: number of rows that are views of one image (`data.repeats`).
        why: beginning of an error message; explains the unit.
    """

    unit: int
    views: int
    why: str


# Rows 2j and 2j + 1 of the global order, which are different images.
PAIRS = Grouping(unit=2, views=1, why="mixup and cutmix pair neighbors")


_NEEDED = {
    "skips_patches": "encodes only the visible patches",
    "replaces_patches": "replaces embeddings of patches",
}


class ObjectiveSection(Section):
    """The `objective` section of a config: an objective's options, and a method that builds it.

    Attributes:
        name: the objective's name, a key of `OBJECTIVES`.
        built_by: its module and class, "package.module:Class", imported when it is built.
        uses_labels: training and held-out evaluation use labels.
        needs: what it asks of an encoder, an attribute of `EncoderSection`; None if it takes every one.
    """

    name: str
    built_by: ClassVar[str]
    uses_labels: ClassVar[bool] = False
    needs: ClassVar[Literal["skips_patches", "replaces_patches"] | None] = None

    def check_encoder(self, model: EncoderSection) -> None:
        """Raises ValueError if the encoder lacks what the objective needs; the message names alternatives."""
        if self.needs is not None and not getattr(model, self.needs):
            able = [family for family, section in ENCODERS.items() if getattr(section, self.needs)]
            raise ValueError(
                f'objective.name="{self.name}" {_NEEDED[self.needs]}, which model.name="{model.name}" cannot; use '
                f"model.family={' or '.join(able)}, or objective.name=simmim, contrastive or supervised"
            )

    @property
    def grouping(self) -> Grouping | None:
        """The rows that the loss needs together; None if each image has its own loss."""
        return None

    def check(self, geometry: Geometry, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not suit model or data."""

    def build(self, encoder: Encoder, *, num_classes: int = 0, **pixels: Unpack[Pixels]) -> Objective:
        """Builds the objective around an encoder, which it trains with its own modules."""
        classes = {"num_classes": num_classes} if self.uses_labels else {}
        objective: Objective = resolve_name(self.built_by)(encoder, self, **pixels, **classes)
        return objective


def _count_masked(geometry: Geometry, mask_ratio: float, mask_unit: int) -> int:
    """Returns the number of masked patches; raises ValueError, which names the key, if it is all."""
    units = count_units(geometry.grid_size, mask_unit)
    num_masked = num_masked_patches(units, mask_ratio)
    if units == 1:
        raise ValueError(f"mask_unit={mask_unit} covers the whole image; lower it or model.patch_size")
    if num_masked == units:
        what = "patches" if mask_unit == 1 else "mask units"
        # Rounded down, as 1 - 1 / units may mask all.
        most = next(m / 1000 for m in range(999, 0, -1) if num_masked_patches(units, m / 1000) < units)
        raise ValueError(
            f"mask_ratio={mask_ratio} leaves none of {units} {what} visible; give at most {most:g}"
        )
    return num_masked * mask_unit**2


def num_decoded_patches(num_masked: int, decode_ratio: float, mask_unit: int) -> int:
    """Returns the number of masked patches of an image that training predicts: those of whole mask units."""
    return round(decode_ratio * num_masked / mask_unit**2) * mask_unit**2


class MAEConfig(ObjectiveSection):
    """Options of the `mae` objective. The defaults are those of MAE Sec. 4.1.

    `decode_ratio` follows the decoder masking of VideoMAE V2 (arXiv 2303.16727) and the partial reconstruction of
    CrossMAE (arXiv 2401.14391), but with MAE's self-attention and a random choice of mask units.

    Attributes:
        mask_ratio: share of patches that are masked.
        mask_unit: side in patches of the squares that are masked as a whole (Pixio, arXiv 2512.15715, has 4); 1 masks
            single patches, as MAE does.
        decoder_embed_dim: width of the decoder.
        decoder_depth: blocks of the decoder.
        decoder_num_heads: attention heads of the decoder.
        norm_pix_loss: predict pixels normalized by each patch's mean and standard deviation.
        decode_ratio: share of the masked patches that training predicts; the decoder does not see the others. Held-out
            images and pictures are decoded whole.
    """

    built_by: ClassVar[str] = "mae_vit.objectives.mae:MAE"
    needs = "skips_patches"
    name: Literal["mae"]
    mask_ratio: float = Field(default=0.75, gt=0, lt=1)
    mask_unit: int = Field(default=1, gt=0)
    decoder_embed_dim: int = Field(default=512, gt=0, le=65536)
    decoder_depth: int = Field(default=8, gt=0)
    decoder_num_heads: int = Field(default=16, gt=0)
    norm_pix_loss: bool = True
    decode_ratio: float = Field(default=1.0, gt=0, le=1)

    def check(self, geometry: Geometry, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not fit the model."""
        num_masked = _count_masked(geometry, self.mask_ratio, self.mask_unit)
        if not num_decoded_patches(num_masked, self.decode_ratio, self.mask_unit):
            raise ValueError(
                f"decode_ratio={self.decode_ratio} predicts none of {num_masked} masked patches; "
                f"give {self.mask_unit**2 / num_masked:.3g} to 1"
            )
        if self.norm_pix_loss and geometry.patch_size**2 * geometry.in_chans == 1:
            raise ValueError("norm_pix_loss=true needs patches of more than one value")
        if self.decoder_embed_dim % self.decoder_num_heads:
            raise ValueError(
                f"decoder_embed_dim={self.decoder_embed_dim} is not divisible by "
                f"decoder_num_heads={self.decoder_num_heads}"
            )
        if self.decoder_embed_dim % 4:
            raise ValueError(
                f"decoder_embed_dim={self.decoder_embed_dim} is not divisible by 4 (sin-cos positions)"
            )


class ContrastSection(ObjectiveSection):
    """What both contrasts have. They need two views of each image (`data.repeats=2`).

    Attributes:
        temperature: temperature of the contrastive loss.
        group_size: consecutive images of the global order that are contrasted with each other, and with no others. So
            the loss does not depend on how a batch is split.
        projection_dim: width of the contrastive projection.
    """

    temperature: float = Field(default=0.2, gt=0)
    group_size: int = Field(default=64, gt=1)
    projection_dim: int = Field(default=128, gt=0)

    @property
    def grouping(self) -> Grouping:
        """Two views of each of `group_size` images."""
        why = (
            f"objective.group_size={self.group_size} contrasts two views of each of {self.group_size} images"
        )
        return Grouping(unit=2 * self.group_size, views=2, why=why)


class ContrastiveConfig(ContrastSection):
    """Options of the `contrastive` objective. It needs two views of each image (`data.repeats=2`)."""

    built_by: ClassVar[str] = "mae_vit.objectives.contrastive:Contrastive"
    name: Literal["contrastive"]


class ContrastiveMAEConfig(ContrastSection, MAEConfig):
    """Options of the `contrastive_mae` objective: those of `mae` and of `contrastive`.

    The loss is L_rec + contrast_weight * L_con. It needs two views of each image (`data.repeats=2`).

    Attributes:
        contrast_weight: weight of the contrastive loss.
    """

    built_by: ClassVar[str] = "mae_vit.objectives.contrastive_mae:ContrastiveMAE"
    name: Literal["contrastive_mae"]  # type: ignore[assignment]
    # CAN Sec. 4 masks half: the contrast must recognize an image from its visible patches.
    mask_ratio: float = Field(default=0.5, gt=0, lt=1)
    decoder_embed_dim: int = Field(default=96, gt=0)
    decoder_depth: int = Field(default=2, gt=0)
    decoder_num_heads: int = Field(default=4, gt=0)
    decode_ratio: float = Field(default=0.5, gt=0, le=1)
    contrast_weight: float = Field(default=0.1, ge=0)


class MaskedPatchConfig(ObjectiveSection):
    """Options of the `masked_patch` objective. The defaults are those of ViT App. B.1.2.

    Attributes:
        corrupt_ratio: share of patches that are corrupted and predicted.
    """

    built_by: ClassVar[str] = "mae_vit.objectives.masked_patch:MaskedPatch"
    needs = "replaces_patches"
    name: Literal["masked_patch"]
    corrupt_ratio: float = Field(default=0.5, gt=0, lt=1)

    def check(self, geometry: Geometry, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not fit the model."""
        num_patches = geometry.grid_size[0] * geometry.grid_size[1]
        if not 0 < round(self.corrupt_ratio * num_patches) < num_patches:
            raise ValueError(
                f"corrupt_ratio={self.corrupt_ratio} corrupts none or all of {num_patches} patches"
            )


class LossWeights(Section):
    """The factor of each loss in the sum.

    Attributes:
        mae: weight of the loss of `mae`.
        masked_patch: weight of the loss of `masked_patch`.
    """

    mae: float = Field(default=1.0, gt=0)
    masked_patch: float = Field(default=1.0, gt=0)


class JointConfig(ObjectiveSection):
    """Options of the `joint` objective: those of its two parts, and the weights of their losses."""

    built_by: ClassVar[str] = "mae_vit.objectives.joint:Joint"
    needs = "skips_patches"  # every such encoder also replaces patches
    name: Literal["joint"]
    weights: LossWeights = LossWeights()
    mae: MAEConfig = MAEConfig(name="mae")
    masked_patch: MaskedPatchConfig = MaskedPatchConfig(name="masked_patch")

    @model_validator(mode="before")
    @classmethod
    def _name_parts(cls, raw: Any) -> Any:
        """Fills in each part's `name` from its key."""
        for key in ("mae", "masked_patch"):
            if isinstance(raw, dict) and isinstance(raw.get(key), dict):
                raw = {**raw, key: {"name": key, **raw[key]}}
        return raw

    def check(self, geometry: Geometry, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not fit the model."""
        for key, part in (("mae", self.mae), ("masked_patch", self.masked_patch)):
            try:
                part.check(geometry, num_classes)
            except ValueError as error:
                raise ValueError(f"{key}.{error}") from None


class SimMIMConfig(ObjectiveSection):
    """Options of the `simmim` objective. The defaults are those of SimMIM Sec. 4.1 for patches of 16 px.

    The authors' code masks ceil(N r) of N units. Ours uses MAE's rule, N - int(N (1 - r)). If N r is an integer,
    rounding errors may mask one unit more: at r = 0.8, 9 of 10 instead of 8.

    Attributes:
        mask_ratio: share of patches that are masked.
        mask_unit: side in patches of the squares that are masked as a whole; the paper's 32 px are 2 patches.
    """

    built_by: ClassVar[str] = "mae_vit.objectives.simmim:SimMIM"
    name: Literal["simmim"]
    mask_ratio: float = Field(default=0.6, gt=0, lt=1)
    mask_unit: int = Field(default=2, gt=0)

    def check(self, geometry: Geometry, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not fit the model."""
        _count_masked(geometry, self.mask_ratio, self.mask_unit)


class SupervisedConfig(ObjectiveSection):
    """Options of the `supervised` objective. The defaults give the pretraining head of ViT Sec. 3.1.

    Attributes:
        head: hidden layer with tanh, or one linear layer.
        pool: feature: [CLS] or the mean of the patches.
        label_smoothing: label smoothing.
        mixup: alpha of mixup; 0 for none.
        cutmix: alpha of cutmix; 0 for none.
    """

    uses_labels: ClassVar[bool] = True
    built_by: ClassVar[str] = "mae_vit.objectives.supervised:Supervised"
    name: Literal["supervised"]
    head: Literal["mlp", "linear"] = "mlp"
    pool: Pool = "cls"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    mixup: float = Field(default=0.0, ge=0)
    cutmix: float = Field(default=0.0, ge=0)

    def check_encoder(self, model: EncoderSection) -> None:
        """Raises ValueError if `pool` is "cls" and the encoder has no class token."""
        if self.pool == "cls" and not model.has_class_token:
            raise ValueError(f'model.name="{model.name}" has no class token; give objective.pool=mean')

    @property
    def grouping(self) -> Grouping | None:
        """Mixup and cutmix need pairs of different images."""
        return PAIRS if self.mixup or self.cutmix else None

    def check(self, geometry: Geometry, num_classes: int) -> None:
        """Raises ValueError, which names the key, for options that do not suit the data."""
        if num_classes < 2:
            raise ValueError(
                f'name="supervised" needs labels of two or more classes, but the data have {num_classes}'
            )


OBJECTIVES: dict[str, type[ObjectiveSection]] = {
    "mae": MAEConfig,
    "contrastive": ContrastiveConfig,
    "contrastive_mae": ContrastiveMAEConfig,
    "masked_patch": MaskedPatchConfig,
    "joint": JointConfig,
    "simmim": SimMIMConfig,
    "supervised": SupervisedConfig,
}

ObjectiveConfig = Annotated[ObjectiveSection, OneOf(OBJECTIVES, "name")]


def register_objective(section: type[ObjectiveSection]) -> None:
    """Adds an objective under the value of its section's `name`. A plug-in calls it on import.

    Raises ValueError if another objective has that name.
    """
    (name,) = get_args(section.model_fields["name"].annotation)
    if OBJECTIVES.setdefault(name, section) is not section:
        raise ValueError(f'there is already an objective "{name}"; choose another name')
