"""Startup of a run: device, folder, ranks, precision, and the checkpoint that it resumes from.

Precedence: the run's own checkpoints, then an explicit checkpoint, then scratch.
"""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal, TypeVar

import torch

from mae_vit.config.command_line import Arguments
from mae_vit.config.plan import Plan
from mae_vit.config.plugins import plugin_digests
from mae_vit.config.schema import Config
from mae_vit.core.batch import Batch
from mae_vit.core.errors import InputError
from mae_vit.data.batches.prefetch import fetch_split
from mae_vit.data.order.order import Skipped
from mae_vit.data.training_data import TrainingData
from mae_vit.models.sizes import SIZES
from mae_vit.runtime.device import find_device
from mae_vit.runtime.ranks import Ranks, broadcast_from_rank_zero, gather_objects, run_on_rank_zero
from mae_vit.runtime.slurm import is_requeued_run
from mae_vit.training.checkpoints.checkpoint import (
    HISTORY,
    STATE,
    BrokenCheckpoint,
    CheckpointInfo,
    list_checkpoints,
    newest_checkpoint,
    verify_checkpoint,
)
from mae_vit.training.engines.build import enable_determinism, init_process_group
from mae_vit.training.engines.precision import Chosen, Precision, choose_precision, fixed
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.outputs.trackers import check_installed, flatten

# These sections and options may change when a run resumes. A change to any other is an error that names it.
_FREE_SECTIONS = ("monitor", "checkpoint", "guard")
FREE_KEYS = (
    "run.name",
    "run.dir",
    "run.device",
    "run.hang_timeout_s",
    "run.plugins_may_change",
    # The data may move: its fingerprint is compared instead.
    "data.path",
    "data.cache_dir",
    "data.cache_gib",
    # Pretrained weights may move: their digest is compared instead.
    "finetune.start",
    "data.workers",
    "data.source",
    "data.memory_limit_gib",
    "data.damage_budget",
    "train.batch_size_per_device",
    "train.zero_stage",
    "train.engine",
    "train.compile",
    # It recomputes the same numbers.
    "train.activation_checkpointing",
)
PRECISION = "train.precision"
_PLUGINS = "run.plugins"
_LENGTH_KEYS = ("train.steps", "train.epochs", "train.samples")


@dataclass(frozen=True)
class Identity:
    """The options and derived values that must not change when a run resumes.

    Attributes:
        values: options and derived values by dotted key, as plain data.
        new: keys that an older checkpoint may lack: options at their defaults, and derived values.
            Without them a new option would prevent old runs from resuming.
        ignored: keys that may differ because the config allows it.
    """

    values: dict[str, Any]
    new: frozenset[str]
    ignored: frozenset[str] = frozenset()

    def with_history(self, **facts: Any) -> Identity:
        """Adds the history of the weights (keys of `HISTORY`), which is not compared.

        The run reads it when it resumes, and so do runs that start from this run's weights.
        """
        return replace(self, values={**self.values, **facts})

    def differing_keys(self, saved: Mapping[str, Any], *, extend: bool = False) -> list[str]:
        """Returns the keys that differ from a saved identity; `extend` allows another length."""
        now = self.values
        return [
            key
            for key in {**saved, **now}
            if key not in (*HISTORY, *self.ignored)
            and saved.get(key) != now.get(key)
            and (key in saved or key not in self.new)
            and not (extend and key in _LENGTH_KEYS)
            # A resumed run keeps the precision that "auto" chose at its start.
            and not (key == PRECISION and now.get(key) == "auto")
        ]

    def describe_differences(self, saved: Mapping[str, Any], *, extend: bool = False) -> str:
        """Names up to four keys that differ from a saved identity, with both values; empty if none does."""
        differing = self.differing_keys(saved, extend=extend)[:4]
        return "; ".join(self._describe(saved, key) for key in differing)

    def _describe(self, saved: Mapping[str, Any], key: str) -> str:
        was, now = saved.get(key), self.values.get(key)
        if key == _PLUGINS:  # digests by name
            old, new = was or {}, now or {}
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            return f"{key}: {', '.join(names)} changed, which run.plugins_may_change=true allows"
        shown = ("unset" if value is None else repr(value) for value in (was, now))
        return "{} was {}, now {}".format(key, *shown)


