"""`mae-vit recommend`: looks at images and machine; names a preset, its time here, the gain to expect, the commands."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from mae_vit.config.load import load_config, read_run_config
from mae_vit.config.plan import Plan, make_plan
from mae_vit.config.presets import PRESETS
from mae_vit.core.errors import InputError
from mae_vit.core.messages import count_of
from mae_vit.core.urls import is_url
from mae_vit.data.data_path import is_unprepared, resolve_data_path
from mae_vit.data.prepare.prepare import prepare
from mae_vit.data.prepare.sources.find import find_images, naming_prepare
from mae_vit.data.shards.dataset_json import TEST_SPLITS, Dataset, read_dataset
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.measurements import MEASUREMENTS, Measured
from mae_vit.pretraining.setup import Setup, set_up
from mae_vit.runtime.device import free_memory_gib
from mae_vit.runtime.ranks import ALONE
from mae_vit.training.engines.precision import choose_precision
from mae_vit.training.plan_text import describe_time
from mae_vit.training.step_time import time_steps

# Images of an unprepared source that are prepared in a temporary folder, for their size and the time of a step.
_SAMPLE = 256
_WIDTH = 100
# Shortest sides from which larger presets see more than enlarged pixels.
_FROM_96_PX, _FROM_224_PX = 88, 160
# On fewer cores 96 px take days.
_CORES_FOR_96_PX = 8
# With fewer images than this, or this share of those that were measured, or with more labels, it says little.
_FEWEST, _FEW_IMAGES, _MANY_LABELS = 500, 0.1, 20_000
# Fewer test images than 10 of each class, or than measure accuracy to within 5 points, are few.
_TESTED_PER_CLASS, _SURE_POINTS = 10, 5.0
_SHARES = ("1/10", "1/5", "1/3")
# A preset's epochs of few images may be too few steps.
_ENOUGH_STEPS, _LONGER = 1_500, ["train.steps=6000", "train.warmup_steps=600"]


class Preset(NamedTuple):
    """What belongs together: pretraining, the recipe that `finetune --ckpt RUN` takes, and a comparison (or none)."""

    pretrain: str
    finetune: str
    compare: str | None = None


PHOTOS_64 = Preset("mae_photos_64", "finetune_photos_64", "compare_photos")
PHOTOS_96 = Preset("mae_photos_96", "finetune_photos_96", "compare_photos")
PHOTOS_224 = Preset("mae_photos_224", "finetune_photos_224", "compare_photos")
SMALL = Preset("mae_cifar_tiny", "finetune_cifar_tiny")
DIGITS = Preset("mae_digits", "finetune_cifar_tiny")
BANDS = Preset("mae_satellite", "finetune_photos_64")
# What compare_photos pretrains.
_COMPARED = PHOTOS_64.pretrain


@dataclass(frozen=True)
class Images:
    """What a source holds.

    Attributes:
        given: the path, as the user gave it.
        prepared: whether it is a folder of shards; otherwise `folder` has a sample of its images.
        folder: local folder of shards.
        dataset: its description.
        train: images to pretrain on.
        labeled: how many of these have labels; 0 if all have the same.
        classes: number of classes.
        held_out: images in the splits val and test; 0 if train has labels and test, alone, has none.
        tested: how many of these have labels and are in the split that results are measured on.
        sampled: images of the sample, with those that cannot be read; 0 if prepared.
    """

    given: str
    prepared: bool
    folder: Path
    dataset: Dataset
    train: int
    labeled: int
    classes: int
    held_out: int
    tested: int
    sampled: int = 0

    @property
    def share(self) -> str:
        """The smallest share to hold out that leaves enough test images; the largest if none does."""
        enough = (share for share in _SHARES if not self.are_few(self.tested_of(share)))
        return next(enough, _SHARES[-1]) if self.labeled else _SHARES[0]

    def tested_of(self, share: str) -> int:
        """Returns about how many test images `--holdout` of this share gives."""
        return round(Fraction(share) * (self.labeled + self.tested))

    def are_few(self, tested: int) -> bool:
        """Whether so many test images say little about so many classes."""
        return tested < _TESTED_PER_CLASS * self.classes or uncertainty_points(tested) > _SURE_POINTS

    @property
    def too_few_drawn(self) -> bool:
        """Whether `--holdout` drew too few test images, and a larger share gives more."""
        val = self.dataset.splits.get("val")
        drawn = val is not None and val.processing.holdout is not None and self.are_few(self.tested)
        return drawn and self.tested_of(self.share) > self.tested

    @property
    def sides(self) -> set[int]:
        """Smallest and largest height and width, in pixels."""
        info = self.dataset.splits["train"]
        return {*info.height, *info.width}

    @property
    def side(self) -> int:
        """Shorter side of the largest image, in pixels."""
        info = self.dataset.splits["train"]
        return min(info.height[1], info.width[1])

    def describe(self) -> str:
        """Words the counts."""
        info = self.dataset.splits["train"]
        low, high = min(self.sides), max(self.sides)
        labels = f"{self.labeled:,} with labels of {count_of(self.classes, 'class', 'classes')}"
        of = "" if self.train == info.samples else f" ({info.samples} were looked at)"
        if self.sampled > info.samples:
            of = f" ({self.sampled - info.samples} of {self.sampled} that were looked at cannot be read)"
        bands = self.dataset.bands
        kind = f" of {count_of(len(bands.names), 'band')} of {bands.dtype}" * (not bands.photographs)
        return (
            f"{count_of(self.train, 'image')}{kind}, sides of {f'{low} to {high}' if low < high else low} px{of}; "
            f"{labels if self.labeled else 'no labels'}; {f'{self.held_out:,}' if self.held_out else 'none'} held-out"
        )


@contextmanager
def look_at(path: str) -> Iterator[Images]:
    """Describes prepared data, or a folder, archive or table of images; their sample exists until the end.

    Raises InputError if there are no images to train on.
    """
    with TemporaryDirectory(prefix="mae-vit-recommend-") as scratch:
        if is_url(path) or not is_unprepared(Path(path)):
            folder = resolve_data_path(path).folder
            dataset = read_dataset(folder)
            if (info := dataset.splits.get("train")) is None:
                raise InputError(f"{path} has no split train; prepare the images with mae-vit prepare")
            samples = Counter({name: split.samples for name, split in dataset.splits.items()})
            labeled = Counter({name: sum(split.class_counts) for name, split in dataset.splits.items()})
            counts = _counts(samples, labeled, sum(map(bool, info.class_counts)))
            yield Images(path, True, folder, dataset, *counts)
            return
        with naming_prepare(path):
            source = find_images(os.path.join(".", path), out=Path(scratch))
        train = [entry for entry in source.entries if entry.split == "train"]
        if not train:
            raise InputError(f"{path} has no images to train on; prepare them with --split train")
        sample = train[:: -(-len(train) // _SAMPLE)]
        print(f"looking at {count_of(len(sample), 'image')}, in a temporary folder", file=sys.stderr)
        dataset = prepare([replace(source, entries=sample)], Path(scratch) / "data").dataset
        samples = Counter(entry.split for entry in source.entries)
        labeled = Counter(entry.split for entry in source.entries if entry.class_name is not None)
        counts = _counts(samples, labeled, len({entry.class_name for entry in train} - {None}))
        yield Images(path, False, Path(scratch) / "data", dataset, *counts, len(sample))


def _counts(samples: Counter[str], labeled: Counter[str], classes: int) -> tuple[int, int, int, int, int]:
    """Turns numbers of images and of labels by split, and that of train's classes, into the numbers of `Images`."""
    labels = labeled["train"] if classes > 1 else 0
    tested = next((labeled[name] for name in TEST_SPLITS if labeled[name]), 0)
    held_out = sum(samples[name] for name in TEST_SPLITS) if tested or not labels or samples["val"] else 0
    return samples["train"], labels, classes, held_out, tested


