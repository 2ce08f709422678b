"""Baselines and timm's networks as encoders, by their last feature map.

Shapes: B batch, C channels, H W pixels, n cells of the map, D its width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import torch
from timm.models import group_parameters
from torch import Tensor, nn

from mae_vit.core.errors import InputError
from mae_vit.core.messages import error_reason
from mae_vit.models.encoders.base import Encoder
from mae_vit.models.encoders.baselines import SmallBiT, build_network
from mae_vit.models.geometry import NetworkGeometry

_HELD = NetworkGeometry.holder
# Number of layers after the map of a sequential baseline: global average, flattening, linear layer.
_BEHIND_MAP = 3


class NetworkEncoder(Encoder):
    """A network without its head. It supports no masking of tokens: SimMIM masks pixels.

    Weights have the same names as in a classifier of the same network.
    """

    family = "network"
    num_prefix_tokens = num_class_tokens = 0

    def __init__(
        self,
        name: str,
        *,
        img_size: tuple[int, int],
        patch_size: int,
        in_chans: int,
        drop_path_rate: float = 0.0,
    ) -> None:
        """Builds the network with fresh weights.

        Raises ValueError if it has no feature map, or does not take such images.
        """
        super().__init__()
        self.img_size, self.patch_size, self.in_chans = img_size, patch_size, in_chans
        self.grid_size = (img_size[0] // patch_size, img_size[1] // patch_size)
        network = build_network(
            name, num_classes=2, in_chans=in_chans, img_size=img_size, drop_path_rate=drop_path_rate
        )
        # Asked before the head goes: without it the last block would count as the head.
        self._layers = network_layers(network)
        # Without its head; other names stay the same.
        if isinstance(network, nn.Sequential):
            network = nn.Sequential(OrderedDict([*network.named_children()][:-_BEHIND_MAP]))
        else:
            network.reset_classifier(0)  # type: ignore[operator]
        self.network = network
        self.embed_dim, *grid = self._map_shape(name)
        self.feature_grid = (grid[0], grid[1])

    @torch.no_grad()
    def _map_shape(self, name: str) -> tuple[int, ...]:
        self.eval()
        device = next(self.parameters()).device
        try:
            shape = self.feature_map(torch.zeros(1, self.in_chans, *self.img_size, device=device)).shape[1:]
        except (RuntimeError, AssertionError, ValueError) as error:
            size = f"{self.in_chans} x {self.img_size[0]} x {self.img_size[1]}"
            raise ValueError(f"{name} does not accept images of {size} ({error_reason(error)})") from None
        self.train()
        return tuple(shape)

    def feature_map(self, images: Tensor) -> Tensor:
        """Encodes normalized images: (B, C, H, W) -> (B, D, rows, columns)."""
        images = in_fast_layout(images, self.network)
        if isinstance(self.network, nn.Sequential):
            return self.network(images)
        if isinstance(self.network, SmallBiT):  # its stem is not timm's
            return self.network.forward_features(images)
        return last_map(self.network, images)

    def forward_features(self, images: Tensor) -> Tensor:
        """Encodes whole images: (B, C, H, W) -> (B, n, D), the cells of the last map in raster order."""
        return self.feature_map(images).flatten(2).transpose(1, 2)

    def layer_of(self, name: str) -> int | None:
        """Returns the number of a parameter's layer."""
        return layer_in(self._layers, name.removeprefix(_HELD))

    def weights(self) -> dict[str, Tensor]:
        """Returns all tensors by the network's own names (timm's, for its networks)."""
        return {name.removeprefix(_HELD): value for name, value in self.state_dict().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Loads all tensors by the network's own names."""
        self.network.load_state_dict(tensors)


def last_map(network: nn.Module, images: Tensor) -> Tensor:
    """Returns the last feature map of a network of timm's, normed: (B, C, H, W) -> (B, D, rows, columns).

    A norm that the network has after its pooling norms each cell. Raises ValueError if it has no map.
    """
    if not hasattr(network, "forward_intermediates"):
        raise ValueError("timm has no map of features for this network")
    try:
        features: Tensor = network.forward_intermediates(  # type: ignore[operator]
            images, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
        )[-1]
    except AssertionError as error:  # for example Hiera, which cannot norm its maps
        raise ValueError(f"timm has no map of features for this network ({error})") from None
    norm = getattr(getattr(network, "head", None), "norm", None)
    if norm is None and isinstance(getattr(network, "norm", None), nn.Identity):
        norm = getattr(network, "fc_norm", None)
    if getattr(norm, "normalized_shape", None) != (features.shape[1],):  # none, or of a layer of the head
        return features
    if "2d" in type(norm).__name__:
        return norm(features)  # type: ignore[misc]
    return norm(features.movedim(1, -1)).movedim(-1, 1)  # type: ignore[misc]


def in_fast_layout(images: Tensor, network: nn.Module) -> Tensor:
    """Puts channels last where convolutions are faster so: on GPUs, and on CPUs in our narrow networks.

    All later layers take the layout over from their input, so weights and checkpoints keep their own.
    """
    if images.is_cuda or isinstance(network, nn.Sequential):
        return images.contiguous(memory_format=torch.channels_last)
    return images


def network_layers(network: nn.Module) -> dict[str, int | None]:
    """Returns layer numbers by parameter name, for layer-wise rate decay; None is the last layer.

    timm defines the layers of most of its networks; of the others there are none. In a sequential network each
    convolution with the norm after it is a layer.
    """
    if isinstance(network, nn.Sequential):
        layers: dict[str, int | None] = {}
        number = -1
        for place, layer in network.named_children():
            number += any(True for _ in layer.parameters()) and not isinstance(layer, nn.BatchNorm2d)
            head = isinstance(layer, nn.Linear)
            layers |= {f"{place}.{name}": None if head else number for name, _ in layer.named_parameters()}
        return layers
    if not hasattr(network, "group_matcher"):
        return {}
    matcher = network.group_matcher(coarse=False)  # type: ignore[operator]
    numbers: dict[str, int] = group_parameters(network, matcher, reverse=True)
    return {name: None if number == max(numbers.values()) else number for name, number in numbers.items()}


def layer_in(layers: Mapping[str, int | None], name: str) -> int | None:
    """Returns a parameter's layer among `network_layers`; raises InputError if there are none."""
    if not layers:
        raise InputError(
            "optim.layer_decay: timm defines no layers of this network; use optim.layer_decay=null"
        )
    return layers[name]
