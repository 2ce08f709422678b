"""Puts a pretraining job together: config, data, objective, engine, resume, loop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mae_vit.config import Config
from mae_vit.config_file import dump_config, load_config
from mae_vit.config_keys import describe_keys
from mae_vit.coverage import load_start
from mae_vit.encoder import SIZES
from mae_vit.errors import InputError
from mae_vit.keyed import noise_seed
from mae_vit.objectives import Objective, ObjectiveConfig
from mae_vit.plan import Plan, make_plan
from mae_vit.starts import read_start
from mae_vit.training.checkpoint import Checkpoint
from mae_vit.training.distributed import Ranks, barrier, find_device, find_ranks
from mae_vit.training.engine import Engine
from mae_vit.training.engines import be_deterministic, build_engine, connect, optimizer_options
from mae_vit.training.entry import EXIT_REQUEUE, Arguments, parse_arguments, run_to_exit_code
from mae_vit.training.estimate import Estimate, estimate, peak_flops
from mae_vit.training.files import write_atomically
from mae_vit.training.hooks import RunHooks
from mae_vit.training.loop import train
from mae_vit.training.resume import Identity, find_start, run_identity, set_aside
from mae_vit.training.run_folder import RunFolder, describe_environment
from mae_vit.training.schedule import rate_at
from mae_vit.training.signals import StopRequest
from mae_vit.training.terminal import outlive_terminal
from mae_vit.weights import EncoderInfo, encoder_bytes
from pretrain.data import Data, open_data
from pretrain.report import describe_plan

EXAMPLES = """examples:
  python pretrain/run.py --config configs/mae_digits.yaml
  deepspeed --num_accelerators 2 pretrain/run.py --config configs/mae_cifar_tiny.yaml \\
      data.path=data/mine data.augment.crop=random_resized
  python pretrain/run.py --config configs/mae_cifar_tiny.yaml --dry-run