def choose_preset(images: Images, *, cores: int, gpu: bool) -> Preset:
    """Chooses the presets for the kind and size of the images, and the machine."""
    if not images.dataset.bands.photographs:
        return BANDS
    if images.sides == {8} and images.dataset.channels == 1:
        return DIGITS
    if images.side <= 40:
        return SMALL
    if images.side >= _FROM_224_PX and gpu:
        return PHOTOS_224
    if images.side >= _FROM_96_PX and (gpu or cores >= _CORES_FOR_96_PX):
        return PHOTOS_96
    return PHOTOS_64


def _nearest(images: Images) -> Measured:
    return min(
        MEASUREMENTS,
        key=lambda each: (abs(math.log(each.side / images.side)), abs(math.log(each.images / images.train))),
    )


def describe_gain(images: Images, steps: int) -> str:
    """Says whether pretraining is expected to help, and what this was measured on."""
    if not images.dataset.bands.photographs:
        return "not known: only photographs were measured; docs/bands.md has presets for other images"
    near = _nearest(images)
    reached = [length for length in near.gains if length <= steps]
    length = max(reached, default=min(near.gains))
    gain = near.gains[length]
    effect = f"gained {gain:g}" if gain > 0 else f"lost {-gain:g}"
    on = (
        f"{length:,} steps of MAE {effect} points over the same ViT from "
        f"scratch, on {near.images:,} {near.what} with {near.labels:,} labels (docs/results/{near.source}); {near.cnn}"
    )
    if images.labeled >= _MANY_LABELS:
        return f"not known; with so many labels try supervised training first. {on}"
    measured = [each.images for each in MEASUREMENTS if each.side == near.side]
    so_many = "few" * (images.train < 0.9 * min(measured)) or "many" * (images.train > 2 * max(measured))
    unmeasured = f"; so {so_many} images were not measured" if so_many else ""
    if images.train < max(_FEWEST, _FEW_IMAGES * near.images):
        return f"not known{unmeasured}. Try published encoders first. {on}"
    if not reached and gain > 0:
        short = "nor was so short a run" if so_many else "so few steps were not measured"
        return f"not known{unmeasured}; {short}. {on}"
    return f"{'likely' if gain > 0 else 'unlikely; train for longer'}{unmeasured}. {on}"


