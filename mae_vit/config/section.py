"""The base class of all config sections, and checks that several sections use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

# Of images that are not described as bands.
PHOTOGRAPH_CHANNELS = 3
# Hyperspectral sensors have 200 to 500.
MAX_CHANNELS = 4096


class Section(BaseModel):
    """A part of the config. It is frozen and strictly typed, and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def key_of_runs(cls, path: str) -> str:
        """Returns where a config of several runs takes what is a key of theirs; empty if it takes it nowhere."""
        return ""


def exactly_one(section: BaseModel, names: Sequence[str], *, required: bool) -> None:
    """Checks that exactly one of `names` is given, or at most one if `required` is False.

    Raises:
        ValueError: if not.
    """
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1:
        dropped = ", or ".join(f"{name}={getattr(section, name)}" for name in reversed(given))
        raise ValueError(f"give one of {', '.join(names)}, not {' and '.join(given)}: drop {dropped}")
    if required and not given:
        raise ValueError(f"give one of {', '.join(names)}")


def check_options_match(section: BaseModel, choices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Checks that every given option belongs to the value chosen for its key.

    Args:
        section: a config section whose fields are validated.
        choices: for each key, the options of each of its values.

    Raises:
        ValueError: if an option belongs only to other values of the key.
    """
    for key, kinds in choices.items():
        choice = getattr(section, key)
        for option in dict.fromkeys(option for options in kinds.values() for option in options):
            if option not in kinds.get(choice, {}) and getattr(section, option) is not None:
                owners = " or ".join(f'"{name}"' for name, options in kinds.items() if option in options)
                raise ValueError(
                    f'{option} has no effect with {key}="{choice}"; it belongs to {key}={owners}'
                )


def height_width(img_size: int | Sequence[int]) -> tuple[int, int]:
    """Returns height and width in pixels, from one number or from [height, width].

    Raises:
        ValueError: for a list of another length.
    """
    sides = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
    if len(sides) != 2:
        raise ValueError(f"img_size={img_size}: give one number or [height, width]")
    return sides[0], sides[1]
