"""Tables of engine.json, loader.json and end_to_end.json."""

from __future__ import annotations

from page_tables.files import results, table

# The pages' names of loader.json's rows.
LOADER_ROWS = {
    "full": "full-size photographs, random resized crop to 224 px",
    "short256": "shards of `--resize 256 --quality 90`; the peer on the full-size originals",
    "repeats4": "full-size, `data.repeats=4`, views per second",
    "small_pad": "32 px in memory, shifted crop and flip",
    "small_rrc": "32 px in memory, random resized crop and flip",
    "raw_small": "bytes of small files",
    "raw_large": "bytes of photographs",
}


def engine() -> str:
    """What the loop and each engine add to a bare PyTorch loop."""
    rows = [
        [name, f"{each['ms_over_bare']['median']:.1f}", f"{each['at_most']:g}" + _missed(met=each["met"])]
        for name, each in results("engine.json").items()
        if name != "bare"
    ]
    return table(["engine", "ms beyond the bare loop", "our limit"], rows)


def loader() -> str:
    """Our loader against each row's peer."""
    rows = []
    for key, name in LOADER_ROWS.items():
        each = results("loader.json")[key]
        ratio, fidelity = each["speedup"], each["fidelity"]
        low, high = ratio["range"]
        met = ratio["median"] >= each["bar"]
        rows.append(
            [
                name,
                f"{ratio['median']:.1f} ({low:.1f}-{high:.1f})",
                f"{each['bar']:g}" + _missed(met=met),
                f"{each['images_per_s']['ours']:,.0f}",
                "equal bytes" if "equal_bytes" in fidelity else f"{fidelity['mean']:.2g}",
            ]
        )
    return table(["", "times as fast", "our goal", "ours, images/s", "difference from PIL"], rows)


def _missed(*, met: bool) -> str:
    return "" if met else " (missed)"


def bare_reads() -> tuple[str, str]:
    """Photographs' bytes: our share of os.pread's rate in percent, and os.pread's rate over the stream's."""
    rates = results("loader.json")["raw_large"]["images_per_s"]
    return f"{rates['ours'] / rates['limit']:.0%}"[:-1], f"{rates['limit'] / rates['peer']:.1f}"


def from_shards() -> tuple[str, str, str, str]:
    """A step from shards over one on ready-made batches, its range, and the share of waits in percent."""
    measured = results("end_to_end.json")
    ratio, waited = measured["time_over_ready_made"], measured["data_wait_frac"]["median"]
    low, high = ratio["range"]
    return f"{ratio['median']:.2f}", f"{low:.3g}", f"{high:.3g}", f"{100 * waited:.1f}"
