"""The section `optim`: the optimizer and the learning-rate schedule."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mae_vit.config.section import Section, check_options_match, exactly_one

# The options of each optimizer and their defaults. AdamW: MAE Sec. A.1. Adam and the momentum of
# SGD: ViT Sec. 4.1. LARS: MAE's linear probe (Sec. A.1).
OPTIMIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": [0.9, 0.95]},
    "adam": {"betas": [0.9, 0.999]},
    "sgd": {"momentum": 0.9},
    "lars": {"momentum": 0.9},
}
# From the same sections, except for Adam. ViT's decay of 0.1 is decoupled in its authors' code,
# which is `adamw` with betas 0.9 / 0.999 here. As an L2 term it would have another effect.
_WEIGHT_DECAY = {"adamw": 0.05, "adam": 0.0, "sgd": 0.0, "lars": 0.0}


class OptimSection(Section):
    """The optimizer and its learning rate: a linear warm-up, then half a cosine (MAE Sec. A.1).

    Attributes:
        name: optimizer.
        blr: learning rate per 256 samples of effective batch (MAE Sec. A.1); give either `blr` or `lr`.
        lr: peak learning rate.
        min_lr: learning rate at the end.
        betas: for `adamw` and `adam`.
        momentum: for `sgd` and `lars`.
        weight_decay: weight decay; decoupled for `adamw`.
        clip_grad: largest norm of the gradient; larger ones are clipped.
    """

    name: Literal["adamw", "adam", "sgd", "lars"] = "adamw"
    blr: float | None = Field(default=None, gt=0)
    lr: float | None = Field(default=None, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    betas: list[float] | None = Field(default=None, min_length=2, max_length=2)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    clip_grad: float | None = Field(default=None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        """Fills in the defaults of the chosen optimizer. Options of the others stay unset."""
        if not isinstance(raw, dict):
            return raw
        name = str(raw.get("name", "adamw"))
        defaults = {
            **OPTIMIZER_OPTIONS.get(name, {}),
            **({"weight_decay": _WEIGHT_DECAY[name]} if name in _WEIGHT_DECAY else {}),
        }
        return {**raw, **{key: value for key, value in defaults.items() if raw.get(key) is None}}

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        exactly_one(self, ("blr", "lr"), required=True)
        check_options_match(self, {"name": OPTIMIZER_OPTIONS})
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each needs 0 <= beta < 1")
        return self

    @property
    def own_options(self) -> dict[str, Any]:
        """The options of the chosen optimizer and their values."""
        return {option: getattr(self, option) for option in OPTIMIZER_OPTIONS[self.name]}
