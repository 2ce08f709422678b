"""Small weights of runs to export, and exports as others use them."""

import json
import re
from pathlib import Path

import torch
from helpers.encoders import info_of, shaken
from safetensors.torch import save_file

from mae_vit.cli.main import main
from mae_vit.models.encoder_file import EncoderInfo
from mae_vit.objectives.config import MAEConfig
from mae_vit.objectives.mae import MAE
from mae_vit.training.checkpoints.checkpoint import save_checkpoint
from mae_vit.training.engines.state import TrainState


def mae_run(folder: Path, *, mask_ratio=0.75, norm_pix_loss=True, joint=False, **changes) -> MAE:
    """A run folder as pretraining leaves it, of MAE alone or beside another objective; returns its MAE."""
    info = info_of(**changes)
    objective = {"name": "mae", "mask_ratio": mask_ratio, "decoder_embed_dim": 24, "decoder_depth": 2}
    objective |= {"decoder_num_heads": 3, "norm_pix_loss": norm_pix_loss}
    mae = MAEConfig(**objective).build(info.geometry.build(), mean=info.mean, std=info.std)
    shaken(mae)
    identity = {
        "model.name": info.vit.size,
        "model.img_size": list(info.img_size),
        **{
            f"model.{key}": getattr(info.vit, key)
            for key in ("patch_size", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio", "pos_embed")
        },
        **{f"objective.{'mae.' if joint else ''}{key}": value for key, value in objective.items()},
        "objective.name": "joint" if joint else "mae",
        "data.mean": list(info.mean),
        "data.std": list(info.std),
    }
    parameters = {
        name if name.startswith("encoder.") or not joint else f"mae.{name}": value.detach().clone()
        for name, value in mae.named_parameters()
    }
    save_checkpoint(
        folder / "checkpoints", step=info.step, state=TrainState(parameters, {}, info.step), identity=identity
    )
    return mae


def classifier_file(path: Path, *, pool: str, classes=("cat", "dog"), **changes) -> torch.nn.Module:
    """A `model.safetensors` as fine-tuning leaves it; returns the network."""
    info = info_of(pos_embed="learnable", objective="finetune", **changes)
    encoder = shaken(info.geometry.build())
    torch.manual_seed(1)
    head = torch.nn.Linear(info.vit.embed_dim, len(classes))
    fc_norm = shaken(torch.nn.LayerNorm(info.vit.embed_dim, eps=1e-6))
    tensors = {**encoder.state_dict(), "head.weight": head.weight.data, "head.bias": head.bias.data}
    if pool == "mean":
        tensors = {name: value for name, value in tensors.items() if not name.startswith("norm.")}
        tensors |= {f"fc_norm.{name}": value for name, value in fc_norm.state_dict().items()}
        encoder.norm = torch.nn.Identity()

    def logits(images):
        tokens = encoder.forward_features(images)
        count = info.vit.class_tokens
        return head(tokens[:, :count].mean(1) if pool == "cls" else fc_norm(tokens[:, count:].mean(dim=1)))

    metadata = {**info.to_dict(), "classes": list(classes), "pool": pool}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"mae_vit": json.dumps(metadata)})
    return logits


def export(*arguments) -> int:
    return main(["export", *map(str, arguments)])


def run_card(out: Path, monkeypatch) -> dict:
    """Runs the code of an export's card as it stands, in its folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(out)
    found: dict = {}
    with torch.no_grad():
        exec(code, found)
    return found


def images_for(info: EncoderInfo, count: int = 5) -> torch.Tensor:
    return torch.randn(count, info.in_chans, *info.img_size, generator=torch.Generator().manual_seed(3))


def close(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert ours.std() > 0.05
    torch.testing.assert_close(theirs.detach(), ours.detach(), atol=1e-4, rtol=0)
