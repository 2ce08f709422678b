"""What the numbers of an image mean: bands, value type, scale and missing values.

Shapes: B images, C bands, H W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

# torch is imported only where it computes: the processes of `prepare` start several times as fast without it.
if TYPE_CHECKING:
    import torch
    from torch import Tensor

Dtype = Literal["uint8", "uint16", "int16", "float16", "float32"]
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True)
class Bands:
    """Bands of a data set, as dataset.json describes them; `RGB8` for photographs, which it does not describe.

    The loader yields raw values of `dtype`. `unit` maps each band's low..high to 0..1. Mean and std of dataset.json,
    PSNR and pictures are in these units, so 8-bit images (low 0, high 255) need no case of their own.

    Attributes:
        names: one for each band.
        dtype: type of the raw values, one of DTYPES.
        low: raw value of each band that becomes 0.
        high: raw value of each band that becomes 1.
        nodata: raw value that marks a missing pixel of a band; NaN marks one in floating-point images without it.
    """

    names: tuple[str, ...]
    dtype: str
    low: tuple[float, ...]
    high: tuple[float, ...]
    nodata: float | None = None

    @property
    def photographs(self) -> bool:
        """True for `RGB8`: gray and RGB are read as whichever the model takes."""
        return not self.names

    @property
    def eight_bit(self) -> bool:
        """True for uint8 images of the full range without missing values: the path of RGB and gray images."""
        full = set(self.low) <= {0.0} and set(self.high) <= {255.0}
        return self.dtype == "uint8" and full and self.nodata is None

    def unit(self, images: Tensor) -> Tensor:
        """Maps raw values (B, C, H, W) to float32 with low..high at 0..1; values beyond are not clipped."""
        import torch

        # In place from here on: on a CPU, memory for each intermediate result costs more than the arithmetic.
        values = images.to(torch.float32, copy=True)
        if self.eight_bit:
            return values.div_(255)
        low, high = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.low, self.high))
        return values.sub_(low).div_(high - low)

    def valid(self, images: Tensor) -> Tensor | None:
        """Returns a bool tensor (B, C, H, W), false where a band has no value; None where none can be missing."""
        if self.nodata is None and not self.dtype.startswith("float"):
            return None
        values = images.float()
        valid = ~values.isnan()
        return valid if self.nodata is None else valid & (values != self.nodata)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of raw values in tensors."""
        import torch

        return getattr(torch, self.dtype)

    def to_entry(self) -> dict[str, Any]:
        """Returns the entry "bands" of a weights file; empty for photographs."""
        if self.photographs:
            return {}
        values = asdict(self).items()
        return {"bands": {name: list(v) if isinstance(v, tuple) else v for name, v in values}}

    @classmethod
    def of_entry(cls, values: Mapping[str, Any]) -> Bands:
        """Reads the entry "bands" of a weights file; photographs have none. Raises ValueError or TypeError."""
        if (entry := values.get("bands")) is None:
            return RGB8
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()
        }
        bands = cls(**known)
        count = len(bands.names)
        numbers = [*bands.low, *bands.high, *([] if bands.nodata is None else [bands.nodata])]
        if not count == len(bands.low) == len(bands.high) > 0 or bands.dtype not in DTYPES:
            raise ValueError("bands need a known dtype, and low and high for each name")
        if not all(isinstance(value, int | float) for value in numbers):
            raise ValueError("low, high and nodata of bands are numbers")
        if not all(low < high for low, high in zip(bands.low, bands.high, strict=True)):
            raise ValueError("low of bands is below high")
        return bands


# 8-bit gray or RGB, the two kinds of photographs.
RGB8 = Bands((), "uint8", (), ())
