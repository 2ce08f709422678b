"""The section `optim`: the optimizer and the learning rate."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from mae_vit.config.section import Options, Section, exactly_one


class OptimSection(Section):
    """The optimizer and its learning rate: a linear warm-up, then half a cosine (MAE Sec. A.1).

    Attributes:
        name: optimizer.
        blr: learning rate per 256 samples of effective batch (MAE Sec. A.1); give either `blr` or `lr`.
        lr: peak learning rate.
        min_lr: learning rate at the end.
        betas: decays of the moments of `adamw` and `adam`.
        momentum: momentum of `sgd` and `lars`.
        weight_decay: weight decay; decoupled for `adamw`.
        clip_grad: largest norm of the gradient; larger ones are clipped.
    """

    # AdamW: MAE Sec. A.1. Adam and the momentum of SGD: ViT Sec. 4.1. LARS: MAE's linear probe (Sec. A.1). ViT's decay
    # of 0.1 for Adam is decoupled in its authors' code, which is `adamw` with betas 0.9 / 0.999 here. As an L2 term
    # it would have another effect.
    options: ClassVar[Options] = {
        "name": {
            "adamw": {"betas": [0.9, 0.95], "weight_decay": 0.05},
            "adam": {"betas": [0.9, 0.999], "weight_decay": 0.0},
            "sgd": {"momentum": 0.9, "weight_decay": 0.0},
            "lars": {"momentum": 0.9, "weight_decay": 0.0},
        }
    }

    name: Literal["adamw", "adam", "sgd", "lars"] = "adamw"
    blr: float | None = Field(default=None, gt=0)
    lr: float | None = Field(default=None, gt=0)
    min_lr: float = Field(default=0.0, ge=0)
    betas: list[float] | None = Field(default=None, min_length=2, max_length=2)
    momentum: float | None = Field(default=None, ge=0, lt=1)
    weight_decay: float = Field(default=0.05, ge=0)
    clip_grad: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> OptimSection:
        exactly_one(self, ("blr", "lr"), required=True)
        if self.betas is not None and not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: each needs 0 <= beta < 1")
        return self