def run_identity(config: Config, *, derived: Mapping[str, Any]) -> Identity:
    """Flattens a resolved config, without the options that may change.

    `derived` holds values that follow from the data, such as its fingerprint and normalization.
    """
    dumped = config.model_dump(mode="json")
    compared = {section: options for section, options in dumped.items() if section not in _FREE_SECTIONS}
    values = {key: value for key, value in flatten(compared).items() if key not in FREE_KEYS}
    values[_PLUGINS] = plugin_digests(config.run.plugins)
    new = {key for key in values if _at_default(config, dumped, key)}
    ignored = frozenset({_PLUGINS} if config.run.plugins_may_change else ())
    return Identity({**values, **derived}, frozenset({*new, *derived}), ignored)


def _at_default(config: Config, dumped: dict[str, Any], key: str) -> bool:
    """Returns whether the config stays the same without this key.

    It validates the config again, because some defaults depend on other options (betas on the optimizer).
    """
    without = copy.deepcopy(dumped)
    *path, name = key.split(".")
    section = without
    for part in path:
        section = section[part]
    del section[name]
    try:
        return type(config).model_validate(without) == config
    except ValueError:
        return False  # the key is required, alone or as one of a group


def check_identity(
    saved: Mapping[str, Any], identity: Identity, place: Path, *, extend: bool = False
) -> None:
    """Raises InputError, with up to four keys, if the identity differs from that in a checkpoint or run folder."""
    if differing := identity.differing_keys(saved, extend=extend):
        longer = ", --extend allows another length" if set(differing) <= set(_LENGTH_KEYS) else ""
        raise InputError(
            f"{place} belongs to another run: {identity.describe_differences(saved, extend=extend)}. "
            f"Take those back{longer}, or give this run another run.name, or begin again with `--resume never`, "
            "which moves the old run aside"
        )


def _find_checkpoint(
    folder: RunFolder, arguments: Arguments, identity: Identity, *, warn: bool = True
) -> CheckpointInfo | None:
    """Returns the checkpoint that the run resumes from; None for a fresh start. Raises InputError."""
    resume, extend = arguments.resume, arguments.extend
    if resume == "never":
        return None
    checkpoint = newest_checkpoint(folder.checkpoints, warn=warn)
    # The run's own checkpoint of step 0 holds no training, so an explicit checkpoint takes precedence.
    untrained = checkpoint is None or checkpoint.step == 0
    if untrained and isinstance(resume, Path):
        checkpoint, untrained = _find_explicit(resume, warn=warn), False
    if checkpoint is None or (untrained and identity.differing_keys(checkpoint.identity, extend=extend)):
        return None  # start again, with the new config
    check_identity(checkpoint.identity, identity, checkpoint.path, extend=extend)
    return checkpoint


def _find_explicit(path: Path, *, warn: bool) -> CheckpointInfo:
    """Returns the checkpoint at `path`, or the newest intact one if it is a run folder; else raises InputError."""
    if (path / STATE).exists():
        try:
            return verify_checkpoint(path)
        except BrokenCheckpoint as error:
            raise InputError(f"--resume {error}") from None
    for folder in (path / "checkpoints", path):
        if newest := newest_checkpoint(folder, warn=warn):
            return newest
    what = "is no folder" if not path.is_dir() else "holds no checkpoint (step-NNNNNNNN with state.json)"
    raise InputError(f"--resume {path}: {what}")


def _set_aside(folder: RunFolder) -> None:
    """Moves an existing run folder to NAME.1, NAME.2, ..."""
    if not folder.path.exists():
        return
    number = 1
    while (moved := folder.path.with_name(f"{folder.path.name}.{number}")).exists():
        number += 1
    folder.path.rename(moved)
    print(f"moved the earlier run {folder.path} to {moved}")
    folder.unlock()


C = TypeVar("C", bound=Config)
S = TypeVar("S", bound="Setup")
# From this size on, training on a CPU core takes years.
_LARGE = SIZES["Ti"]


@dataclass(frozen=True)
class Setup:
    """A config, resolved for these ranks. Pretraining and fine-tuning add their parts.

    Attributes:
        config: resolved config of the run.
        ranks: this process's rank and the world size.
        device: device of this rank.
        data: images of the run.
        plan: numbers of the training steps; None for a mode that trains nothing.
    """

    config: Config
    ranks: Ranks
    device: torch.device
    data: TrainingData
    plan: Plan | None

    @property
    def derived(self) -> dict[str, Any]:
        """Values outside the config that must not change when the run resumes."""
        return self.data.identity

    @property
    def identity(self) -> Identity:
        """What must not change when the run resumes."""
        return run_identity(self.config, derived=self.derived)

    def batches(self, start_step: int, skipped: Skipped) -> Iterator[Batch]:
        """Yields this rank's micro-batches from `start_step` to the end of the run."""
        assert self.plan is not None
        return self.data.batches(self.ranks, self.plan, start_step, skipped)

    def samples_of(self, data_step: int) -> list[dict[str, Any]]:
        """Describes the samples of a data step over all ranks."""
        return self.data.samples_of(data_step)


