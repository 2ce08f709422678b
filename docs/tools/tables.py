"""Puts the tables into all pages: `python docs/tools/tables.py`.

They come from the files under docs/results and the headers of the presets.
In a page a table stands between `<!-- table NAME -->` and `<!-- end -->`; NAME is of `TABLES`, or a comparison.
All else on a page is written by hand.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from decimal import ROUND_HALF_UP, Decimal
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from mae_vit.config.presets import preset_paths, read_header

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
WRITTEN = "readme_tables.json"
# A cell of a column of numbers, which may have spreads and units.
NUMBER = re.compile(r"([-+]?\d.{0,30}|-|none|not measured)?")
MARKED = re.compile(r"(<!-- table ([\w-]+) -->)\n(.*?)\n?(<!-- end -->)", flags=re.DOTALL)


def load(name: str) -> Any:
    """The content of a JSON file under docs/results; of a JSON lines file, the lines by their `key`."""
    text = (RESULTS / name).read_text()
    if name.endswith(".jsonl"):
        return {line["key"]: line for line in map(json.loads, text.splitlines())}
    return json.loads(text)


def decimal(value: float, digits: int = 1) -> str:
    """A number with so many decimals, a half rounded up: 64.35, which no float is, becomes 64.4."""
    return str(Decimal(str(round(value, 9))).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def ratio(measured: dict[str, Any]) -> str:
    """A median with the range of its rounds."""
    median, low, high = (decimal(each, 2) for each in (measured["median"], *measured["range"]))
    return f"{median} ({low} to {high})"


def table(head: str, rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table. The columns of `head` stand between ` | `; those of numbers are aligned right."""
    columns, cells = head.split(" | "), [[str(cell) for cell in row] for row in rows]
    numbers = (all(NUMBER.fullmatch(cell) for cell in column) for column in zip(*cells, strict=True))
    rule = ["---:" if right else "---" for right in numbers]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, rule, *cells))


def parts(source: str, line: str, head: str) -> str:
    """A table with a line for each part of a JSON file that has the values of the format string `line`.

    `source` is the file, and the keys that lead to the parts.
    """
    file, *path = source.split()
    found = reduce(getitem, path, load(file))
    rows = []
    if isinstance(found, dict):
        found = [part | {"name": name} for name, part in found.items()]
    for part in found:
        with suppress(KeyError):
            rows.append(line.format(**part).split(" | "))
    return table(head, rows)


def report(comparison: str) -> dict[tuple[str, str], dict[str, str]]:
    """The first table of report.md: cells by column, by entry and mode. A test computes its intervals again."""
    found = re.search(r"(?:^\| .*\n)+", (RESULTS / comparison / "report.md").read_text(), re.MULTILINE)
    assert found is not None, comparison
    head, _, *lines = (line[2:-2].split(" | ") for line in found[0].splitlines())
    rows = (dict(zip(head, line, strict=True)) for line in lines)
    # A note in parentheses may follow the name.
    return {(row["entry"].split(" (")[0], row.get("mode", "finetune").split(",")[0]): row for row in rows}


def runs(comparison: str) -> dict[str, dict[str, str]]:
    """The first run of each entry in results.csv. All seeds of an entry have its compute and settings."""
    with (RESULTS / comparison / "results.csv").open() as file:
        return {row["entry"]: row for row in reversed(list(csv.DictReader(file)))}


def compared(name: str, score: str = "test %", modes: tuple[str, str] = ("finetune", "few_shot")) -> str:
    """Each entry of a comparison, fine-tuned and frozen: the reference, then the others by their score."""
    lines, of_run, rows = report(name), runs(name), []
    for entry in of_run:
        tuned, frozen = lines[entry, modes[0]], lines.get((entry, modes[1]), {}).get(score, "")
        flops = sum(float(of_run[entry][f"{part}_flops"]) for part in ("pretrain", "finetune"))
        rows.append([entry, tuned[score], _gap(tuned), frozen, f"{flops / 1e15:.3g}"])
    rows.sort(key=lambda row: (row[2] != "", float(row[1].split()[0])))
    head = f"row | fine-tuned, {score} | points above the first row (95 % interval) | frozen, {score} | PFLOP"
    return table(head, rows)


def _gap(line: dict[str, str]) -> str:
    found = re.search(r"(-?[\d.]+) \[(.+), (.+)\](\*?)", line.get("gap, points", ""))
    if found is None:
        return ""
    points, low, high, one_seed = found.groups()
    return f"{points} (one seed)" if one_seed else f"{points} ({low} to {high})"


def longer() -> str:
    """Networks that train longer on the labels, each beside its shorter training in the same comparison."""
    names = ("longer", "scratch_longer", "finetune_longer", "contrast_longer")
    made = [compared(f"compare_cifar10_{name}").splitlines() for name in names]
    made.append(compared("study_length_tiny_imagenet_cnn").splitlines())
    # SimpleCNN is not the first row of its comparison.
    lines = [line for lines in made for line in lines if re.search(r"(?<!CNN), \d+ epochs \|", line)]
    return "\n".join([made[0][0].replace("the first row", "30 epochs"), made[0][1], *lines])


