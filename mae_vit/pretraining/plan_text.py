"""Formats the plan of a run, which `--dry-run` prints."""

from __future__ import annotations

from mae_vit.config.plan import Plan
from mae_vit.core.messages import count_of
from mae_vit.data.data_path import describe_place
from mae_vit.data.order.order import RankSlice
from mae_vit.pretraining.data import Data
from mae_vit.pretraining.setup import Setup
from mae_vit.runtime.ranks import Ranks
from mae_vit.training.checkpoints.checkpoint import CheckpointInfo
from mae_vit.training.engines.precision import Chosen
from mae_vit.training.outputs.run_folder import RunFolder
from mae_vit.training.plan_text import describe_augment, describe_time, describe_training, plan_lines, times
from mae_vit.training.startup import describe_start
from mae_vit.training.step_time import time_steps


def describe_plan(
    setup: Setup,
    folder: RunFolder,
    checkpoint: CheckpointInfo | None,
    precision: Chosen,
    *,
    timed: bool = True,
) -> str:
    """Returns the resolved plan, one fact per line; `timed` takes some steps to estimate the run's time."""
    config, plan, ranks, data, costs = setup.config, setup.plan, setup.ranks, setup.data, setup.costs
    model, geometry = config.model, setup.info.geometry
    height, width = model.image_hw
    rows, columns = geometry.grid_size
    tokens = (
        f"{rows * columns} tokens + [CLS]"
        if model.has_class_token
        else f"{rows * columns} are masked or seen"
    )
    place = describe_place(config.data.path, data.index.folder)
    source = "memory" if data.source.in_memory else "tar"
    begin = describe_start(folder, checkpoint, plan, config.model.init or "scratch")
    held_out = (
        f'split "{data.held_out_index.split}", {min(config.monitor.evaluate_images, len(data.held_out_index)):,} '
        f"of {len(data.held_out_index):,} images, {times(plan.evaluate_every_steps, plan)}"
        if data.held_out_index
        else f"none: {data.why_none}"
    )
    done = checkpoint.step if checkpoint else 0
    time = describe_time(plan, ranks, time_steps(setup, precision.precision), done=done) if timed else ""
    facts = {
        "run": f"{folder.shown()}, {begin}, seed {config.run.seed}",
        "model": f"{model.name}, {height}x{width} px, patch {geometry.patch_size}: {tokens}",
        "parameters": f"{costs.encoder_parameters:,} encoder, {costs.parameters:,} with the objective",
        "compute": costs.describe_compute(plan.total_steps * plan.effective_batch_size),
        "data": f'{place}, split "{config.data.split}": {count_of(plan.num_samples, "image")} '
        f"in {count_of(len(data.index.split_info.shards), 'shard')}, source {source}",
        "cores": data.describe_cores(ranks),
        "order": describe_order(data, ranks),
        "views": describe_augment(config, data.place),
        "held-out": held_out,
        "probe": describe_probe(data, plan),
        **describe_training(setup, folder.path, precision, time),
    }
    return plan_lines(facts, plan.notes, [*data.core_warnings(), *order_warnings(data)])


def describe_probe(data: Data, plan: Plan) -> str:
    """Describes the images and the interval of the online probe, or why there is none."""
    probe, index = data.probe_split, data.held_out_index
    if index is None or probe.why_none:
        return f"none: {probe.why_none}"
    fitted, scored = (data.index, "image") if probe.of_training else (index, "other")
    return (
        f"fitted on {count_of(len(probe.support), 'image')} (up to {probe.shots} of each of "
        f'{count_of(len(index.dataset.classes), "class", "classes")}) of split "{fitted.split}", scored on '
        f'{count_of(len(probe.queries), scored)} of split "{index.split}", {times(plan.probe_every_steps, plan)}'
    )


def describe_order(data: Data, ranks: Ranks) -> str:
    """Describes which shards a rank reads."""
    order, shards = data.order.blocks, len(data.index.split_info.shards)
    if order is None:
        return f"global: each rank reads {'all ' if shards > 1 else ''}{count_of(shards, 'shard')}"
    most = max(
        len(order.shards_of(RankSlice(rank, ranks.world_size), epoch=0)) for rank in range(ranks.world_size)
    )
    each = order.lanes / ranks.world_size
    return (
        f"blocks: {shards} shards in {order.num_blocks} blocks of {order.block_shards}, cut into {order.lanes} lanes; "
        f"each of {ranks.world_size} ranks reads {f'{each:g}' if each >= 1 else f'1/{1 / each:g}'} lanes, "
        f"at most {most} shards an epoch"
    )


def order_warnings(data: Data) -> list[str]:
    """Returns warnings about valid options that defeat the purpose of the block order."""
    order, shards = data.order.blocks, len(data.index.split_info.shards)
    if order is None or order.num_blocks >= order.lanes:
        return []
    instead = (
        f"data.block_shards={shards // order.lanes}"
        if shards >= order.lanes
        else f"data.block_shards=1 and at most data.lanes={shards}"
    )
    return [
        f"too few shards for data.lanes={order.lanes} x data.block_shards={order.block_shards}: {shards}, so ranks "
        f"read the same shards; prepare at least {order.lanes * order.block_shards} (--shard-samples), or set "
        f"{instead}"
    ]
