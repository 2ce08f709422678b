"""Three steps through engines on the ranks of the environment: prints what the last one sends, as JSON.

Not a test: `test_traffic.py` starts it. Its arguments are engines: "torch", or DeepSpeed by its ZeRO stage.
"""

import json
import sys
from functools import partialmethod
from unittest.mock import patch

import plain_loop  # beside this file
import torch
from device_sync import counted
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mae_vit.runtime.device import find_device
from mae_vit.runtime.process_group import give_up_after, join
from mae_vit.runtime.ranks import Ranks, find_ranks

# Around a ring an all-reduce goes twice, as a reduction and as a gathering.
ROUNDS = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "broadcast_": 1, "barrier": 0}


class Traffic(TorchDispatchMode):
    """Adds up what collectives carry around a ring, in bytes; a collective of an unknown name raises.

    Attributes:
        early: bytes that are sent before the last product of matrices, which the backward pass computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.early = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            # Of what is gathered or scattered, the whole: the larger of output and input.
            whole = max(
                sum(t.nbytes for t in tree_leaves(part) if isinstance(t, torch.Tensor)) for part in args[:2]
            )
            self.bytes += ROUNDS[func.overloadpacket.__name__] * whole
        elif func.overloadpacket.__name__ == "mm":
            self.early = self.bytes
        return func(*args, **(kwargs or {}))


def graphs_of(name: str, ranks: Ranks) -> int:
    """The number of graphs that torch.compile makes: gradients of one are sent while the next one runs backward."""
    graphs = []

    def backend(*graph, **kwargs):
        graphs.append(graph)
        return aot_eager(*graph, **kwargs)

    torch.compiler.reset()
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        engine = plain_loop.build_engine(name, plain_loop.CASE | {"compile": True}, ranks)
        engine.forward(plain_loop.batch_of(0, stop=plain_loop.BATCH // ranks.world_size))
    return len(graphs)


def main() -> None:
    ranks, results = find_ranks(), {}
    join(ranks, find_device(ranks), timeout=give_up_after(None))
    # DistributedDataParallel's first bucket; the whole small network would fit the usual one.
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 100_000
    share = plain_loop.BATCH // ranks.world_size
    for name in sys.argv[1:]:
        engine = plain_loop.build_engine(name, plain_loop.CASE | {"precision": "bf16"}, ranks)
        parameters = list(engine.trainable.values())
        numbers = sum(getattr(p, "ds_numel", p.numel()) for p in parameters)
        for step in range(3):
            with Traffic() as traffic, counted() as waits:
                batch = plain_loop.batch_of(step, ranks.rank * share, (ranks.rank + 1) * share)
                loss = engine.forward(batch).loss
                whole = sum(p.numel() for p in parameters) / numbers
                engine.backward(loss)
                engine.step(1e-3)
        results[name] = {
            "bytes": traffic.bytes / numbers,
            "early": traffic.early / numbers,
            "waits": waits,
            "tensors": len(parameters),
            "whole_after_forward": whole,
            "graphs": graphs_of(name, ranks) if name in ("0", "torch") else None,
        }
    if ranks.rank == 0:
        print("RESULT", json.dumps(results))


if __name__ == "__main__":
    main()