def recipes() -> tuple[str, str]:
    """The presets with a result of ours and its protocol, and the others by the machine that they are for."""
    rows, others = [], {"several GPUs": [], "one GPU": [], "CPU": []}
    for header in map(read_header, preset_paths()):
        name, hardware, time, title = header.row()
        result = header.lines["Result"]
        if not result.startswith("not measured"):
            file = re.search(r"docs/results/(\w+)", result)
            protocol = file[1] if file else "pretraining" if name in load("pretraining.json") else ""
            link = f"[protocol](results/{protocol}/README.md)" if protocol else ""
            # The first sentence, or the part of it before a colon.
            short = re.split(r"(?<=\?) |[.:;](?: |$)", title)[0]
            rows.append((f"`{name}`", short, time.replace("-", ""), link))
        else:
            machine = next((kind for kind in others if kind in hardware), "several GPUs")
            others[machine].append(f"`{name}`")
    grouped = ((machine, ", ".join(names)) for machine, names in others.items())
    return table("preset | what it is | time | result", rows), table("for | presets", grouped)


def encoders() -> str:
    """The encoders in docs/results/encoders, by least squares and nearest neighbors on their frozen features."""
    found = load("rankme.json")
    scores, rows = {each["name"]: each for each in found["encoders"] + found["added"]}, []
    for path in sorted((RESULTS / "encoders").glob("*.safetensors")):
        name = next(name for name in scores if name.startswith(path.stem.replace("_cifar_tiny", "")))
        figures = (decimal(100 * scores[name][key]) for key in ("few_shot_top1", "knn_top1"))
        rows.append((f"`{path.name}`", name.rpartition("_")[2], *figures))
    return table("file | epochs | least squares, % | nearest neighbors, %", rows)


def step() -> str:
    """How many times as fast our step is as those of transformers' ViTMAE and the official MAE code."""
    peers = [(precision, peer) for precision in ("fp32", "bf16") for peer in ("transformers", "official")]
    rows = []
    for file in ("step.json", "step_base.json"):
        speedups = [load(file)["results"][precision]["speedup"][peer] for precision, peer in peers]
        config = load(file)["config"]
        rows += [(f"{config}, {kind}", *(ratio(each[kind]) for each in speedups)) for kind in speedups[0]]
    return table("setting | fp32, transformers | fp32, official | bf16, transformers | bf16, official", rows)


def loader() -> str:
    """Our loader against the fastest peers, the same libraries without a loader, and the official pipeline."""
    rows, kinds = [], ("over_fastest", "over_fastest_with_a_worker", "over_plain", "over_official")
    for name, each in load("loader.json")["results"].items():
        over = (_over(each[kind]) if kind in each else "" for kind in kinds)
        difference = f"{each['fidelity']['mean']:.2g}" if "mean" in each["fidelity"] else "equal bytes"
        rows.append((f"`{name}`", *over, f"{each['images_per_s']['ours']:,.0f}", difference))
    peers = "times the fastest peer's rate | fastest of those with a worker | simplejpeg without a loader"
    return table(f"images | {peers} | official pipeline | ours, images/s | difference from PIL", rows)


def _over(measured: dict[str, Any]) -> str:
    """A ratio, the peer, and our goal if there is one."""
    goal = f"; goal {measured['at_least']:g}: {measured['verdict']}" if "at_least" in measured else ""
    return f"{ratio(measured)} ({measured['peer'].removeprefix('files, ')}){goal}"


def bands_loader() -> str:
    """Tiles a second on one core, and how many times those of tifffile."""
    rows = []
    for size, measured in load("bands_loader.json")["results"].items():
        for name, tiles in measured["tiles_per_core_s"].items():
            times = measured["times_of_peer"].get(f"{name} / tifffile")
            rows.append((size, f"`{name}`", f"{tiles['median']:.0f}", ratio(times) if times else ""))
    return table("tiles | loader | tiles/s | times tifffile", rows)


def written(name: str) -> str:
    """A table of README: its lines with the value of each `{file: key}` or `{comparison: entry}`."""
    head, *rows = (re.sub(r"{([\w/.]+): (.+?)}", _cell, line) for line in load(WRITTEN)[name])
    return table(head, (row.split(" | ") for row in rows))


def _cell(match: re.Match[str]) -> str:
    source, name = match.groups()
    if "." in source:
        rate = load(source)[name]
        return f"{rate['images_per_s']:,.0f} ({rate.get('gib') or rate['peak_memory_gib']:.1f} GiB)"
    lines = report(source)
    line = lines.get((name, "segment")) or lines[name, "finetune"]
    score = line.get("mIoU %") or line["test %"]
    return score if "±" in score else f"{score} (one seed)"


