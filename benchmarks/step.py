"""Forward + backward + AdamW of a pretraining step, against transformers' ViTMAE and the official MAE code.

Same model, batch, threads and precision (fp32, and bf16 where the device has it); peers in both of their
attention settings (eager, sdpa), and all also under torch.compile. On a CPU all have a run's setting of glibc's
memory; uncompiled peers also take part without it ("default memory"), as their own scripts run them. Each
contender is a process, and they take turns.

    python benchmarks/step.py [--official DIR] [--config mae_base --batch 4 --steps 1] [--out FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

# So that a checkout runs without being installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness.command import git, make_parser, parse, publish, run
from benchmarks.harness.turns import Life, ratios, serve, summarize, take_turns
from benchmarks.harness.workloads import TINY, Workload, load_for
from mae_vit.core.errors import InputError
from mae_vit.objectives.mae import LAYER_NORM_EPS
from mae_vit.training.engines.precision import choose_precision

TRANSFORMERS, OFFICIAL = "transformers", "official"
OFFICIAL_FILE = "models_mae.py"
OURS = ("ours", "ours compiled")
ATTENTIONS = ("eager", "sdpa")
COMPILED, DEFAULT_MEMORY = " compiled", " default memory"
PEERS = tuple(
    f"{library} {attention}{setting}"
    for library in (TRANSFORMERS, OFFICIAL)
    for setting in ("", COMPILED, DEFAULT_MEMORY)
    for attention in ATTENTIONS
)
# Label, ours, and the peers' setting.
PAIRS = (
    ("eager", "ours", ""),
    ("ours_compiled", "ours compiled", ""),
    ("both_compiled", "ours compiled", COMPILED),
    ("default_memory", "ours", DEFAULT_MEMORY),
)


def their_step(
    workload: Workload, name: str, device: torch.device, *, official: Path | None = None
) -> Callable[[int], None]:
    """A step of a peer ("transformers eager", "official sdpa"): the same AdamW kernel; images arrive normalized.

    Masks come from its own noise. `official` is a clone of github.com/facebookresearch/mae, whose code is run.
    """
    library, attention = name.split()[:2]
    if library == OFFICIAL:
        assert official is not None
        model = official_model(workload, attention, official)
    else:
        model = transformers_model(workload, attention)
    model = model.to(device).train()
    if workload.compiled:
        model.compile(dynamic=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    images = torch.randn(workload.batch_size, workload.info.in_chans, *workload.info.img_size, device=device)
    options = {} if library == TRANSFORMERS else {"mask_ratio": workload.mae().mask_ratio}

    def step(number: int) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=workload.precision == "bf16"):
            loss = model(images, **options)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def transformers_model(workload: Workload, attention: str) -> torch.nn.Module:
    """ViTMAE, as users of transformers train it; its output begins with the loss."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    info, ours = workload.info, workload.mae()
    config = ViTMAEConfig(
        hidden_size=info.vit.embed_dim,
        num_hidden_layers=info.vit.depth,
        num_attention_heads=info.vit.num_heads,
        intermediate_size=int(info.vit.mlp_ratio * info.vit.embed_dim),
        decoder_hidden_size=ours.decoder_embed_dim,
        decoder_num_hidden_layers=ours.decoder_depth,
        decoder_num_attention_heads=ours.decoder_num_heads,
        decoder_intermediate_size=4 * ours.decoder_embed_dim,
        image_size=info.img_size[0],
        patch_size=info.vit.patch_size,
        num_channels=info.in_chans,
        mask_ratio=ours.mask_ratio,
        norm_pix_loss=ours.norm_pix_loss,
        layer_norm_eps=LAYER_NORM_EPS,
        attn_implementation=attention,
    )
    return ViTMAEForPreTraining(config)


def official_model(workload: Workload, attention: str, clone: Path) -> torch.nn.Module:
    """The official model on today's timm and numpy; its output begins with the loss. Call it once a process.

    The code was written for timm 0.3.2, whose blocks took `qk_scale`, and for a numpy with `np.float`. Both are
    given to it. With "sdpa" timm's blocks use PyTorch's fused attention, as by default.
    """
    from timm.layers import set_fused_attn

    set_fused_attn(attention == "sdpa")
    sys.path.insert(0, str(clone))
    np.float = float  # type: ignore[attr-defined]
    import models_mae

    block = models_mae.Block
    models_mae.Block = lambda *sizes, qk_scale=None, **options: block(*sizes, **options)
    info, ours = workload.info, workload.mae()
    model: torch.nn.Module = models_mae.MaskedAutoencoderViT(
        img_size=info.img_size[0],
        patch_size=info.vit.patch_size,
        in_chans=info.in_chans,
        embed_dim=info.vit.embed_dim,
        depth=info.vit.depth,
        num_heads=info.vit.num_heads,
        decoder_embed_dim=ours.decoder_embed_dim,
        decoder_depth=ours.decoder_depth,
        decoder_num_heads=ours.decoder_num_heads,
        mlp_ratio=info.vit.mlp_ratio,
        norm_layer=partial(torch.nn.LayerNorm, eps=LAYER_NORM_EPS),
        norm_pix_loss=ours.norm_pix_loss,
    )
    return model


