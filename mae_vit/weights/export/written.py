"""What a writer of a format returns, and the comparison of its outputs with ours."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mae_vit.core.errors import InputError

# float32 of two implementations of the same network differ by some 1e-6.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Written:
    """The files of a format as the other library loaded them.

    Attributes:
        outputs: by name, what ours and the other library compute of `ExportSource.random_images`.
        code: Python that uses the files, run in their folder. It defines `model`, and the first of `outputs` of
            `images`.
        notes: what a user should know, a sentence each.
    """

    outputs: dict[str, tuple[Tensor, Tensor]]
    code: str
    notes: tuple[str, ...] = ()

    @property
    def load_line(self) -> str:
        """The line of `code` that loads the model."""
        return next(line for line in self.code.splitlines() if line.startswith("model = "))

    def largest_difference(self, library: str) -> float:
        """Compares the outputs.

        Raises:
            InputError: naming those that have another shape, differ by more than `TOLERANCE`, or are not finite.
        """
        differences = []
        for name, (ours, theirs) in self.outputs.items():
            if ours.shape != theirs.shape:
                problem = f"are {list(theirs.shape)}, ours {list(ours.shape)}"
                raise InputError(f"{library}'s {name} {problem}: nothing was written")
            differences.append((ours - theirs).abs().max().item())
            # Not a number is no agreement.
            if not differences[-1] <= TOLERANCE:
                problem = f"differ by {differences[-1]:.3g} from ours (at most {TOLERANCE:g})"
                raise InputError(f"{library}'s {name} {problem}: nothing was written")
        return max(differences)
