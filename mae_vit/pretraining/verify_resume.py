"""`mae-vit verify-resume`: kills small runs at random, resumes them, and compares them with undisturbed ones.

The promise (docs/reliability.md): on the same number of ranks, the weights are equal to the bit. On another number the
order, the images and their crops are equal; the losses too, up to rounding, without BatchNorm, drop-path and dropout.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tqdm import tqdm

from mae_vit.config.load import ALTERNATIVES, load_config
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of, format_duration
from mae_vit.core.progress import progress
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images
from mae_vit.objectives.objective import ObjectiveOutput
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.report.run_record import last_step
from mae_vit.runtime.ranks import free_port
from mae_vit.runtime.signals import exit_with_parent, without_main
from mae_vit.training.engines.torch_engine import TorchEngine
from mae_vit.training.outputs.run_folder import RunFolder

# Forty steps of the digits take some five seconds of a core, so that two minutes cover five runs and ten kills.
_STEPS, _SAVE_EVERY = 40, 4
_SETTINGS = (
    *("run.device=cpu", "train.engine=torch", "train.zero_stage=0", "train.compile=false"),
    *(f"train.steps={_STEPS}", f"train.warmup_steps={_STEPS // 10}"),
    *(f"checkpoint.every_steps={_SAVE_EVERY}", "checkpoint.every_minutes=null", "checkpoint.keep_every=null"),
    *("monitor.log_every_steps=1", f"monitor.evaluate_every_steps={_STEPS}", "monitor.probe_queries=0"),
    *("monitor.tensorboard=false", "monitor.trackers=null"),
)
_DIGITS = "data/digits"
# Relative difference of losses above which another number of ranks computes something else. On digits it was 1e-7.
_ROUNDING = 1e-4
_POLL_S, _PATIENCE_S = 0.05, 600.0


@dataclass(frozen=True)
class Record:
    """What a finished run computed.

    Attributes:
        kills: how often it was killed.
        weights: SHA-256 of `encoder.safetensors`.
        losses: the loss of each step, counted from 1.
        images: epoch, number and checksum of pixels of the images of each step, on all ranks, in sorted order.
    """

    folder: Path
    kills: int
    weights: str
    losses: dict[int, float]
    images: dict[int, list[list[int]]]


def verify_resume(config: Path, overrides: Sequence[str], *, kills: int, folder: Path) -> list[str]:
    """Runs everything below an empty folder; prints a line for each comparison.

    `kills`, three or more, are SIGKILLs over all runs.

    Returns:
        What differs from what is promised; empty if nothing does.

    Raises:
        InputError: for an invalid config, an override of what the runs need, or a run that fails by itself.
    """
    for override in overrides:
        key = override.partition("=")[0]
        same = next((group for group in ALTERNATIVES if key in group), (key,))
        for setting in (*_SETTINGS, f"run.dir={folder}"):
            if setting.partition("=")[0] in same:
                raise InputError(f'override "{override}": verify-resume itself sets {setting}; leave it out')
    words = [str(config), "data.workers=0", *overrides, *_SETTINGS]
    settings = load_config(PretrainConfig, config, words[1:])
    if settings.data.path == _DIGITS and not Path(_DIGITS).exists():
        prepare([find_images("digits", out=folder / "digits")], folder / "digits")
        words.append(f"data.path={folder / 'digits'}")
    chance, problems = random.Random(), list[str]()
    parts = [kills // 3, kills // 3, kills - 2 * (kills // 3)]
    with progress(total=5 * _STEPS, unit=" steps") as bar:
        begun = time.monotonic()
        whole = {1: _run(words, folder / "whole-1", [1], chance, bar)}
        # The first run also imports everything. Each kill makes a run begin again.
        expected = (time.monotonic() - begun) * (5 + kills) / 2
        bar.write(f"5 runs and {kills} kills take about {format_duration(expected)} here", file=sys.stdout)
        whole[2] = _run(words, folder / "whole-2", [2], chance, bar)
        for ranks, part in zip((1, 2), parts, strict=False):
            name = count_of(ranks, "rank")
            killed = _run(words, folder / f"killed-{ranks}", [ranks] * (part + 1), chance, bar)
            bar.write(f"{name}: {'undisturbed':<17} {whole[ranks].weights[:32]}", file=sys.stdout)
            bar.write(f"{name}: {f'killed {killed.kills} times':<17} {killed.weights[:32]}", file=sys.stdout)
            problems += [f"{name}: {text}" for text in _differences(killed, whole[ranks])]
        changing = [1 + number % 2 for number in range(parts[2] + 1)]
        elastic = _run(words, folder / "changing", changing, chance, bar)
        images, equal = sum(map(len, elastic.images.values())), elastic.images == whole[1].images
        bar.write(
            f"killed {elastic.kills} times, on {' > '.join(map(str, changing))} ranks: {count_of(images, 'image')} and "
            f"crops {'are equal' if equal else 'DIFFER'} in {count_of(len(elastic.images), 'step')}; losses differ by "
            f"{_loss_difference(elastic, whole[1]):.0e} at most",
            file=sys.stdout,
        )
        weights = load_file(whole[1].folder / "encoder.safetensors")
        if any(settings.model.drops.values()) or any(name.endswith("running_mean") for name in weights):
            elastic = replace(elastic, losses=whole[1].losses)  # they depend on the images of each rank
        problems += [f"changing ranks: {text}" for text in _differences(elastic, whole[1], bits=False)]
    return problems


def _loss_difference(one: Record, other: Record) -> float:
    """Returns the largest relative difference of the losses; infinite if they are of other steps."""
    if one.losses.keys() != other.losses.keys():
        return float("inf")
    return max(abs(one.losses[step] - loss) / abs(loss) for step, loss in other.losses.items())


def _differences(one: Record, other: Record, *, bits: bool = True) -> list[str]:
    """Says what differs from an undisturbed run, beyond rounding if not `bits`."""
    found = []
    if steps := [step for step, images in other.images.items() if one.images.get(step) != images]:
        found.append(f"other images or crops in {count_of(len(steps), 'step')}, first in step {steps[0] + 1}")
    if bits and (steps := [step for step, loss in other.losses.items() if one.losses.get(step) != loss]):
        found.append(f"another loss in {count_of(len(steps), 'step')}, first in step {steps[0]}")
    if not bits and (difference := _loss_difference(one, other)) > _ROUNDING:
        found.append(f"losses differ by {difference:.1e}, more than rounding does")
    if bits and one.weights != other.weights:
        ours, theirs = (load_file(record.folder / "encoder.safetensors") for record in (one, other))
        names = [name for name, tensor in theirs.items() if not tensor.equal(ours[name])]
        found.append(f"other weights: {', '.join(names[:3])}{' ...' * (len(names) > 3)} ({one.folder})")
    return found


def _run(
    words: Sequence[str], folder: Path, ranks: Sequence[int], chance: random.Random, bar: tqdm[Any]
) -> Record:
    """Runs to the end on the last number of ranks; on those before it is killed at a random moment."""
    bar.set_description(f"{folder.name}, {count_of(len(ranks) - 1, 'kill')}")
    seen = killed = 0
    for number, world_size in enumerate(ranks):
        left = len(ranks) - 1 - number
        # So many steps more that some are left for the kills to come.
        until = seen + 1 + chance.randrange(max(1, (_STEPS - seen) // (left + 1))) if left else None
        with _started(words, folder, world_size) as processes:
            begun = time.monotonic()
            while any(process.is_alive() for process in processes):
                step = last_step(folder)
                bar.update(max(0, step - seen))
                seen = max(seen, step)
                if until is not None and step >= until:
                    # Within a step, an evaluation or a save.
                    time.sleep(chance.random() * 0.1)
                    break
                if time.monotonic() > begun + _PATIENCE_S:
                    raise InputError(f"{folder.name} made no step for minutes; see {folder}.log")
                time.sleep(_POLL_S)
            for process in processes if left else ():
                process.kill()
            for process in processes:
                process.join()
            ended = [process.exitcode for process in processes]
            killed += -signal.SIGKILL in ended
        if any(code not in (0, *([-signal.SIGKILL] if left else [])) for code in ended):
            raise InputError(f"{folder.name} failed without a kill: {_last_line(Path(f'{folder}.log'))}")
    bar.update(_STEPS - seen)
    return _read(folder, killed)


@contextmanager
def _started(words: Sequence[str], folder: Path, world_size: int) -> Iterator[list[BaseProcess]]:
    """Starts the ranks of a run; none is left at the end."""
    context: ForkServerContext | SpawnContext = multiprocessing.get_context("spawn")
    if sys.platform.startswith("linux"):
        # Importing takes longer than the run: the server does it once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "mae_vit.pretraining.job", "torch._dynamo"])
    shared: dict[str, Any] = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    arguments = [*words, f"run.dir={folder}"]
    processes: list[BaseProcess] = [
        context.Process(target=_rank, args=(arguments, folder, {**shared, "RANK": rank, "LOCAL_RANK": rank}))
        for rank in range(world_size)
    ]
    try:
        with without_main():
            for process in processes:
                process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(words: Sequence[str], folder: Path, environment: Mapping[str, Any]) -> None:
    """Pretrains in this process, a rank of its own, and notes the images of each step."""
    exit_with_parent()
    # A killed process would leave the semaphore of the default lock behind.
    tqdm.set_lock(threading.RLock())
    os.environ.update({name: str(value) for name, value in environment.items()})
    output = os.open(f"{folder}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    from mae_vit.pretraining.command import main

    forward = TorchEngine.forward
    with open(f"{folder}.images-{environment['RANK']}", "a") as notes:

        def noted(self: TorchEngine, batch: Batch) -> ObjectiveOutput:
            for number, image in zip(batch.keys.index.tolist(), batch.images.numpy(), strict=True):
                row = [self.updates, batch.keys.epoch, number, zlib.crc32(image.tobytes())]
                notes.write(json.dumps(row) + "\n")
            notes.flush()
            return forward(self, batch)

        TorchEngine.forward = noted  # type: ignore[method-assign]
        sys.exit(main(list(words)))


def _read(folder: Path, kills: int) -> Record:
    """Reads a finished run.

    Steps that a kill undid were taken again; `images` has each image once, so that a difference shows.
    """
    steps: dict[int, set[tuple[int, ...]]] = {}
    for file in folder.parent.glob(f"{folder.name}.images-*"):
        for line in file.read_text().splitlines():
            try:
                step, *row = json.loads(line)
            except ValueError:
                continue  # cut off by the kill
            steps.setdefault(step, set()).add(tuple(row))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Record(
        folder,
        kills,
        hashlib.sha256(RunFolder(folder).encoder.read_bytes()).hexdigest(),
        {line["step"]: line["loss"] for line in lines},
        {step: sorted(map(list, rows)) for step, rows in sorted(steps.items())},
    )


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