def begin(
    setup: S, arguments: Arguments, folder: RunFolder
) -> tuple[S, Chosen, CheckpointInfo | None] | None:
    """Joins the ranks of a run that trains, and finds the checkpoint to resume from; collective.

    Returns:
        The setup with the run's precision, this precision, and the checkpoint, None for a fresh start. The result is
        None if the run is finished.

    Raises:
        InputError: if the run cannot resume, or if the checkpoint has another identity.
    """
    data, plan, ranks = setup.data, setup.plan, setup.ranks
    assert plan is not None
    fetch_split(data.index, data.source, data.order, say=ranks.local_rank == 0)
    checkpoint = resume_or_start(setup, arguments, folder)
    _check_length(folder, checkpoint, plan)
    all_steps = checkpoint is not None and checkpoint.step == plan.total_steps
    if all_steps and broadcast_from_rank_zero(folder.read_status(), ranks) == "done":
        return None
    return *settle(setup, checkpoint), checkpoint


def settle(setup: S, checkpoint: CheckpointInfo | None) -> tuple[S, Chosen]:
    """Resolves `train.precision` in the setup; returns it and the precision; collective."""
    chosen = agree_on_precision(setup.config.train.precision, setup.device, setup.ranks)
    setup, chosen = settle_precision(setup, checkpoint, chosen)
    if setup.ranks.rank == 0:
        print(f"precision: {chosen}")
    return setup, chosen


def choose_device(config: Config, ranks: Ranks) -> torch.device:
    """Returns the rank's device; raises InputError for too few GPUs, or a large model in a Slurm job without any."""
    device = find_device(ranks, config.run.device)
    size = getattr(config.model, "size", None)
    large = size is not None and size.embed_dim >= _LARGE.embed_dim and size.depth >= _LARGE.depth
    # sbatch without options gives one CPU core.
    if large and device.type == "cpu" and config.run.device == "auto" and "SLURM_JOB_ID" in os.environ:
        raise InputError(
            f"this Slurm job has no GPU for model.name={config.model.name}: sbatch --gpus-per-node=1 "
            "--cpus-per-task=12 ... asks for one; run.device=cpu trains on CPUs"
        )
    return device


def as_array_task(config: C) -> C:
    """Gives each task of a Slurm array its own seed, name and folder (slurm/pretrain.sh, finetune.sh)."""
    task = os.environ.get("MAE_VIT_ARRAY_TASK")
    if not task:
        return config
    run = config.run
    values = {"seed": run.seed + int(task), "name": f"{run.name}-{task}"}
    if run.dir is not None:
        values["dir"] = f"{run.dir}-{task}"
    return config.model_copy(update={"run": run.model_copy(update=values)})


def open_run_folder(config: Config) -> RunFolder:
    """Returns the run's folder; raises InputError if it cannot be written or a tracker is not installed."""
    check_installed(config.monitor.trackers)
    folder = RunFolder.from_config(config)
    folder.check_writable()
    return folder


def note_of_run_around(arguments: Arguments, config: Config) -> list[str]:
    """Says how to resume a moved run: its config lies in a run folder that differs from this job's."""
    named = {override.partition("=")[0] for override in arguments.overrides} & {"run.name", "run.dir"}
    folder = RunFolder.from_config(config).path
    if named or not isinstance(arguments.config, Path):
        return []
    run = arguments.config.parent
    if not list_checkpoints(run / "checkpoints") or run.resolve() == folder.resolve():
        return []
    return [
        f"this run's folder is {folder}; {quote(f'run.dir={run}')} resumes the run around {arguments.config}"
    ]


