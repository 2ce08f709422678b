"""What benchmarks/scale.py measured on a small machine: scale.json."""

from __future__ import annotations

from page_tables.files import results, table

FILE = "scale.json"


def start() -> str:
    """Starts over many shards."""
    by_shards = results(FILE)["start"]["by_shards"]
    rows = []
    for shards, run in by_shards.items():
        low, high = run["total_range_s"]
        uss = list(run["worker_uss_mib"].values())
        rows.append(
            [
                f"{int(shards):,}",
                f"{run['samples'] / 1e6:,.0f} M",
                f"{run['stages_s']['open_data_and_plan']:.2f} s",
                f"{run['stages_s']['workers_and_first_batch']:.2f} s",
                f"{run['total_s']:.1f} s ({low:.1f}-{high:.1f})",
                f"{run['trainer_cpu_s']:.1f} s",
                " / ".join(f"{value:.0f}" for value in uss),
                *(f"{run['look_up'][order]['order_ms']:.1f} ms" for order in ("global", "blocks")),
                *(f"{run['look_up'][order]['find_and_read_ms']:.0f} ms" for order in ("global", "blocks")),
            ]
        )
    batch = results(FILE)["start"]["lookup_batch"]
    head = [
        "shards",
        "images",
        "open data, plan",
        "workers, first batch",
        "in all, to the end of step 1 (range)",
    ]
    head += ["CPU time of the trainer", "MiB per worker (USS), first batch / later"]
    head += [f"order of {batch:,}, global", "blocks", f"read {batch:,}, global", "blocks"]
    return table(head, rows)


def ranks() -> str:
    """Weak scaling."""
    run = results(FILE)["ranks"]
    rows = [
        [number, each["images_per_s"], each["images_per_s_per_rank"], f"{each['efficiency']:.0%}"]
        for number, each in run["by_ranks"].items()
    ]
    return table(
        [f"CPU ranks, {run['batch_per_rank']} images each", "images/s", "of each rank", "of one rank's"],
        rows,
    )


def ranges_of_ranks() -> tuple[str, ...]:
    """Number of rounds; smallest and largest rate of one rank's, then of two ranks'."""
    run = results(FILE)["ranks"]
    ends = [end for each in run["by_ranks"].values() for end in each["range"]]
    return (str(run["rounds"]), *(f"{end:.0f}" for end in ends))


def slowest_start() -> tuple[str]:
    """The longest time of all starts, in seconds."""
    runs = results(FILE)["start"]["by_shards"].values()
    return (f"{max(run['total_range_s'][1] for run in runs):.1f}",)


def saves() -> str:
    """Saves on this machine."""
    rows = [
        [
            name,
            f"{each['checkpoint_gb']:.2f} GB",
            f"{each['stall_s']['median']:.2f} s ({each['stall_s']['max']:.2f} s)",
            f"{pause['median'] * 1e3:.0f} ms ({pause['max'] * 1e3:.0f} ms)",
            f"{each['write_s']['median']:.1f} s",
        ]
        for name, each in results(FILE)["saving"]["states"].items()
        for pause in [each["longest_pause_while_written_s"]]
    ]
    machine = results(FILE)["saving"]["machine"]
    written = f"written behind it (disk {machine['write_gb_s']} GB/s, SHA-256 {machine['sha256_gb_s']} GB/s)"
    return table(
        [
            *("state", "checkpoint", "training stands still, median (maximum)"),
            *("longest pause while it is written, median (maximum)", written),
        ],
        rows,
    )
