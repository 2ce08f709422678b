"""What `mae-vit prepare` did to the pixels of images: it is stored with the weights, and inference repeats it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Preprocessing(BaseModel):
    """What was done to images before they were stored. None and "ignore" mean nothing.

    `mae_vit.data.images.preprocess` does it, for `prepare` and for inference.

    Attributes:
        resize: short side of larger images, in pixels (bicubic, antialiased).
        quality: quality of JPEGs encoded anew.
        exif_orientation: "apply" turned images upright.
        bands: the bands taken from each image, in this order: numbers from 1, ranges of them, or names.
        window: the lowest and highest raw value, to which values were clipped.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    resize: int | None = Field(default=None, ge=1)
    quality: int | None = Field(default=None, ge=1, le=100)
    exif_orientation: Literal["apply", "ignore"] = "ignore"
    bands: tuple[str, ...] | None = None
    window: tuple[float, float] | None = None

    def to_entry(self) -> dict[str, Any]:
        """Returns the entry "preprocessing" of a file's metadata; empty if images were stored as they were."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        return {"preprocessing": values} if values else {}

    @classmethod
    def of_entry(cls, metadata: Mapping[str, Any]) -> Preprocessing:
        """Reads the entry "preprocessing" of a file's metadata; raises ValueError if it is damaged."""
        return cls.model_validate(metadata.get("preprocessing") or {})

    @property
    def of_prepared(self) -> Preprocessing:
        """What inference does to prepared images; to turn and resize them again changes nothing."""
        return self.model_copy(update={"bands": None, "window": None})

    def describe(self, *, in_bands: bool) -> str:
        """Describes in sentences what must be done to images from a camera or a sensor; empty if nothing."""
        done = []
        if self.bands:
            done.append(f"The bands {', '.join(self.bands)} of each file are used, in this order.")
        if self.window:
            done.append(f"Raw values are clipped to {self.window[0]:g} to {self.window[1]:g}.")
        if self.exif_orientation == "apply" and not in_bands:
            done.append("Images are turned upright by their EXIF orientation.")
        if self.resize:
            stored = "" if in_bands else f" and stored as JPEG of quality {self.quality}"
            done.append(
                f"Larger images are resized to a short side of {self.resize} px (bicubic, antialiased){stored}."
            )
        return " ".join(done)


UNCHANGED = Preprocessing()