def uncertainty_points(tested: int) -> float:
    """Returns half of the 95 % interval of an accuracy on so many images, in points, at its widest: at 50 %."""
    return 196 * math.sqrt(0.25 / max(tested, 1))


def warn_of_few(images: Images) -> str:
    """Says how uncertain accuracies are where test images are few, and which share would tell more; else empty."""
    if images.labeled and images.held_out and not images.tested:
        return "the held-out images have no labels, so no accuracy can be measured"
    more = images.tested_of(images.share)
    tested = images.tested if images.held_out else more
    if not images.labeled or not images.are_few(tested):
        return ""
    text = (
        f"{count_of(tested, 'held-out image')} of {count_of(images.classes, 'class', 'classes')}: accuracy is "
        f"known to ± {uncertainty_points(tested):.0f} points"
    )
    if not images.held_out:
        return f"--holdout {images.share} gives {text}"
    return (
        f"{text} (--holdout {images.share}: ± {uncertainty_points(more):.0f})"
        if images.too_few_drawn
        else text
    )


def _run_name(preset: str, data: str) -> str:
    """Returns the preset's name; with that of the data if `runs/PRESET` belongs to other data."""
    run = Path("runs") / preset
    if not (run / "config.yaml").is_file():
        return preset
    other = read_run_config(run).get("data", {}).get("path", data)
    if Path(other).resolve() == Path(data).resolve():
        return preset
    return f"{preset}_{re.sub('[^A-Za-z0-9._-]', '-', Path(data).resolve().name)}"


