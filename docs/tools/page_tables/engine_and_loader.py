"""Tables of engine.json, loader.json and end_to_end.json."""

from __future__ import annotations

from typing import Any

from page_tables.files import decimal, results, table

STREAM = "peer: webdataset's stream"
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
        fidelity, with_a_worker = each["fidelity"], each.get("over_fastest_with_a_worker")
        rows.append(
            [
                name,
                _over(each["over_fastest"], named=True),
                _over(with_a_worker, named=True) if with_a_worker else "",
                _over(each["over_plain"]) if "over_plain" in each else "",
                _over(each["over_official"]) if "over_official" in each else "",
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
        "ours, images/s",
        "difference from PIL",
    ]
    return table(head, rows)


def _over(ratio: dict[str, Any], *, named: bool = False) -> str:
    """A ratio, its goal if it has one, and the peer if it is to be named."""
    text = _ratio(ratio)
    if "at_least" in ratio:
        text += f"; goal {ratio['at_least']:g}: {ratio['verdict']}"
    return f"{text} ({_peer(ratio['peer'])})" if named else text


def _peer(name: str) -> str:
    """A peer's name for readers: "files, OpenCV, uint8, 0 workers" becomes "OpenCV, no worker"."""
    words = [word for word in name.split(", ") if word not in ("files", "uint8")]
    return ", ".join(words).replace("0 workers", "no worker").replace("1 workers", "one worker")


def _ratio(ratio: dict[str, Any]) -> str:
    low, high = ratio["range"]
    return f"{decimal(ratio['median'], 2)} ({low:.2f}-{high:.2f})"


def range_over(kind: str) -> tuple[str, str]:
    """The smallest and the largest median ratio to a kind of peer, over the rows that have it."""
    ratios = [each[kind]["median"] for each in results("loader.json").values() if kind in each]
    return decimal(min(ratios), 2), decimal(max(ratios), 2)


def rrc_in_memory() -> str:
    """Our rate over the fastest peer's: small images in memory, with a random resized crop."""
    return _ratio(results("loader.json")["small_rrc"]["over_fastest"]).split(" ")[0]


def one_box_a_batch() -> tuple[str, ...]:
    """Rates of whole batches that share a box, over ours, of both rows in memory."""
    rates = [results("loader.json")[row]["images_per_s"] for row in ("small_pad", "small_rrc")]
    return tuple(f"{each['memory, torchvision v2, one box a batch'] / each['ours']:.1f}" for each in rates)


def share_of_reading(row: str) -> str:
    """Our share of os.pread's rate, in percent."""
    rates = results("loader.json")[row]["images_per_s"]
    return f"{100 * rates['ours'] / rates['limit']:.0f}"


def reading_over_stream() -> tuple[str]:
    """Rate of os.pread over the stream's, for photographs."""
    rates = results("loader.json")["raw_large"]["images_per_s"]
    return (f"{rates['limit'] / rates[STREAM]:.1f}",)


def from_shards() -> tuple[str, str, str, str]:
    """A step from shards over one on ready-made batches, its range, and the share of waits in percent."""
    measured = results("end_to_end.json")
    ratio, waited = measured["time_over_ready_made"], measured["data_wait_frac"]["median"]
    low, high = ratio["range"]
    return f"{ratio['median']:.2f}", f"{low:.3g}", f"{high:.3g}", f"{100 * waited:.1f}"
