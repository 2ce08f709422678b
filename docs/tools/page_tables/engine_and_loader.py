"""Tables of engine.json, loader.json and end_to_end.json."""

from __future__ import annotations

from statistics import median
from typing import Any

from page_tables.files import results, table

# Of the rate of the same libraries without a loader.
PLAIN_GOAL = 0.95
# The pages' names of loader.json's rows.
LOADER_ROWS = {
    "full": "full-size photographs, random resized crop to 224 px",
    "short256": "shards of `--resize 256 --quality 90`",
    "repeats4": "full-size, `data.repeats=4`, views per second",
    "small_pad": "32 px in memory, shifted crop and flip",
    "small_rrc": "32 px in memory, random resized crop and flip",
    "raw_small": "bytes of small files",
    "raw_large": "bytes of photographs",
}


def engine() -> str:
    """What the loop and each engine add to a bare PyTorch loop."""
    rows = []
    for name, each in results("engine.json").items():
        if name == "bare":
            continue
        over, verdict = each["ms_over_bare"], each["verdict"]
        low, high = over["interval_95"]
        rows.append(
            [name, f"{over['mean']:.1f} ({low:.1f} to {high:.1f})", f"{each['at_most']:g} ({verdict})"]
        )
    return table(["engine", "ms beyond the bare loop (95 % interval)", "our limit"], rows)


def loader() -> str:
    """Our loader against the fastest peers, the same libraries without a loader, and the official pipeline."""
    rows = []
    for key, name in LOADER_ROWS.items():
        each = results("loader.json")[key]
        fidelity, official, plain = each["fidelity"], each.get("over_official"), each.get("over_plain")
        rows.append(
            [
                name,
                f"{_ratio(each['speedup'])}: {_peer(each['fastest_peer'])}",
                _with_a_worker(each["us_per_image"]) or "",
                _ratio(plain) if plain else "",
                _ratio(official) if official else "",
                "; ".join(_goals(each)),
                f"{each['images_per_s']['ours']:,.0f}",
                "equal bytes" if "equal_bytes" in fidelity else f"{fidelity['mean']:.2g}",
            ]
        )
    head = [
        "",
        "times the fastest peer's rate",
        "fastest of those with a worker",
        "simplejpeg without a loader",
        "official pipeline",
        "our goals",
        "ours, images/s",
        "difference from PIL",
    ]
    return table(head, rows)


def _peer(name: str) -> str:
    """A peer's name for readers: "files, OpenCV, uint8, 0 workers" becomes "OpenCV, no worker"."""
    words = [word for word in name.split(", ") if word not in ("files", "uint8")]
    return ", ".join(words).replace("0 workers", "no worker").replace("1 workers", "one worker")


def _goals(row: dict[str, Any]) -> list[str]:
    """The goals of a row, those that are missed named so."""
    of = "official " if "over_official" in row else ""
    goals = [f"{of}{row['bar']:g}" + ("" if row["met"] else " (missed)")]
    if "over_plain" in row:
        met = row["over_plain"]["median"] >= PLAIN_GOAL
        goals.insert(0, f"simplejpeg {PLAIN_GOAL}" + ("" if met else " (missed)"))
    return goals


def _with_a_worker(times: dict[str, list[float]]) -> str | None:
    """Our rate over that of the fastest peer that has a worker, as median and range; None if no photographs."""
    if not any("simplejpeg" in name for name in times):
        return None
    peers = [name for name in times if name.endswith("1 workers")]
    best = min(peers, key=lambda name: median(times[name]))
    ratios = [theirs / ours for theirs, ours in zip(times[best], times["ours"], strict=True)]
    name = _peer(best.removeprefix("peer: ")).removesuffix(", one worker")
    return f"{_ratio({'median': median(ratios), 'range': [min(ratios), max(ratios)]})}: {name}"


def _ratio(ratio: dict[str, Any]) -> str:
    low, high = ratio["range"]
    return f"{ratio['median']:.2f} ({low:.2f}-{high:.2f})"


def bare_reads() -> tuple[str, str]:
    """Photographs' bytes: our share of os.pread's rate in percent, and os.pread's rate over the stream's."""
    rates = results("loader.json")["raw_large"]["images_per_s"]
    stream = rates["peer: webdataset's stream"]
    return f"{rates['ours'] / rates['limit']:.0%}"[:-1], f"{rates['limit'] / stream:.1f}"


def from_shards() -> tuple[str, str, str, str]:
    """A step from shards over one on ready-made batches, its range, and the share of waits in percent."""
    measured = results("end_to_end.json")
    ratio, waited = measured["time_over_ready_made"], measured["data_wait_frac"]["median"]
    low, high = ratio["range"]
    return f"{ratio['median']:.2f}", f"{low:.3g}", f"{high:.3g}", f"{100 * waited:.1f}"
