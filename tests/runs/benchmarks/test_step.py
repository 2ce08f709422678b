"""Steps are compared with each library at its fastest, and a contender that cannot run is named."""

import pytest
from helpers.commands import run

from benchmarks.harness.workloads import TINY, load
from benchmarks.step import OURS, PEERS, choose, compare
from mae_vit.core.errors import InputError


def test_each_library_is_taken_at_its_fastest():
    workload = load(TINY, [], batch_size=8, precision="fp32", threads=1)
    times = {
        "ours": [10.0, 10.0, 20.0],
        "ours compiled": [5.0, 5.0, 5.0],
        "transformers eager": [11.0, 11.0, 11.0],
        "transformers sdpa": [12.0, 12.0, 12.0],
        "transformers sdpa compiled": [10.0, 10.0, 10.0],
        "transformers eager default memory": [13.0, 13.0, 20.0],
        "official eager": [16.0, 16.0, 16.0],
        "official sdpa": [15.0, 15.0, 15.0],
    }
    speedup = compare(times, workload, None)["speedup"]
    assert speedup["transformers"]["eager"] == {
        "peer": "transformers eager",
        "median": 1.1,
        "range": [0.55, 1.1],
    }
    assert speedup["transformers"]["ours_compiled"]["median"] == 2.2
    assert speedup["transformers"]["both_compiled"]["median"] == 2.0
    assert speedup["transformers"]["default_memory"]["range"] == [1.0, 1.3]
    assert speedup["official"]["eager"] == {"peer": "official sdpa", "median": 1.5, "range": [0.75, 1.5]}
    # None of its compiled ones took part, nor one with the default memory.
    assert not {"both_compiled", "default_memory"} & set(speedup["official"])


def test_the_official_code_needs_its_clone(tmp_path):
    assert choose(None, "mae", None) == [*OURS, *(name for name in PEERS if "official" not in name)]
    with pytest.raises(InputError, match='"official sdpa": needs --official DIR'):
        choose(["official sdpa"], "mae", None)
    with pytest.raises(InputError, match=r"no models_mae.py there; clone github.com/facebookresearch/mae"):
        choose(None, "mae", tmp_path)
    (tmp_path / "models_mae.py").touch()
    assert choose(None, "mae", tmp_path) == [*OURS, *PEERS]
    assert choose(None, "masked_patch", None) == list(OURS)
    with pytest.raises(InputError, match="--official has no effect: the official code has no masked_patch"):
        choose(None, "masked_patch", tmp_path)
    # A GPU has no memory of glibc's.
    on_gpu = [*OURS, *(name for name in PEERS if not name.endswith(" memory"))]
    assert choose(None, "mae", tmp_path, device="cuda") == on_gpu
    with pytest.raises(InputError, match='no contender "theirs" for mae: ours, ours compiled'):
        choose(["theirs"], "mae", None)


_AS_PUBLISHED = """
import numpy as np
import torch
from timm.models.vision_transformer import Block

class MaskedAutoencoderViT(torch.nn.Module):
    def __init__(self, img_size, patch_size, in_chans, embed_dim, depth, num_heads, mlp_ratio, norm_layer, **decoder):
        super().__init__()
        assert set(decoder) == {"decoder_embed_dim", "decoder_depth", "decoder_num_heads", "norm_pix_loss"}
        width = np.zeros(embed_dim, dtype=np.float).shape[0]
        self.blocks = torch.nn.Sequential(*(
            Block(width, num_heads, mlp_ratio, qkv_bias=True, qk_scale=None, norm_layer=norm_layer)
            for _ in range(depth)
        ))

    def forward(self, images, mask_ratio):
        assert mask_ratio == 0.75
        tokens = images.flatten(2).mean(2, keepdim=True).expand(-1, -1, self.blocks[0].norm1.weight.numel())
        return self.blocks(tokens).square().mean(), None, None
"""
_TAKES_A_STEP = """
import sys
from pathlib import Path
import torch
from benchmarks.harness.step_peers import official_model, their_step
from benchmarks.harness.workloads import TINY, load
workload = load(TINY, [], batch_size=2, precision="bf16", threads=1)
their_step(workload, f"official {sys.argv[1]}", torch.device("cpu"), official=Path(sys.argv[2]))(0)
block = sys.modules["models_mae"].Block(64, 2, qk_scale=None)
print(block.attn.fused_attn)
"""


@pytest.mark.parametrize(("attention", "fused"), [("eager", "False"), ("sdpa", "True")])
def test_code_of_another_timm_and_numpy_runs(tmp_path, attention, fused):
    """With what the published code asks of timm and numpy; the code itself is no part of this repository."""
    (tmp_path / "models_mae.py").write_text(_AS_PUBLISHED)
    ended = run("-c", _TAKES_A_STEP, attention, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [fused]
