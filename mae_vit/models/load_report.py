"""Reports how each tensor of pretrained weights was loaded."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LoadReport:
    """How each tensor of pretrained weights was loaded.

    Attributes:
        loaded: names of the loaded tensors.
        interpolated: position tables that were resampled to another grid -> both grids.
        adapted: patch projections that were changed to another number of channels -> description.
        kept: tensors that the model keeps on purpose -> reason.
        skipped: names in the file that the model does not use.
        random: names of the model that the file lacks; they keep their random values.
        by_design: names of model or file that are not loaded by design -> reason.
        share: fraction of the encoder's parameters that were loaded, adapted, kept or left out by design, 0 to 1.
        remarks: remarks of `Weights`, and assumptions about them.
    """

    loaded: list[str] = field(default_factory=list)
    interpolated: dict[str, str] = field(default_factory=dict)
    adapted: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    by_design: dict[str, str] = field(default_factory=dict)
    share: float = 0.0
    remarks: dict[str, str] = field(default_factory=dict)

    def describe(self, source: str) -> str:
        """Returns the report as lines of text."""
        lines = [f"weights  {source}: {self.share:.1%} of the encoder's parameters"]
        lines += [f"  {title:<13} {text}" for title, text in self.remarks.items()]
        lines.append(f"  loaded        {len(self.loaded)} tensors: {shorten(self.loaded)}")
        for title, notes in (
            ("interpolated", self.interpolated),
            ("adapted", self.adapted),
            ("kept", self.kept),
            ("not loaded", self.by_design),
        ):
            lines += [f"  {title:<13} {name} ({note})" for name, note in notes.items()]
        for title, names in (("skipped", self.skipped), ("left random", self.random)):
            if names:
                lines.append(f"  {title:<13} {len(names)} tensors: {shorten(names)}")
        return "\n".join(lines)


def shorten(names: list[str]) -> str:
    """Lists names by their first part, with counts: blocks (72), patch_embed (2)."""
    counts: dict[str, int] = {}
    for name in names:
        first = name.split(".")[0]
        counts[first] = counts.get(first, 0) + 1
    return ", ".join(first if count == 1 else f"{first} ({count})" for first, count in counts.items())