def resume_or_start(
    setup: Setup, arguments: Arguments, folder: RunFolder, *, saves: bool = True
) -> CheckpointInfo | None:
    """Joins the ranks and returns the checkpoint to resume from, None for a fresh start; or raises InputError."""
    ranks, identity = setup.ranks, setup.identity
    if setup.config.run.deterministic:
        enable_determinism()
    init_process_group(setup.config, setup.device, ranks)
    _check_ranks_agree(identity, ranks)
    # Lock before any rank looks for checkpoints: another process may still write one.
    run_on_rank_zero(lambda: folder.lock() if folder.path.exists() else None, ranks)

    def choose() -> CheckpointInfo | None:
        asked = arguments
        if asked.resume == "never" and is_requeued_run(folder.path):
            asked = replace(asked, resume="auto")
        if asked.resume == "never":
            _set_aside(folder)
        checkpoint = _find_checkpoint(folder, asked, identity)
        if saves and checkpoint is None:
            check_resumable(folder, extend=arguments.extend)
        return checkpoint

    return run_on_rank_zero(choose, ranks)


def agree_on_precision(asked: Precision | Literal["auto"], device: torch.device, ranks: Ranks) -> Chosen:
    """Resolves `train.precision`; "auto" is fp32 on all ranks if it is fp32 on any; collective."""
    by_rank: list[Chosen] = gather_objects(choose_precision(asked, device), ranks)
    return next((chosen for chosen in by_rank if chosen.precision == "fp32"), by_rank[0])


def settle_precision(setup: S, checkpoint: CheckpointInfo | None, chosen: Chosen) -> tuple[S, Chosen]:
    """Replaces "auto" in the config by `chosen`, or by the checkpoint's precision; returns the choice too."""
    config = setup.config
    if checkpoint is not None and config.train.precision == "auto":
        chosen = fixed(checkpoint.identity[PRECISION], "auto: the run began so", setup.device)
    train = config.train.model_copy(update={"precision": chosen.precision})
    return replace(setup, config=config.model_copy(update={"train": train})), chosen


def check_resumable(folder: RunFolder, *, extend: bool) -> None:
    """Raises InputError for a run without checkpoints that is finished or is to be extended."""
    if folder.read_status() == "done":
        raise InputError(
            f"{folder.path} holds a finished run that left no checkpoints to resume from: give this one another "
            "run.name, or begin again with `--resume never`, which moves that aside"
        )
    if extend:
        raise InputError(
            f"--extend: {folder.path} has no checkpoint to resume from: give the folder of the run as run.dir=FOLDER"
        )


def foresee_start(setup: Setup, arguments: Arguments, folder: RunFolder) -> tuple[CheckpointInfo | None, str]:
    """Finds where a run would begin, without changing its folder: the checkpoint, and a problem (empty if none).

    A dry run trains nothing, so a folder that belongs to another run is a problem, not raised. Raises InputError if an
    explicit checkpoint does not match.
    """
    assert setup.plan is not None
    try:
        checkpoint = _find_checkpoint(folder, arguments, setup.identity, warn=setup.ranks.rank == 0)
        _check_length(folder, checkpoint, setup.plan)
        if checkpoint is None and arguments.resume != "never":
            check_resumable(folder, extend=arguments.extend)
    except InputError as error:
        if isinstance(arguments.resume, Path) and not list_checkpoints(folder.checkpoints):
            raise
        return None, str(error)
    return checkpoint, ""


def describe_start(folder: RunFolder, checkpoint: CheckpointInfo | None, plan: Plan, weights: str) -> str:
    """Describes where a run begins, for its plan; `weights` describes the initial weights."""
    if checkpoint is None:
        return f"from {weights}"
    if checkpoint.step == plan.total_steps and folder.read_status() == "done":
        return f"is finished (step {checkpoint.step}): nothing is left to train"
    return f"resumes from {checkpoint.path} (step {checkpoint.step})"


def _check_ranks_agree(identity: Identity, ranks: Ranks) -> None:
    """Raises InputError on all ranks if one has other inputs, such as another copy of the data; collective."""
    by_rank = gather_objects((socket.gethostname(), identity.values), ranks)
    host, on_rank_0 = by_rank[0]
    for rank, (other_host, other) in enumerate(by_rank):
        for key in on_rank_0.keys() | other.keys():
            if on_rank_0.get(key) != other.get(key):
                raise InputError(
                    f"ranks are about to do different things: {key} is {on_rank_0.get(key)} on rank 0 ({host}), "
                    f"{other.get(key)} on rank {rank} ({other_host})"
                )


def _check_length(folder: RunFolder, checkpoint: CheckpointInfo | None, plan: Plan) -> None:
    """Raises InputError if a resumed run has done more steps than configured."""
    if checkpoint is not None and checkpoint.step > plan.total_steps:
        raise InputError(
            f"{folder.path} is at step {checkpoint.step}, beyond the {plan.total_steps} that it is to have: "
            "a run is only extended to a greater length"
        )
