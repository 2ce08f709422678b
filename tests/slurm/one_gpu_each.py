"""A rank of a job that shows each task one GPU, its own: prints what it takes for its device.

Of torch.cuda and NCCL what a rank asks is pretended; launcher, ranks and their process group are real.
"""

import os
from types import SimpleNamespace

import torch

from mae_vit.runtime.device import find_device
from mae_vit.runtime.process_group import give_up_after, join
from mae_vit.runtime.ranks import barrier, find_ranks, sum_over_ranks
from mae_vit.runtime.signals import is_local_rank_zero
from mae_vit.training.engines import deepspeed_engine

taken, bound = [], []
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = taken.append
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=os.environ["SLURM_PROCID"])
init_process_group = torch.distributed.init_process_group


def by_cpu(backend: str, *, device_id: torch.device, **options: object) -> None:
    """Makes the group that NCCL would."""
    bound.append((backend, str(device_id)))
    init_process_group("gloo", **options)


torch.distributed.init_process_group = by_cpu
ranks = find_ranks()
device = find_device(ranks)
join(ranks, device, timeout=give_up_after(60.0))
deepspeed_engine._use_process_group(device)
met = int(sum_over_ranks(torch.ones(1), ranks))
facts = {
    "rank": ranks.rank,
    "local": os.environ["SLURM_LOCALID"],
    "device": str(device),
    "taken": taken,
    "bound": bound,
    "deepspeed": os.environ["LOCAL_RANK"],
    "first": is_local_rank_zero(),
    "met": met,
}
# In one piece: lines of several ranks would mix.
os.write(1, f"facts {facts}\n".encode())
barrier(ranks)
