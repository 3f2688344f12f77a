"""Networks of one's own, for images of one channel: what `modules.toml` makes Bayesian.

A ResNet-20 (He et al. 2016, arXiv:1512.03385, section 4.2), a vision transformer of four blocks (Dosovitskiy et al.
2021, arXiv:2010.11929), and an LSTM over the rows of the image.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bnn_pyro import Schema


class _Block(nn.Module):
    """Two convolutions with batch normalisation; the shortcut takes every second pixel and adds empty channels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.added, stride = width - channels, width // channels
        self.stride = stride
        self.conv1, self.norm1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        f = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(f + F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added)))


def resnet20(schema: Schema) -> nn.Module:
    """Three stages of three blocks of width 16, 32 and 64: 0.27 million weights."""
    blocks = [_Block(i, o) for i, o in ((16, 16), (16, 16), (16, 16), (16, 32), (32, 32), (32, 32), (32, 64))]
    first = [nn.Conv2d(schema.input_shape[0], 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(schema.classes))]
    return nn.Sequential(*first, *blocks, _Block(64, 64), _Block(64, 64), *head)


class _Transformer(nn.Module):
    """Patches of 7 x 7, four blocks of width 64 with normalisation first, the mean over patches, a linear layer."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 64, 7, 7)
        self.places = nn.Parameter(0.02 * torch.randn((size // 7) ** 2, 64))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def transformer(schema: Schema) -> nn.Module:
    """0.14 million weights for images of 28 x 28."""
    return _Transformer(schema.input_shape[-1], len(schema.classes))


class _Recurrent(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(width, 64, batch_first=True), nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[:, 0])[0][:, -1])


def lstm(schema: Schema) -> nn.Module:
    """64 units that read an image row by row: 0.02 million weights."""
    return _Recurrent(schema.input_shape[-1], len(schema.classes))
