"""Names of weights that others trained, and that are only measured."""

from __future__ import annotations

# Of encoders that are measured as they are (`mae_vit.weights.foreign`).
FROZEN_PREFIX = "frozen:"
# What tables, summaries and reports say of them.
FOREIGN_ORIGIN = "trained by others on other data"


def is_frozen(start: str | None) -> bool:
    """Whether a start names an encoder of others that is measured and never trained."""
    return start is not None and start.startswith(FROZEN_PREFIX)
