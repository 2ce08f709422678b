"""Encoders: one line in the dictionary below for each family.

To add one, give its options a section in `mae_vit.models.encoders.config` and its facts a geometry in
`mae_vit.models.geometry`, and write the encoder (`mae_vit.models.encoders.base.Encoder`) in a file of its own.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator, Tag

from mae_vit.models.encoders.config import EncoderSection, NetworkSection, ViTRopeSection, ViTSection
from mae_vit.models.sizes import SIZES

ENCODERS: dict[str, type[EncoderSection]] = {
    "vit": ViTSection,
    "vit_rope": ViTRopeSection,
    "network": NetworkSection,
}


def family_of(raw: Any) -> str:
    """Returns the family of a `model` section: as it says, or by its name, of which sizes are those of `vit`."""
    get = raw.get if isinstance(raw, dict) else lambda key: getattr(raw, key, None)
    name = get("name")
    return str(get("family") or ("vit" if name is None or str(name) in SIZES else "network"))


if TYPE_CHECKING:
    EncoderConfig = EncoderSection
else:
    EncoderConfig = Annotated[
        Union[tuple(Annotated[section, Tag(family)] for family, section in ENCODERS.items())],  # noqa: UP007
        Discriminator(family_of),
    ]

__all__ = ["ENCODERS", "EncoderConfig", "EncoderSection", "family_of"]
