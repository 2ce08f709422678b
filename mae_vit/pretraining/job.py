"""Runs a pretraining job: config, data, objective, engine, resume, loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mae_vit.config.command_line import Arguments
from mae_vit.config.load import load_config
from mae_vit.config.plan import Plan
from mae_vit.core.batch import Batch
from mae_vit.core.files import write_atomically
from mae_vit.data.batches.prefetch import fetch_split
from mae_vit.data.order.order import Skipped
from mae_vit.models.encoder_file import EncoderInfo, encoder_bytes
from mae_vit.objectives.objective import Objective
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.pretraining.data import Data
from mae_vit.pretraining.plan_text import describe_plan
from mae_vit.pretraining.setup import Setup, initialize, seen_labels, set_up
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.training.checkpoints.checkpoint import COST_BEFORE, LABELS_SEEN
from mae_vit.training.engines.base import Engine
from mae_vit.training.engines.build import build_engine
from mae_vit.training.engines.state import BestWeights
from mae_vit.training.evals import HeldOut, OnlineProbe, Views
from mae_vit.training.outputs.plan_text import print_notes
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.run import run
from mae_vit.training.startup import (
    agree_on_precision,
    as_array_task,
    is_finished,
    note_of_run_around,
    open_run_folder,
    resume_or_start,
    run_identity,
    settle_precision,
)
from mae_vit.training.trainer import RunSetup

_NOTHING_HELD_OUT = (
    "{why}: no held-out metrics and no pictures (mae-vit prepare ... --holdout 0.05 sets some images aside)"
)


def check(arguments: Arguments) -> int:
    """Checks everything and prints the plan; returns the exit code.

    Raises:
        InputError: for every error that the user can fix.
    """
    # Has imports that only checks need.
    from mae_vit.pretraining.doctor import check_all

    config, ranks = read_config(arguments)
    return check_all(config, ranks, resume=arguments.resume, extend=arguments.extend)


def read_config(arguments: Arguments) -> tuple[PretrainConfig, Ranks]:
    """Reads the config and finds this process's rank; rank 0 prints notes; raises InputError for bad input."""
    assert arguments.config is not None
    notes, given = list[str](), (arguments.config, arguments.overrides)
    config = load_config(PretrainConfig, *given, overrides_from=arguments.overrides_from, notes=notes)
    config, ranks = as_array_task(config), find_ranks()
    if ranks.rank == 0:
        print_notes([*notes, *note_of_run_around(arguments, config)])
    return config, ranks


def pretrain(arguments: Arguments) -> Path:
    """Checks everything, then trains; returns the run folder of the finished run.

    Raises:
        InputError: before anything is written, for every error that the user can fix.
        TrainingFailed: if the run cannot continue.
        RunInterrupted: if it was stopped, after saving.
    """
    config, ranks = read_config(arguments)
    setup = set_up(config, ranks)
    if ranks.rank == 0:
        print_notes(setup.plan.notes)
    with open_run_folder(config) as folder:
        _train(setup, arguments, folder)
    return folder.path


def _train(setup: Setup, arguments: Arguments, folder: RunFolder) -> None:
    config, ranks = setup.config, setup.ranks
    identity = run_identity(config, derived=setup.data.identity)
    fetch_split(setup.data.index, setup.data.source, setup.data.order, say=ranks.local_rank == 0)
    checkpoint = resume_or_start(config, arguments, folder, identity, ranks, setup.device)
    if checkpoint is not None and is_finished(folder, checkpoint, setup.plan, ranks):
        if ranks.rank == 0:
            print(f"{folder.path} is finished ({checkpoint.step} steps); encoder: {folder.encoder}")
        return
    chosen = agree_on_precision(config.train.precision, setup.device, ranks)
    config, identity, chosen = settle_precision(config, identity, checkpoint, chosen, setup.device)
    setup = replace(setup, config=config)
    if ranks.rank == 0:
        print(f"precision: {chosen}")
    objective = setup.build()
    # Initial weights may have seen labels.
    begins_from, before = config.model.init or "scratch", dict[str, Any]()
    if checkpoint is None:
        weights = initialize(objective, config, setup.info, say=ranks.rank == 0)
        if weights is not None:
            from mae_vit.weights.encoder import cost_of  # slow import that few runs need

            begins_from, before = weights.source, asdict(cost_of(weights))
        labels = seen_labels(config, setup.data, weights.labels if weights else None)
        seen = labels.model_dump() if labels else None
    else:
        before = checkpoint.identity.get(COST_BEFORE) or before
        seen = checkpoint.identity.get(LABELS_SEEN, setup.info.labels)
    info = replace(setup.info, labels=seen, before=before or None)
    history = {LABELS_SEEN: info.labels} | ({COST_BEFORE: info.before} if info.before else {})
    engine = build_engine(config, setup.plan, objective, ranks, setup.device)
    noisy = any(config.model.drops.values())
    run_setup = RunSetup(
        config,
        setup.plan,
        engine,
        folder,
        identity.with_history(**history),
        setup.costs,
        noisy,
        begins_from=begins_from,
        advice=_NOTHING_HELD_OUT.format(why=setup.data.why_none),
        plan_text=describe_plan(setup, folder, checkpoint, chosen, timed=False) if ranks.rank == 0 else "",
    )
    job = Job(config, setup.plan, setup.data, info, engine, folder, setup.costs.flops_per_image)
    run(run_setup, job, checkpoint)


@dataclass(frozen=True)
class Job:
    """The pretraining part of a run."""

    config: PretrainConfig
    plan: Plan
    data: Data
    info: EncoderInfo
    engine: Engine
    folder: RunFolder
    flops_per_image: float

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        return self.data.batches(self.engine.ranks, self.plan, start_step, skipped)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Describes the samples of a data step."""
        return self.data.samples_of(data_step)

    def held_out(self) -> HeldOut | None:
        """Loads the fixed held-out images."""
        monitor = self.config.monitor
        return self.data.held_out(
            self.engine.ranks,
            images=monitor.evaluate_images,
            picture_images=monitor.picture_images,
            batch_size=self.plan.batch_size_per_device,
        )

    def probe(self) -> OnlineProbe | None:
        """Loads the online probe."""
        return self.data.probe(self.engine.ranks, batch_size=self.plan.batch_size_per_device)

    def views(self) -> Views | None:
        """Returns the function that draws views of the encoder."""
        if self.config.monitor.inspect_every_epochs is None:
            return None
        # Imports matplotlib.
        from mae_vit.inspection.views import draw_views

        return partial(draw_views, picture_bands=self.config.monitor.picture_bands)

    def finish(self, step: int, best: BestWeights | None) -> tuple[dict[str, Any], Callable[[], None]]:
        """Returns the numbers of the probe's images, and a function that writes `encoder.safetensors`; collective."""
        content = b""
        with self.engine.full_weights():
            if self.engine.ranks.rank == 0:
                images = step * self.plan.effective_batch_size
                info = replace(self.info, step=step, images_seen=images, flops=images * self.flops_per_image)
                objective = self.engine.objective
                assert isinstance(objective, Objective)
                content = encoder_bytes(objective.encoder, info)
        results = {}
        probe, index = self.data.probe_split, self.data.held_out_index
        if index is not None and not probe.why_none:
            sizes = {"images": len(probe.queries), "fitted_on": len(probe.support)}
            results = {"probed": {**sizes, "classes": len(index.dataset.classes)}}
        return results, partial(write_atomically, self.folder.encoder, content)

    def results(self) -> list[str]:
        """Returns the line that names the encoder."""
        return [f"  encoder   {self.folder.encoder}"]
