"""Which engine a run is on, and that its plan says so."""

import pytest

from mae_vit.config import schema
from mae_vit.config.load import load_config
from mae_vit.config.presets import find_config
from mae_vit.core.errors import InputError
from mae_vit.objectives.pretrain_config import PretrainConfig
from mae_vit.runtime.ranks import Ranks, find_ranks
from mae_vit.training.plan_text import describe_engine

ZERO_1 = "train.zero_stage=1"
DDP = "torch, DistributedDataParallel"
# What each launcher of one node sets; srun's MASTER_* come from slurm/common.sh.
SET = {"RANK": "0", "WORLD_SIZE": "{}", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
ENVIRONMENTS = {
    "": {},
    "deepspeed": SET | {"CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "{}"},
    "torchrun": SET | {"LOCAL_WORLD_SIZE": "{}", "TORCHELASTIC_RUN_ID": "none"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "{}", "SLURM_LOCALID": "0"}
    | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
}


def config_of(*overrides: str) -> PretrainConfig:
    return load_config(PretrainConfig, find_config("mae_digits"), overrides)


@pytest.mark.parametrize(
    ("overrides", "launcher", "world_size", "text"),
    [
        ([], "deepspeed", 1, "torch (auto: one process)"),
        ([], "deepspeed", 2, "deepspeed, ZeRO 0 (auto: the deepspeed launcher)"),
        ([], "torchrun", 2, f"{DDP} (auto: several processes of torchrun or srun)"),
        ([], "srun", 2, f"{DDP} (auto: several processes of torchrun or srun)"),
        ([ZERO_1], "", 1, "deepspeed, ZeRO 1 (auto: zero_stage=1)"),
        ([ZERO_1], "torchrun", 8, "deepspeed, ZeRO 1 (auto: zero_stage=1)"),
        (["train.engine=deepspeed"], "srun", 8, "deepspeed, ZeRO 0 (train.engine=deepspeed)"),
        (["train.engine=torch"], "deepspeed", 8, f"{DDP} (train.engine=torch)"),
    ],
)
def test_the_engine_follows_from_the_launcher(monkeypatch, overrides, launcher, world_size, text):
    for name, value in ENVIRONMENTS[launcher].items():
        monkeypatch.setenv(name, value.format(world_size))
    ranks = find_ranks()
    assert ranks.world_size == world_size
    assert describe_engine(config_of(*overrides), ranks) == text


def test_without_deepspeed_all_runs_are_on_torch(monkeypatch):
    monkeypatch.setattr(schema, "find_spec", lambda name: None)
    assert config_of().train.engine_on(Ranks(0, 4)) == "torch"
    for asked in (ZERO_1, "train.engine=deepspeed"):
        with pytest.raises(InputError, match="deepspeed"):
            config_of(asked)
