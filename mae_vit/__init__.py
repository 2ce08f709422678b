"""Self-supervised pretraining of Vision Transformers: MAE and masked patch prediction.

import mae_vit

encoder = mae_vit.load_encoder("runs/mae_base")            # or an encoder.safetensors, a .pth, "timm:NAME"
features = encoder(encoder.transform("cat.jpg")[None])     # (1, D)
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mae_vit.pretrained import PretrainedEncoder, load_encoder

__all__ = ["PretrainedEncoder", "__version__", "load_encoder"]


def __getattr__(name: str) -> Any:
    """Loads torch and timm, which take seconds, only for those who ask."""
    if name in ("PretrainedEncoder", "load_encoder"):
        from mae_vit import pretrained

        return getattr(pretrained, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
