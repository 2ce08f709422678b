"""Names of third-party weights that are evaluated and never trained."""

from __future__ import annotations

# Prefix of their names (`mae_vit.weights.foreign`).
FROZEN_PREFIX = "frozen:"
# Their origin in tables, summaries and reports.
FOREIGN_ORIGIN = "trained by others on other data"


def is_frozen(start: str | None) -> bool:
    """Returns True for `frozen:...`: third-party weights, for evaluation only."""
    return start is not None and start.startswith(FROZEN_PREFIX)
