"""Networks of one's own that tests share: one for each kind of layer, and some that are wrong."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

OUT = 3


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn, self.head = kind(6, 5, num_layers=2, batch_first=True), nn.Linear(5, OUT)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Bilinear(nn.Bilinear):
    def forward(self, x):
        return super().forward(x[:, 0], x[:, 1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(6, OUT)

    def forward(self, x):
        return self.head(self.block(x)[:, 0])


class Encoder(nn.TransformerEncoder):
    """Out of training mode torch takes its fused kernels."""

    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2)
        self.head = nn.Linear(6, OUT)

    def forward(self, x):
        return self.head(super().forward(x).mean(1))


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x[:, :2], x[:, 2:])[0].mean(1)[:, :OUT]


class Embedded(nn.Module):
    """Tied: the embedding is the last layer too."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(OUT, 6), nn.Linear(6, OUT, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x[:, 0].abs().long().clamp_max(OUT - 1)).mean(1))


class Shared(nn.Module):
    """A layer that is used twice, a parameter of its own, a buffer, control flow on shapes, complex numbers."""

    def __init__(self):
        super().__init__()
        self.inner, self.head, self.gain = nn.Linear(6, 6), nn.Linear(6, OUT), nn.Parameter(torch.ones(6))
        self.register_buffer("phase", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x):
        x = x[:, 0] if x.dim() == 3 else x
        return self.head(self.gain * (self.inner(F.relu(self.inner(x))) * self.phase).real)


class Branching(nn.Module):
    """Looks at values, which vmap cannot."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, OUT)

    def forward(self, x):
        return torch.cat([f if f.sum() > 0 else 2 * f for f in self.layer(x[:, 0]).split(1)])


def flat(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(OUT))


#: Inputs are (B, 4, 6).
NETS = {
    "linear": lambda: flat(nn.Linear(6, 5), nn.Tanh()),
    "conv1d": lambda: flat(nn.Conv1d(4, 3, 3), nn.ReLU()),
    "conv2d": lambda: flat(nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 3), nn.Dropout(0.5), nn.GroupNorm(3, 3)),
    "channels-last": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(24, OUT)
    ).to(memory_format=torch.channels_last),
    "conv3d": lambda: flat(nn.Unflatten(1, (1, 1, 4)), nn.Conv3d(1, 2, (1, 3, 3))),
    "transposed": lambda: flat(nn.Unflatten(1, (1, 4)), nn.ConvTranspose2d(1, 2, 3), nn.ReLU()),
    "embedding, tied": Embedded,
    "norms": lambda: flat(nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6)),
    "batch norm": lambda: flat(nn.Conv1d(4, 3, 3), nn.BatchNorm1d(3), nn.ReLU()),
    "transformer": Transformer,
    "encoder": Encoder,
    "attention": lambda: Attention(6, 3, batch_first=True),
    "lstm": Recurrent,
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "bilinear": lambda: Bilinear(6, 6, OUT),
    "used twice": Shared,
    "branching": Branching,
    "compiled": lambda: torch.compile(nn.Sequential(nn.Flatten(), nn.Linear(24, OUT)), backend="eager"),
    "compiled part": lambda: flat(torch.compile(nn.Conv1d(4, 3, 3), backend="eager"), nn.ReLU()),
}
LOOPED = ("lstm", "gru", "rnn", "branching")


def made(name):
    """The network with the weights of seed 0."""
    import bnn_pyro as bp

    with bp.isolated(0):
        net = NETS[name]().eval()
        net(torch.zeros(2, 4, 6))  # lazy layers get their shapes
    return net


# -- wrong ones --------------------------------------------------------------------------------------------------------
#: What becomes of the outputs f of a network.
OUTPUTS = {
    "random": lambda f, net: F.dropout(f, 0.5),
    "rows": lambda f, net: f - f.mean(0),
    "earlier rows": lambda f, net: f.cumsum(0),
    "training": lambda f, net: (f, f) if net.training else f,
    "fails in training": lambda f, net: f.view(-1, 7) if net.training else f,
    "nan": lambda f, net: f.log() - f.log(),
    "whole": lambda f, net: f.long(),
    "half": lambda f, net: f.half(),
    "nan gradient": lambda f, net: torch.where(f > -99, f, (0 * f).log()),
    "nan far away": lambda f, net: torch.where(f.abs() < 99, f, torch.nan),
}


class Wrong(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.layer, self.calls = how, nn.Linear(24, OUT), 0
        self.register_buffer("seen", torch.zeros(()))
        own = {"unregistered": [nn.Linear(3, 3)], "nested": {"a": (nn.Linear(3, 3),)}, "plain": torch.ones(3)}
        self._others = own.get(how)
        if how == "plain":
            self._others.requires_grad_()
        if how in ("y", "data", "empty"):
            self.register_parameter(how, nn.Parameter(torch.ones(int(how != "empty"))))

    def forward(self, x):
        if self.how == "in place":
            x.mul_(2)
        x = x.flatten(1)
        f = checkpoint(self.layer, x, use_reentrant=False) if self.how == "checkpoint" else self.layer(x)
        if self.how == "remembers":
            self.calls += 1
            f = f + self.calls
        if self.how == "bounded":
            self.layer.weight.data.clamp_(-1, 1)
        if self.how == "weights":
            self.layer.weight.data.mul_(0.9)
        if self.how == "buffer":
            self.seen += 1
        return OUTPUTS[self.how](f, self) if self.how in OUTPUTS else f


def convnet():
    """Digits (1, 8, 8), with batch normalisation."""
    first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, nn.Flatten(), nn.Linear(64, 10))
