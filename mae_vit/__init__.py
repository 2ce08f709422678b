"""Self-supervised pretraining of Vision Transformers: MAE and masked patch prediction.

import mae_vit

encoder = mae_vit.load_encoder("runs/mae_base")            # or encoder.safetensors, a .pth, "timm:NAME", "hf:USER/NAME"
features = encoder(encoder.transform("cat.jpg")[None])     # (1, D)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mae_vit.core import __version__

if TYPE_CHECKING:
    from mae_vit.weights.encoder import PretrainedEncoder, load_encoder

__all__ = ["PretrainedEncoder", "__version__", "load_encoder"]


def __getattr__(name: str) -> Any:
    """Loads torch and timm, which take seconds, only for those who ask."""
    if name in ("PretrainedEncoder", "load_encoder"):
        from mae_vit.weights import encoder as pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