Ctrl-C, SIGTERM or SIGUSR1 finish the step, save and exit 75; the same command goes on.
"""


class PretrainConfig(Config):
    """A pretraining run: the common sections and an objective."""

    objective: ObjectiveConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""

    def job() -> int:
        arguments = parse_arguments(
            argv,
            description="Pretrain a Vision Transformer without labels.",
            keys=describe_keys(PretrainConfig),
            examples=EXAMPLES,
        )
        return pretrain(arguments)

    return run_to_exit_code(job)


def pretrain(arguments: Arguments) -> int:
    """Checks everything, then trains; returns the exit code.

    Raises:
        InputError: before anything is written, for whatever the user can mend.
    """
    config = load_config(PretrainConfig, arguments.config, arguments.overrides)
    ranks = find_ranks()
    if config.train.engine == "torch" and ranks.world_size > 1:
        raise InputError(f'train.engine="torch" runs on one process, not {ranks.world_size}: use "deepspeed"')
    device = find_device(ranks)
    data = open_data(config, ranks, device)
    plan = make_plan(
        config,
        num_samples=data.num_samples,
        world_size=ranks.world_size,
        probe_size=sum(map(len, data.probe_split(config.monitor))),
    )
    info = describe_encoder(config, data)
    build = partial(build_objective, config, info, num_classes=data.num_classes)
    costs = estimate(
        build,
        batch_size_per_device=plan.batch_size_per_device,
        activation_checkpointing=config.train.activation_checkpointing,
        optimizer_slots=len(optimizer_options(config).slots),
    )
    folder = RunFolder(Path(config.run.dir or Path("runs") / config.run.name))
    if ranks.rank == 0:
        folder.check_writable()
    identity = run_identity(config, derived=data.identity)
    if arguments.dry_run:
        start = find_start(folder, arguments.resume, identity, warn=ranks.rank == 0)
        if ranks.rank == 0:
            print(describe_plan(config, plan, ranks, device, data, costs, folder, start))
        if start is None and config.model.init is not None:
            initialize(build(), config, info, say=ranks.rank == 0)
        return 0

    if config.run.deterministic:
        be_deterministic()
    connect(config, device)
    # Rank 0 moves an old run aside before any other looks for its checkpoints.
    if arguments.resume == "never" and ranks.rank == 0 and (moved := set_aside(folder)):
        print(f"moved the earlier run {folder.path} to {moved}")
    barrier(ranks)
    start = find_start(folder, arguments.resume, identity, warn=ranks.rank == 0)
    if start is not None and start.step >= plan.total_steps and folder.read_status() == "done":
        if ranks.rank == 0:
            print(f"{folder.path} is finished ({start.step} steps); encoder: {folder.encoder}")
        return 0
    objective = build()
    if start is None:
        initialize(objective, config, info, say=ranks.rank == 0)
    engine = build_engine(config, plan, objective, ranks, device)
    return Job(config, plan, data, info, costs, engine, folder, identity).run(start)


def describe_encoder(config: PretrainConfig, data: Data) -> EncoderInfo:
    """Resolves the geometry of the encoder.

    Raises:
        InputError: if width and heads do not fit.
    """
    model = config.model
    size = SIZES[model.name]
    embed_dim, num_heads = model.embed_dim or size.embed_dim, model.num_heads or size.num_heads
    if embed_dim % num_heads:
        raise InputError(f"model.embed_dim={embed_dim} is not divisible by model.num_heads={num_heads}")
    if model.pos_embed == "sincos" and embed_dim % 4:
        raise InputError(f'model.embed_dim={embed_dim} must be divisible by 4 for pos_embed="sincos"')
    return EncoderInfo(
        size=model.name,
        img_size=model.image_hw,
        patch_size=model.patch_size,
        in_chans=model.in_chans,
        embed_dim=embed_dim,
        depth=model.depth or size.depth,
        num_heads=num_heads,
        mlp_ratio=model.mlp_ratio,
        pos_embed=model.pos_embed,
        mean=data.mean,
        std=data.std,
        objective=config.objective.name,
        step=0,
    )


def build_objective(config: PretrainConfig, info: EncoderInfo, *, num_classes: int) -> Objective:
    """Builds encoder and objective, initialized from the run's seed.

    Raises:
        InputError: if objective and model do not fit.
    """
    grid_size = (info.img_size[0] // info.patch_size, info.img_size[1] // info.patch_size)
    try:
        config.objective.check(
            grid_size=grid_size,
            patch_size=info.patch_size,
            in_chans=info.in_chans,
            num_classes=num_classes,
        )
    except ValueError as error:
        raise InputError(f"objective.{error}") from None
    torch.manual_seed(config.run.seed)
    model = config.model
    encoder = info.build(drop_rate=model.drop_rate, drop_path_rate=model.drop_path_rate)
    return config.objective.build(encoder, mean=info.mean, std=info.std, num_classes=num_classes)


def initialize(objective: Objective, config: PretrainConfig, info: EncoderInfo, *, say: bool) -> None:
    """Loads `model.init` into a fresh objective, where one is asked for.

    Raises:
        InputError: if there is nothing to load, or if it does not fit.
    """
    if config.model.init is None:
        return
    start = read_start(config.model.init)
    coverage = load_start(start, objective.encoder, objective, objective=config.objective.name)
    if not say:
        return
    print(coverage.describe(start.source))
    if start.mean is not None and start.mean != tuple(info.mean):
        print(
            f"warning: {start.source} was trained on images normalized by mean {_rounded(start.mean)}, "
            f"this run's is {_rounded(info.mean)} (data.normalize)",
            file=sys.stderr,
        )


def noise_seed_of(config: PretrainConfig, ranks: Ranks) -> Callable[[int, int], int] | None:
    """The seed of dropout and drop-path for a step and micro-batch; None where the model has neither."""
    if not (config.model.drop_rate or config.model.drop_path_rate):
        return None
    return partial(noise_seed, config.run.seed, ranks.rank)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


@dataclass
class Job:
    """A run whose parts are all there."""

    config: PretrainConfig
    plan: Plan
    data: Data
    info: EncoderInfo
    costs: Estimate
    engine: Engine
    folder: RunFolder
    identity: Identity

    def run(self, start: Checkpoint | None) -> int:
        """Trains from `start` to the end or to a signal; returns the exit code."""
        begun = time.monotonic()
        outlive_terminal()
        start_step = start.step if start else 0
        config_yaml = dump_config(self.config)
        if self.engine.ranks.rank == 0:
            self.folder.create(config_yaml, describe_environment(sys.argv, self.engine.ranks.world_size))
        if start:
            self.engine.restore(start.state)
        monitor = self.config.monitor
        stop = StopRequest()
        hooks = RunHooks(
            self.engine,
            self.folder,
            self.plan,
            checkpoint=self.config.checkpoint,
            identity=self.identity.values,
            held_out=self.data.held_out(
                self.engine.ranks,
                images=monitor.evaluate_images,
                picture_images=monitor.picture_images,
                batch_size=self.plan.batch_size_per_device,
            ),
            probe=self.data.probe(self.engine.ranks, monitor, batch_size=self.plan.batch_size_per_device),
            stop=stop,
            start_step=start_step,
            resumed_from=start.path if start else None,
            config_yaml=config_yaml,
            tensorboard=monitor.tensorboard,
        )
        try:
            outcome = train(
                self.engine,
                self.data.batches(self.engine.ranks, self.plan, start_step),
                hooks,
                plan=self.plan,
                rate=partial(
                    rate_at,
                    schedule=self.config.optim.schedule,
                    peak=self.plan.lr,
                    warmup_steps=self.plan.warmup_steps,
                    total_steps=self.plan.total_steps,
                    min_rate=self.config.optim.min_lr,
                    decay_steps=self.plan.decay_steps,
                ),
                noise_seed=noise_seed_of(self.config, self.engine.ranks),
                start_step=start_step,
                log_every_steps=monitor.log_every_steps,
                flops_per_image=self.costs.flops_per_image,
                peak_flops=peak_flops(self.engine.device, self.config.train.precision),
            )
            if outcome.finished:
                self.export(outcome.step)
            hooks.end("done" if outcome.finished else "interrupted", outcome.step)
        except BaseException:
            hooks.end("failed", None)
            raise
        # All ranks leave together: a launcher that sees one exit would kill the
        # others in whatever they still write.
        stop.dismiss()
        barrier(self.engine.ranks)
        if self.engine.ranks.rank == 0:
            self._say_farewell(outcome.finished, outcome.step, time.monotonic() - begun)
        return 0 if outcome.finished else EXIT_REQUEUE

    def export(self, step: int) -> None:
        """Writes `encoder.safetensors`; collective."""
        with self.engine.whole():
            if self.engine.ranks.rank == 0:
                info = EncoderInfo(**{**self.info.__dict__, "step": step})
                write_atomically(self.folder.encoder, encoder_bytes(self.engine.objective.encoder, info))

    def _say_farewell(self, finished: bool, step: int, seconds: float) -> None:
        if not finished:
            print(f"stopped at step {step}/{self.plan.total_steps} after saving; the same command goes on")
            return
        print(f"done: {step} steps in {seconds:.0f} s here")
        print(f"  encoder   {self.folder.encoder}")
        if pictures := sorted(self.folder.pictures.glob("step-*.png")):
            print(f"  pictures  {pictures[-1]}")
        print(f"  metrics   {self.folder.metrics}")
        if self.config.monitor.tensorboard:
            print(f"  watch     tensorboard --logdir {self.folder.path.parent}")
