"""Loading, for one core: images of shards as training takes them, against the usual pipelines.

Both sides run on the same core, worker and trainer together, and take turns, so that
ratios hold where absolute times drift. A turn begins when the first batch has come and
ends when the last one has. A worker may have begun the second batch by then; nothing is left behind.
Ours is the path of training (index, source, order, `load_batches`). All but the official pipeline end in
a uint8 batch in the trainer's process; normalizing it costs them the same, on the device. The ratio is
against the fastest peer, which the JSON names. All peers draw a crop and a flip for each image.

- Files: ImageFolder and DataLoader, without and with a worker; SPDL has a thread. The pipeline of the official MAE code
  (PIL, ToTensor, Normalize) ends in float32. Faster ones end in uint8: PIL; torchvision's decoder, simplejpeg or
  torchcodec with torchvision's v2 transforms; OpenCV; SPDL with torchcodec. Packages that are missing take no part:
  `pip install -e .[bench]`.
- Small images also from memory: PIL (as torchvision's CIFAR10), v2 transforms, and batches cropped by plain torch.
- Bytes: webdataset's stream.

All files are read once before the first turn, so they come from memory (a warm page cache).

    full       full-size photographs, random resized crop (0.2 to 1) to 224 px, flip
    repeats4   full-size, four views of each image that is decoded, of all uint8 peers too; views per second
    short256   as `full`, of shards prepared with --resize 256 --quality 90; peers read the same images as files
    small_pad  small images in memory: shifted crop and flip
    small_rrc  small images in memory: random resized crop and flip
    raw_small  bytes of small files in random order; the peer reads the same in theirs
    raw_large  bytes of photographs, more than a processor's cache holds

Beside each speed stands its fidelity: the mean absolute difference (of 255) from PIL's
crop and bicubic resize on the same boxes; of `short256` from the full-size photographs.
Bytes must be equal; beside them stands what `os.pread` alone takes. Prints a table and JSON.

With 300 photographs all rows take a quarter of an hour on a quiet core.

    python benchmarks/loader.py --photos SRC [--small SRC] [--rows ROW ...] [--repeats 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.reports import add_out, measured_on
from benchmarks.harness.turns import at_least, paired, summarize
from benchmarks.loading.contenders import OFFICIAL, PEER, PLAIN, Turn, contenders
from benchmarks.loading.fidelity import fidelity
from benchmarks.loading.more_peers import PACKAGES, is_there, version_of
from benchmarks.loading.rows import ROWS, Row, prepare_data
from mae_vit.core.errors import InputError


def contend(make: Callable[[], Turn], core: int, pipe: Connection) -> None:
    """The life of a contender, on one core with its workers: answers each word with seconds for an image."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    turn = make()
    while pipe.recv():
        pipe.send(turn())