def their_life(workload: Workload, name: str, official: Path | None, pipe: Connection) -> None:
    """A peer's."""
    torch.manual_seed(0)
    device = torch.device("cpu") if name.endswith(DEFAULT_MEMORY) else workload.device()
    torch.set_num_threads(workload.threads)
    serve(their_step(workload, name, device, official=official), pipe, device)


def contenders(workload: Workload, names: Sequence[str], official: Path | None) -> dict[str, Life]:
    """Those that are asked for."""
    lives: dict[str, Life] = {}
    for name in names:
        chosen = replace(workload, compiled=name.endswith(COMPILED))
        lives[name] = chosen.live if name in OURS else partial(their_life, chosen, name, official)
    return lives


def compare(times: dict[str, list[float]], batch_size: int) -> dict[str, Any]:
    """Times and rates of each contender, and speed-ups over each library's fastest setting, round by round."""
    steps = {name: summarize(values, 2) for name, values in times.items()}
    speedup: dict[str, dict[str, Any]] = {}
    for library in (TRANSFORMERS, OFFICIAL):
        for label, ours, setting in PAIRS:
            there = [peer for each in ATTENTIONS if (peer := f"{library} {each}{setting}") in times]
            if ours in times and there:
                best = min(there, key=lambda peer: steps[peer]["median"])
                found = summarize(ratios(times[best], times[ours]))
                speedup.setdefault(library, {})[label] = {"peer": best, **found}
    rates = {name: round(batch_size / step["median"] * 1e3) for name, step in steps.items()}
    return {"ms_per_step": steps, "images_per_s": rates, "speedup": speedup}


def choose(names: Sequence[str], official: Path | None, *, device: str) -> Sequence[str]:
    """All contenders, or those that were named.

    Raises InputError for one that there is not, or for a folder without the official code.
    """
    if official is not None and not (official / OFFICIAL_FILE).is_file():
        raise InputError(
            f"--official {official}: no {OFFICIAL_FILE} there; clone github.com/facebookresearch/mae"
        )
    # A GPU has no memory of glibc's.
    there = [name for name in PEERS if device == "cpu" or not name.endswith(DEFAULT_MEMORY)]
    known = [*OURS, *(name for name in there if official or not name.startswith(OFFICIAL))]
    for name in names:
        if name not in known:
            raise InputError(f'no contender "{name}"; there are {", ".join(known)}')
    return names or known


def head_of(clone: Path) -> str | None:
    """The commit of a clone; None for a folder within another checkout, whose commit says nothing of it."""
    words = (git(clone, "rev-parse", "--show-prefix", "HEAD") or "").split()
    return words[0] if len(words) == 1 else None


def main() -> None:
    """Measures the precisions asked for and prints the ratios."""
    parser = make_parser(__doc__, config=TINY, batch=128, device="cpu", rounds=7, steps=5, threads=2)
    named = f"some of: {', '.join(OURS + PEERS)} (all)"
    parser.add_argument("--contenders", nargs="+", default=(), metavar="NAME", help=named)
    cloned = "clone of github.com/facebookresearch/mae: its code is run as a peer"
    parser.add_argument("--official", type=Path, metavar="DIR", help=cloned)
    arguments = parse(parser)
    automatic = choose_precision("auto", torch.device(arguments.device))
    results = {}
    for precision in dict.fromkeys(("fp32", automatic.precision)):
        arguments.precision = precision
        workload = load_for(arguments)
        workload.mae()  # peers have no other objective
        names = choose(arguments.contenders, arguments.official, device=arguments.device)
        lives = contenders(workload, names, arguments.official)
        times = take_turns(lives, rounds=arguments.rounds, steps=arguments.steps)
        results[precision] = compare(times, arguments.batch)
    report = {
        "benchmark": "step",
        "clock": "wall",
        "auto_precision": str(automatic),
        "model_gflops_per_image": round(workload.costs.flops_per_image / 1e9, 4),
        "results": results,
        "transformers": metadata.version("transformers"),
        "official": arguments.official and head_of(arguments.official),
    }
    publish(report, arguments, "config", "overrides", "batch", "device", "threads", "rounds")


if __name__ == "__main__":
    run(main)
