"""Tables of a step: its speed, its operators, the costs of objectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from page_tables.files import decimal, results, table

# What the profiler's largest operators are for.
WHY = {
    "mm": "gradients of linear layers (two products each)",
    "addmm": "linear layers forward",
    "copy_": "casts between float32 weights and bf16 (autocast), patches moved to rows",
    "gelu_backward": "gradient of the MLPs' activation",
    "bmm": "attention: scores and sums",
    "_softmax": "attention",
    "_softmax_backward_data": "gradient of attention",
    "gelu": "the MLPs' activation",
    "native_layer_norm_backward": "gradient of layer norms",
    "gather": "visible patches taken out, decoder tokens put in order",
    "_fused_adamw_": "AdamW, one kernel over all weights",
    "linalg_vector_norm": "the gradient's norm: clipping, guard, log",
    "sum": "gradients of biases",
    "baddbmm": "attention scores with their scale",
}


def with_range(ratio: dict[str, Any]) -> str:
    """A median with the range of its rounds."""
    low, high = ratio["range"]
    return f"{decimal(ratio['median'], 2)} ({low:.3g}-{high:.3g})"


def speedup(file: str, precision: str, library: str, kind: str = "eager") -> str:
    """How many times as fast our step is as a library's fastest."""
    return with_range(results(file)[precision]["speedup"][library][kind])


def step() -> str:
    """Our step against transformers' ViTMAE and the official MAE code."""
    small = {
        "`mae_cifar_tiny`, batch 128, neither compiled": "eager",
        "the same, peers with glibc's default memory, as in their scripts": "default_memory",
        "only ours compiled (`train.compile=true`; without the time of compiling)": "ours_compiled",
        "both compiled": "both_compiled",
    }
    libraries = {"transformers": "transformers", "official": "official code"}
    kinds = [(precision, library) for precision in ("fp32", "bf16") for library in libraries]
    rows = [[name, *(speedup("step.json", *of, kind) for of in kinds)] for name, kind in small.items()]
    base = "ViT-B at 224 px (`mae_base`), batch 4, neither compiled"
    rows.append([base, *(speedup("step_base.json", *of) for of in kinds)])
    return table(["", *(f"{precision}, {libraries[library]}" for precision, library in kinds)], rows)


def range_widths(objectives: Sequence[str]) -> tuple[str, str]:
    """The narrowest and the widest range of objectives' times, in percent of the median."""
    ratios = [results("objectives.json")[name]["time_over_mae"] for name in objectives]
    widths = [100 * (ratio["range"][1] - ratio["range"][0]) / ratio["median"] for ratio in ratios]
    return f"{min(widths):.0f}", f"{max(widths):.0f}"


def over_mae(objective: str) -> tuple[str, str]:
    """Time of an objective's step and its FLOPs, as multiples of plain MAE's."""
    each = results("objectives.json")[objective]
    return f"{each['time_over_mae']['median']:.2f}", f"{each['flops_over_mae']:.2f}"


def _range(objective: str, what: str = "time_over_mae", digits: int = 2) -> tuple[str, str]:
    low, high = results("objectives.json")[objective][what]["range"]
    return f"{low:.{digits}f}", f"{high:.{digits}f}"


def pixio_over_mae() -> tuple[str, ...]:
    """Time of a step with Pixio's options over plain MAE's, and its range."""
    return (over_mae("pixio")[0], *_range("pixio"))


def range_of_mae() -> tuple[str, str]:
    """The shortest and the longest median time of plain MAE's step in a round, in ms."""
    return _range("mae", "ms_per_step", 0)


def ranges_with_and_without_contrast() -> tuple[str, ...]:
    """Ranges of the times over plain MAE's, with the contrast and with its other options alone."""
    return (*_range("contrastive_mae"), *_range("mae mask_ratio=0.5 decode_ratio=0.5"))


def ranges_with_one() -> tuple[str, str]:
    """How many ranges of the table of steps include 1, and how many there are."""
    ranges = [
        kind["range"]
        for file in ("step.json", "step_base.json")
        for precision in ("fp32", "bf16")
        for kinds in results(file)[precision]["speedup"].values()
        for kind in kinds.values()
    ]
    return str(sum(low <= 1 <= high for low, high in ranges)), str(len(ranges))


def profile(config: str) -> str:
    """The ten largest operators of a step."""
    rows = []
    for operator in results("profile_step.json")[config]["top"]:
        name = operator["name"].removeprefix("aten::")
        if name not in WHY:
            raise ValueError(f"page_tables/steps.py: WHY has no line on the operator {name}")
        rows.append([name, f"{operator['share']:.1%}", f"{operator['ms_per_step']:.3g}", WHY[name]])
    return table(["operator", "share", "ms a step", "why it is needed"], rows)