def _commands(images: Images, preset: Preset, overrides: Sequence[str]) -> list[str]:
    """Returns the commands to type; labels and held-out images decide which."""
    data, commands = images.given, list[str]()
    if not images.prepared:
        holdout = "" if images.held_out else f" --holdout {images.share}"
        data = f"data/{Path(images.given).resolve().name.partition('.')[0]}"
        resize = " --resize 256" if preset is PHOTOS_224 else ""
        commands.append(f"mae-vit prepare {shlex.quote(images.given)} {shlex.quote(data)}{holdout}{resize}")
    run, tuned, compared = (_run_name(one, data) for one in (preset.pretrain, preset.finetune, _COMPARED))
    # The presets for photographs read this folder.
    path = [f"data.path={shlex.quote(data)}"] * (preset.compare is None or Path(data) != Path("data/photos"))
    few = images.train < max(_FEWEST, _FEW_IMAGES * _nearest(images).images)
    if few and images.labeled and images.dataset.bands.photographs:
        published = "--ckpt timm:vit_small_patch14_reg4_dinov2 model.img_size=224 finetune.mode=knn"
        commands.append(f"mae-vit finetune linear_probe_base {published} data.path={shlex.quote(data)}")
    several = torch.cuda.device_count() > 1
    job = "deepspeed --module mae_vit.cli pretrain" if several else "mae-vit pretrain"
    named = [f"run.name={run}"] * (run != preset.pretrain)
    commands.append(" ".join([job, preset.pretrain, *path, *named, *overrides]))
    run = f"runs/{run}"
    if not images.labeled:
        return [*commands, f"mae-vit report {run}", f"mae-vit embed {run} {shlex.quote(data)} --out features"]
    if preset.compare:
        name = preset.compare + compared.removeprefix(_COMPARED)
        named = [f"run.name={name}", f"pretrain.MAE.dir=runs/{compared}"] * (compared != _COMPARED)
        commands.append(" ".join(["mae-vit compare", preset.compare, *path, *named]))
    named = [f"run.name={tuned}"] * (tuned != preset.finetune)
    return [*commands, " ".join(["mae-vit finetune --ckpt", run, *named])]


def recommend(path: str) -> list[str]:
    """Returns the lines to print, about a screen; raises InputError if the path holds no images to train on."""
    with look_at(path) as images:
        gpu = torch.cuda.is_available()
        preset = choose_preset(images, cores=ALONE.cores, gpu=gpu)
        file = PRESETS / "pretrain" / f"{preset.pretrain}.yaml"
        # That preset shifts images of 32 px.
        overrides = ["data.augment.crop=random_resized"] if preset is SMALL and images.sides != {32} else []
        data = f"data.path={images.given if images.prepared else images.folder}"
        config = load_config(PretrainConfig, file, [data, *overrides])
        apart = Fraction(0 if images.held_out or images.prepared else images.share)
        train = images.train - round(apart * (images.labeled or images.train))
        if make_plan(config, num_samples=train, world_size=1).total_steps < _ENOUGH_STEPS:
            overrides += _LONGER
            config = load_config(PretrainConfig, file, [data, *overrides])
        setup = set_up(config, ALONE)
        free = free_memory_gib(ALONE, setup.device)[0] if gpu else math.inf
        plan, smaller = fit_memory(setup, make_plan(config, num_samples=train, world_size=1), free)
        precision = choose_precision(config.train.precision, setup.device).precision
        tried = time_steps(replace(setup, plan=plan), precision)
        model = config.model
        device = torch.cuda.get_device_name() if gpu else "no GPU"
        facts = {
            "data": images.describe(),
            "machine": f"{count_of(ALONE.cores, 'core')}, {device}",
            "preset": f"{preset.pretrain}: MAE, {setup.costs.encoder_parameters / 1e6:.1f} M parameters, "
            f"{model.image_hw[0]} px; batch {plan.effective_batch_size:,}, {plan.total_steps:,} steps = "
            f"{plan.total_steps / plan.steps_per_epoch:,.0f} epochs",
            "time": describe_time(plan, ALONE, tried),
            "gain": describe_gain(images, plan.total_steps),
        }
        if images.prepared and not images.held_out:
            facts["missing"] = f"held-out images; prepare the images again with --holdout {images.share}"
        elif few := warn_of_few(images):
            facts["warning"] = few
        options: dict[str, Any] = {"subsequent_indent": " " * 9, "break_on_hyphens": False}
        wrapped = [textwrap.wrap(f"{name:<9}{text}", _WIDTH, **options) for name, text in facts.items()]
        commands = [f"  {command}" for command in _commands(images, preset, [*overrides, *smaller])]
        return [*chain(*wrapped), "commands", *commands]


def fit_memory(setup: Setup, plan: Plan, free_gib: float) -> tuple[Plan, list[str]]:
    """Halves the micro-batch until it fits; returns the plan, and the override if there must be one."""
    size = plan.batch_size_per_device
    needed = replace(setup, plan=plan).costs.memory_gib(world_size=1, zero_stage=0)
    if size % 2 or needed <= free_gib:
        return plan, []
    size //= 2
    halved = replace(plan, batch_size_per_device=size, accumulation=plan.effective_batch_size // size)
    plan, words = fit_memory(setup, halved, free_gib)
    return plan, words or [f"train.batch_size_per_device={size}"]