def measure(row: Row, folder: Path, *, repeats: int, core: int) -> dict[str, list[float]]:
    """Times all contenders in turn, round after round: microseconds for an image."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name, make in contenders(row, folder).items():
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=contend, args=(make, core, theirs)))
        processes[-1].start()
        theirs.close()
    times: dict[str, list[float]] = {name: [] for name in pipes}
    try:
        for round_number in range(repeats + 1):
            # Back and forth, so that a slow drift favors neither the first nor the last.
            for name, pipe in list(pipes.items())[:: 1 if round_number % 2 else -1]:
                pipe.send(True)
                microseconds = pipe.recv() * 1e6
                if round_number:  # the first warms up
                    times[name].append(round(microseconds, 3))
        for pipe in pipes.values():
            pipe.send(False)
    finally:
        for pipe in pipes.values():
            pipe.close()  # ends those that still wait
        for process in processes:
            process.join()
    return times


def warm_page_cache(row: Row, folder: Path) -> None:
    """Reads all files of both sides, so that neither waits for a disk."""
    for name in {row.ours, row.peer}:
        for path in (folder / name).rglob("*"):
            if path.is_file():
                path.read_bytes()


def compare(times: dict[str, list[float]], row: Row) -> dict[str, Any]:
    """Medians, and how many times the speed of each kind of peer, round by round; goals by the range of rounds.

    The fastest peer, the fastest of those with a worker, the official pipeline, and the libraries of ours in one
    process without a loader.
    """
    medians = {name: statistics.median(values) for name, values in times.items()}
    peers = [name for name in times if name.startswith(PEER)]
    with_a_worker = [name for name in peers if name.endswith(", 1 workers")]
    official = [name for name in peers if OFFICIAL in name]
    plain = [name for name in peers if name == f"{PEER}{PLAIN}, 0 workers"]

    def over(some: list[str], goal: float | None = None) -> dict[str, Any]:
        best = min(some, key=medians.__getitem__)
        found = {"peer": best.removeprefix(PEER), **ratio(times[best], times["ours"])}
        return found if goal is None else {**found, **at_least(goal, found["range"])}

    return {
        "over_fastest": over(peers, None if official else row.goal),
        **({"over_fastest_with_a_worker": over(with_a_worker)} if plain else {}),
        **({"over_official": over(official, row.goal)} if official else {}),
        **({"over_plain": over(plain, row.plain_goal)} if plain else {}),
        "images_per_s": {name: round(1e6 / median, 1) for name, median in medians.items()},
        "us_per_image": times,
    }


def ratio(theirs: list[float], ours: list[float]) -> dict[str, Any]:
    """How many times as fast ours is, as median and range over rounds."""
    return summarize(paired(theirs, ours, lambda peer, mine: peer / mine))


def describe(result: dict[str, Any]) -> str:
    """A row's line of the table."""
    fastest, far, rates = result["over_fastest"], result["fidelity"], result["images_per_s"]
    low, high = fastest["range"]
    goals = [
        f"{name}: {each['at_least']} {each['verdict']}" for name, each in result.items() if "at_least" in each
    ]
    pixels = f"MAD {far['mean']:.3f}" if "mean" in far else "equal" if far["equal_bytes"] else "DIFFERENT"
    return (
        f"{fastest['median']:>8.2f} {low:>7.2f}-{high:<7.2f}"
        f"{rates['ours']:>10,.0f} {rates[PEER + fastest['peer']]:>8,.0f}  {pixels}"
        f"  ({fastest['peer']}; {', '.join(goals)})"
    )


def main() -> None:
    """Measures the chosen rows and prints their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--photos", metavar="SRC", help="photographs in class folders: a folder or an archive of it"
    )
    parser.add_argument(
        "--small",
        default="cifar10",
        metavar="SRC",
        help="small images of one size in class folders (cifar10)",
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, metavar="ROW", help="which to measure (all)")
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="times that each contender's turn comes (7)"
    )
    parser.add_argument("--core", type=int, metavar="N", help="that all runs on (the last of this process)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="keep what is prepared here (temporary)")
    add_out(parser)
    arguments = parser.parse_args()
    core = max(os.sched_getaffinity(0)) if arguments.core is None else arguments.core
    names = arguments.rows or [name for name, row in ROWS.items() if row.small or arguments.photos]
    if not arguments.rows and not arguments.photos:
        print("without --photos SRC: small images only", file=sys.stderr)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.data or Path(temporary)
        try:
            prepare_data(folder, arguments.photos, arguments.small, [ROWS[name] for name in names])
        except InputError as error:
            parser.exit(2, f"error: {error}\n")
        print("             ratio  lowest-highest      ours/s   peer/s", file=sys.stderr)
        samples = {
            path.parent.name: json.loads(path.read_text())["splits"]["train"]["samples"]
            for path in sorted(folder.glob("*/dataset.json"))
        }
        versions = {
            name: metadata.version(name) for name in ("pillow", "simplejpeg", "torchvision", "webdataset")
        }
        versions |= {name: version_of(name) for name in PACKAGES if is_there(name)}
        report = {
            "benchmark": "loader",
            "core": core,
            "repeats": arguments.repeats,
            "samples": samples,
            "photographs": samples.get("full"),
            "page_cache": "warm",
            "ends_in": "uint8 batches in the trainer's process",
            "rows": {name: asdict(ROWS[name]) for name in names},
            "results": {},
            "versions": versions,
            "not_installed": [name for name in PACKAGES if not is_there(name)],
            "environment": measured_on(threads=1),
        }
        for name in names:
            row = ROWS[name]
            warm_page_cache(row, folder)
            times = measure(row, folder, repeats=arguments.repeats, core=core)
            result = {**compare(times, row), "fidelity": fidelity(row, folder)}
            print(f"{name:<10}{describe(result)}", file=sys.stderr)
            report["results"][name] = result
            if arguments.out:  # row by row: all of them take minutes
                arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
