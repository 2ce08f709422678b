"""The moving average of a model's weights (Polyak & Juditsky 1992; ViT Sec. 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mae_vit.training.engines.state import persistent_buffers


class EMA:
    """Computes average = decay * average + (1 - decay) * weights at each update.

    Early updates use a lower decay, (1 + n) / (10 + n) at the n-th update, as in TensorFlow. Otherwise
    the initial weights would still dominate after 1 / (1 - decay) updates. BatchNorm's statistics are
    averaged too; integer buffers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Starts at the weights of `model`, which this rank must hold whole; `decay` is the largest, 0 to 1."""
        self._model, self._decay = model, decay
        self._kept = {name: tensor.detach().clone() for name, tensor in self._now().items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Updates the average with the model's weights."""
        now = self._now()
        lerp = get_ema_multi_avg_fn(min(self._decay, (1 + updates) / (10 + updates)))
        averaged = [name for name, tensor in now.items() if tensor.is_floating_point()]
        lerp([self._kept[name] for name in averaged], [now[name].detach() for name in averaged], 0)
        for name in now.keys() - set(averaged):
            self._kept[name].copy_(now[name])

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swaps the average into the model. Neither may be updated within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The average by parameter name, on the model's device; not a copy."""
        return self._kept

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restores the average from a saved copy."""
        for name, tensor in self._kept.items():
            tensor.copy_(saved[name])

    def _now(self) -> dict[str, Tensor]:
        return {**dict(self._model.named_parameters()), **persistent_buffers(self._model)}

    def _swap(self) -> None:
        for name, tensor in self._now().items():
            tensor.data, self._kept[name] = self._kept[name], tensor.data