# Table: where its parts are, what a line has, the columns.
PARTS = {
    "gpu-parity": ("gpu/parity.jsonl", "{key} | {largest_difference:.1e}", "losses | largest difference"),
    **{
        f"profile-{name.replace('_', '-')}": (
            f"profile_step.json results mae_{name} top",
            "{name} | {share:.1%} | {ms_per_step:.3g}",
            "operator | share | ms a step",
        )
        for name in ("cifar_tiny", "base")
    },
    "gpu-rates": (
        "gpu/rates.jsonl",
        "{name} | {images_per_s:,.0f} | {ms_per_step:.1f} | {share_of_peak:.0%} | {peak_memory_gib:.1f} GiB",
        "ViT-B/16, MAE | images/s | ms a step | of the peak rate | memory",
    ),
    "gpu-attention": (
        "gpu/step_h200.jsonl",
        "`{name}` | {attention} | {images_per_s:,.0f} | {ms:.1f} ({range[0]:.1f} to {range[1]:.1f}) | {share:.0%}",
        "network, batch | attention | images/s | ms a step (range) | of the peak rate",
    ),
    "gpu-runs": (
        "gpu/runs_h200.json",
        "`{name}` | {cores} | {compiled} | {images_per_s:,.0f} | {ms:.1f} | {data_wait_share:.0%}",
        "run | cores | compiled | images/s | ms a step | waiting for data",
    ),
    "hardware": (
        "hardware.json presets",
        "`{name}` | {gflop:.3g} | {gb_12} | {gb_24} | {gb_40} | {gb_80} | {cpu} | {a10} | {a100} | {h100}",
        "preset | GFLOP an image | 12 GB | 24 GB | 40 GB | 80 GB | two CPU cores | A10 | A100 | H100",
    ),
    "engine": (
        "engine.json results",
        "{name} | {ms_over_bare[mean]:.1f} ({ms_over_bare[interval_95][0]:.1f} to {ms_over_bare[interval_95][1]:.1f})"
        " | {at_most:g} ({verdict})",
        "engine | ms beyond the bare loop (95 % interval) | our limit",
    ),
    "start": (
        "scale.json results start by_shards",
        "{name} | {stages_s[open_data_and_plan]:.2f} s | {stages_s[workers_and_first_batch]:.2f} s"
        " | {total_s:.1f} s ({total_range_s[0]:.1f} to {total_range_s[1]:.1f})"
        " | {worker_uss_mib[first_batch]} / {worker_uss_mib[after_40_more]}"
        " | {look_up[global][find_and_read_ms]:.0f} ms | {look_up[blocks][find_and_read_ms]:.0f} ms",
        "shards of 1,000 images | open data, plan | workers, first batch | in all, to the end of step 1 (range)"
        " | MiB per worker (USS), first batch / later | read 4,096 images, global order | blocks",
    ),
    "compiled-starts": (
        "scale.json results compile by_start",
        "{name} | {first_step_s[median]:.1f} ({first_step_s[range][0]:.1f} to {first_step_s[range][1]:.1f})"
        " | {third_step_s[median]:.1f} ({third_step_s[range][0]:.1f} to {third_step_s[range][1]:.1f})",
        "start | s to the end of its first step (range) | of its third",
    ),
    "measured-saves": (
        "scale.json results saving states",
        "{name} | {checkpoint_gb:.2f} | {stall_s[median]:.2f} ({stall_s[max]:.2f})"
        " | {longest_pause_while_written_s[median]:.3f} ({longest_pause_while_written_s[max]:.3f})"
        " | {write_s[median]:.1f}",
        "state | GB | s that training stands still, median (maximum)"
        " | longest pause while it is written, s | s to write it",
    ),
}
TABLES: dict[str, Callable[[], str]] = {
    "segmentation": partial(compared, "compare_segmentation", "mIoU %", ("segment", "segment_probe")),
    "longer": longer,
    "recipes": lambda: recipes()[0],
    "recipes-of-papers": lambda: recipes()[1],
    "encoders": encoders,
    **{n: lambda n=n: compared(n).replace("test %", "held-out %") for n in ("study_recipes", "ladder")},
    "step": step,
    "loader": loader,
    "bands-loader": bands_loader,
    **{name: partial(written, name) for name in load(WRITTEN)},
    **{name: partial(parts, *spec) for name, spec in PARTS.items()},
}


def pages() -> list[Path]:
    """The files that may have tables."""
    globs = ("*.md", "docs/*.md", "docs/results/*/README.md", "benchmarks/README.md")
    return [path for glob in globs for path in sorted(ROOT.glob(glob))]


def fill(page: str, text: str) -> tuple[str, list[str]]:
    """Puts the tables into a page; adds a line on each that differs from its files."""
    complaints = []

    def put(match: re.Match[str]) -> str:
        begin, name, before, end = match.groups()
        made = TABLES.get(name, partial(compared, name))()
        if before != made:
            complaints.append(f"{page}: table {name} differs from its files")
        return f"{begin}\n{made}\n{end}"

    return MARKED.sub(put, text), complaints


def main() -> None:
    """Puts the tables into all pages, and prints what differed."""
    for path in pages():
        filled, complaints = fill(str(path.relative_to(ROOT)), path.read_text())
        path.write_text(filled)
        print("".join(f"{complaint}\n" for complaint in complaints), end="")


if __name__ == "__main__":
    main()
