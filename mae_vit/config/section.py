"""The base class of all config sections, and what several sections use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core.core_schema import CoreSchema, tagged_union_schema

# A key -> each of its values -> the options of this value; a mapping gives defaults that depend on the value.
Options = Mapping[str, Mapping[str, Any]]


class Section(BaseModel):
    """A part of the config. It is frozen and strictly typed, and refuses unknown keys.

    Attributes:
        options: options that belong to some values of a key. Those of the chosen value get their defaults; others must
            not be set. An override of the key drops the file's options of other values.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    options: ClassVar[Options] = {}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_options(cls, raw: Any) -> Any:
        if isinstance(raw, dict):
            for key, kinds in cls.options.items():
                chosen = kinds.get(str(raw.get(key, cls.model_fields[key].default)), ())
                optional = {option for options in kinds.values() for option in options}
                given = {
                    name: value for name, value in raw.items() if value is not None or name not in optional
                }
                raw = {**(chosen if isinstance(chosen, Mapping) else {}), **given}
        return raw

    @model_validator(mode="after")
    def _check_options(self) -> Section:
        """Refuses an option that belongs only to other values of its key."""
        for key, kinds in self.options.items():
            choice = getattr(self, key)
            for option in dict.fromkeys(option for options in kinds.values() for option in options):
                unset = getattr(self, option) == type(self).model_fields[option].default
                if option not in kinds.get(choice, ()) and not unset:
                    owners = " or ".join(f'"{name}"' for name, options in kinds.items() if option in options)
                    given = f"without {key}" if choice is None else f'with {key}="{choice}"'
                    raise ValueError(f"{option} has no effect {given}; it belongs to {key}={owners}")
        return self

    def options_of(self, key: str) -> dict[str, Any]:
        """Returns the options that belong to a key's value, as they are set."""
        return {name: getattr(self, name) for name in self.options[key].get(getattr(self, key), ())}

    @classmethod
    def key_of_runs(cls, path: str) -> str:
        """Returns the key by which a config of several runs sets their key `path`; empty if it has none."""
        return ""


@dataclass(frozen=True)
class OneOf:
    """Marks a field that takes one section of a dictionary, to which plug-ins may add before a config is read.

    Attributes:
        sections: a section's class for each choice.
        key: the key of a section that names its choice.
        choose: finds the choice from a section, as values or as a model; None reads `key`.
    """

    sections: Mapping[str, type[Section]]
    key: str
    choose: Callable[[Any], str] | None = None

    def choice(self, raw: Any) -> str | None:
        """Returns the choice that a section makes, valid or not; None if it makes none."""
        if self.choose is not None:
            return self.choose(raw)
        choice = raw.get(self.key) if isinstance(raw, dict) else getattr(raw, self.key, None)
        return None if choice is None else str(choice)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds = {name: handler.generate_schema(section) for name, section in self.sections.items()}
        return tagged_union_schema(kinds, self.choice)


def exactly_one(section: BaseModel, names: Sequence[str], *, required: bool) -> None:
    """Raises ValueError unless exactly one of `names` is given, or at most one if `required` is False."""
    given = [name for name in names if getattr(section, name) is not None]
    if len(given) > 1:
        dropped = ", or ".join(f"{name}={getattr(section, name)}" for name in reversed(given))
        raise ValueError(f"give one of {', '.join(names)}, not {' and '.join(given)}; drop {dropped}")
    if required and not given:
        raise ValueError(f"give one of {', '.join(names)}")
