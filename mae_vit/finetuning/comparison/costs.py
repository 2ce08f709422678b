"""The cost of the runs of a comparison."""

from __future__ import annotations

from typing import Any

from mae_vit.models.encoder_cost import Cost


def cost_of_run(summary: dict[str, Any]) -> Cost:
    """Reads the cost of a run by itself from its `summary.json`."""
    flops, steps = summary.get("flops_per_step"), summary.get("steps")
    done = None if flops is None or steps is None else flops * steps
    return Cost(summary.get("samples"), done)
