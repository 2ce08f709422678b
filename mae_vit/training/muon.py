"""Muon (Keller Jordan et al., kellerjordan.github.io/posts/muon): each step of a matrix has singular values near 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Coefficients of five Newton-Schulz steps, which lead singular values from (0, 1] to about 1 (leloykun.github.io,
# "muon-opt-coeffs"; those of timm).
_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
# Gives a step whose singular values are 1 the root mean square of AdamW's, so that rates and decays of AdamW fit (arXiv
# 2502.16982, Sec. 2.2).
_ADAMW_RMS = 0.2


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Moves the singular values of `matrices` (B, M, N) to about 1, by products in `dtype`."""
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in _COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """Muon for the groups that have `matrices=True`, AdamW for the others.

    A matrix keeps its momentum as `exp_avg`, and no second moment. Query, key and value weights are one matrix, as timm
    stores them, where Jordan takes three.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        betas: tuple[float, float],
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, lr=0.0, betas=betas, fused=True)
        self._momentum, self._dtype = momentum, dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have gradients."""
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for matrix in group["params"] if group["matrices"] else ():
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append((matrix, matrix.grad, group))
        # Those of a shape at once: few launches on a GPU.
        for shape, members in by_shape.items():
            matrices, gradients, groups = (list(each) for each in zip(*members, strict=True))
            updates = orthogonalize(torch.stack(self._nesterov(matrices, gradients)), self._dtype).float()
            scale = _ADAMW_RMS * max(shape) ** 0.5
            steps = torch._foreach_mul(updates.unbind(), [-scale * group["lr"] for group in groups])
            torch._foreach_mul_(matrices, [1 - group["lr"] * group["weight_decay"] for group in groups])
            torch._foreach_add_(matrices, steps)
        # AdamW leaves out parameters without gradients.
        held = [(matrix, gradient) for members in by_shape.values() for matrix, gradient, _ in members]
        for matrix, _ in held:
            matrix.grad = None
        super().step()
        for matrix, gradient in held:
            matrix.grad = gradient

    def _nesterov(self, matrices: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
        """Moves the momenta; returns means in which the moved ones weigh `momentum`, gradients the rest."""
        for matrix in matrices:
            if "exp_avg" not in self.state[matrix]:
                self.state[matrix]["exp_avg"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["exp_avg"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        return torch._foreach_lerp(gradients, momenta, self._momentum)
