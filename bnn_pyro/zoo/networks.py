"""Fully connected and convolutional networks: with mean-field Normal weights, as point estimates, or with dropout.

    w ~ p(w)    f = net_w(x)    y ~ likelihood(f)          q(w) = ∏ᵢ Normal(wᵢ; μᵢ, softplus(ρᵢ))

The model is an ordinary Pyro model for any method. With the "scale-mixture" prior the KL is estimated by Monte Carlo,
with the others it is exact. The deterministic network is the same model at its most probable weights: the baseline of
every comparison, without epistemic uncertainty. Dropout masks are not part of the model: map trains with masks and
predicts without them, mc-dropout also predicts with them (``inference.svi``).
Layers that sample activations in training (``parts.local_layer``) have the ELBO of mean-field weights. With
p(W) ∝ ∏ 1/|W| and σ² = α μ² they are variational dropout, with a learned α ≤ 1 for each layer, input unit or weight.
With a free σ they are sparse variational dropout, in which irrelevant weights become noise around 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from bnn_pyro.datasets.dataset import Schema
from bnn_pyro.errors import UserError
from bnn_pyro.parts import nets
from bnn_pyro.parts.guides import DroppedInputs, MeanFieldNormal
from bnn_pyro.parts.likelihoods import LIKELIHOODS, make_likelihood
from bnn_pyro.parts.local_net import SCALES, LocalGuide, LocalNet
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.settings import Settings, setting

#: Default dropout rates of (inputs, hidden units).
IMAGE_RATES, TABLE_RATES = (0.05, 0.1), (0.0, 0.05)
#: Dropout rates of hidden units that are compared on held-out rows of a table, unless a rate is set.
HIDDEN_RATES = (0.05, 0.1, 0.02, 0.005)


@dataclass(frozen=True)
class Network(Settings):
    """Settings that all networks of this package share: a fully connected network without a guide.

    hidden      widths of the hidden layers; () is a linear model
    activation  relu, tanh, sigmoid, leaky_relu or gelu
    bias        whether all layers have biases, or none
    prior       normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE, ard:SHAPE,RATE or scale-mixture:WIDE,NARROW,WEIGHT; for a
                point estimate this is the weight decay. by-target: fan-in:8 for classes, fan-in:2 for numbers; narrower
                priors underfit. ard:0.5/fan-in:2: ard for the weights of the first layer, fan-in for all others
    noise       numbers only: learned, heteroscedastic, correlated (several targets), or a scale in target units
    likelihood  for numbers: normal, student-t or laplace (with outliers); for counts: negative-binomial or poisson; for
                ordered classes: ordinal; by default the first one of the task
    """

    hidden: tuple[int, ...] = setting((50,), low=1)
    activation: str = "relu"
    bias: bool = True
    prior: str = "by-target"
    noise: str | float = "learned"
    likelihood: str | None = setting(None, choices=LIKELIHOODS, optional=True)

    def net(self, schema: Schema, outputs: int, **more: Any) -> nn.Module:
        """The deterministic network.   more: further arguments of ``nets.MLP``."""
        more |= dict(exposure=schema.exposure, tails=self.tails(schema))
        return nets.MLP(schema.input_shape, self.hidden, outputs, self.activation, self.bias, **more)

    def tails(self, schema: Schema) -> tuple:
        """The inputs with long tails whose asinh is another input of the network; none for a linear model."""
        return schema.x_tails if self.hidden else ()

    def model(self, schema: Schema) -> BayesianNet:
        """p(y, w | x), out of training mode; see ``Entry.model``."""
        likelihood = make_likelihood(schema, self.noise, self.likelihood)
        return BayesianNet(self.net(schema, likelihood.outputs), likelihood, self.prior).eval()

    def guide(self, model: nn.Module) -> nn.Module | None:
        """None: a point estimate needs no q."""
        return None


@dataclass(frozen=True)
class MeanField(Network):
    """Settings of a fully connected network with mean-field Normal weights: those of ``Network``.

    init_scale  initial σ of every weight
    """

    init_scale: float = setting(1e-3, above=0)

    summary: ClassVar[str] = "A mean and a standard deviation for every weight (Bayes by Backprop)"
    paper: ClassVar[str] = "Blundell et al. 2015, arXiv:1505.05424"
    has: ClassVar[frozenset[str]] = frozenset({"guide", "weights", "proper prior"})

    def guide(self, model: nn.Module) -> nn.Module | None:
        """q(w), starting at the network's own initial weights; see ``Entry.guide``."""
        return MeanFieldNormal(model.initial, self.init_scale)


@dataclass(frozen=True)
class MLP(MeanField):
    """Settings of a deterministic multilayer perceptron: those of ``MeanField``, whose prior is the weight decay."""

    summary: ClassVar[str] = "The deterministic network: one point estimate, the baseline"
    paper: ClassVar[str] = "Rumelhart, Hinton & Williams 1986, doi:10.1038/323533a0"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})

    guide = Network.guide


@dataclass(frozen=True)
class DropoutMLP(Network):
    """Settings of a multilayer perceptron with dropout: those of ``Network``.

    input_dropout   dropout rate of the inputs, by default 0.05 for images and 0 for tables
    hidden_dropout  dropout rate of the units of every hidden layer, by default 0.1 for images; for tables the one of
                    0.1, 0.05, 0.02 and 0.005 (the range of Gal & Ghahramani 2016) whose fit has the lowest NLL on
                    held-out rows, or 0.05 if there are fewer than 8 held-out rows
    """

    hidden: tuple[int, ...] = setting((100,), low=1)
    input_dropout: float | None = setting(None, low=0, below=1)
    hidden_dropout: float | None = setting(None, low=0, below=1)

    #: Rates of old archives of image models without these settings.
    former_of_images: ClassVar[Mapping[str, float]] = {"input_dropout": 0.2, "hidden_dropout": 0.5}

    summary: ClassVar[str] = "A network with dropout, deterministic or with a mask for every draw (MC dropout)"
    paper: ClassVar[str] = "Srivastava et al. 2014, JMLR 15:1929; Gal & Ghahramani 2016, arXiv:1506.02142"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "dropout"})

    def net(self, schema: Schema, outputs: int) -> nets.MLP:
        """The deterministic network."""
        chosen = self.input_dropout, self.hidden_dropout
        rule = IMAGE_RATES if schema.is_image else TABLE_RATES
        rates = tuple(usual if rate is None else rate for rate, usual in zip(chosen, rule, strict=True))
        return super().net(schema, outputs, dropout=rates)

    def to_choose(self, schema: Schema) -> tuple[dict[str, float], ...]:
        """Settings to compare by the NLL on held-out rows, with one fit each; see ``fitting.fit_setup``."""
        is_set = self.hidden_dropout is not None or schema.is_image or not self.hidden
        return () if is_set else tuple({"hidden_dropout": rate} for rate in HIDDEN_RATES)

    def guide(self, model: nn.Module) -> DroppedInputs:
        """q(w): the weights with dropped columns; see ``Entry.guide``."""
        return DroppedInputs(model.initial, {f"layers.{i}.weight": rate for i, rate in enumerate(model.net.rates)})


@dataclass(frozen=True)
class Convolutions(Settings):
    """Convolutions before the fully connected layers of a :class:`Network`.

    channels  output channels of each convolution, which is followed by 2 × 2 max-pooling
    kernel    height and width of the kernel of every convolution, in pixels
    padding   pixels of zeros around the input of every convolution; half the kernel keeps the image's size
    """

    channels: tuple[int, ...] = setting((16, 32), low=1)
    kernel: int = setting(3, low=1)
    padding: int = 1

    images_only: ClassVar[bool] = True
    #: The deterministic variant to compare with.
    baseline: ClassVar[str] = "convnet"
    dropout: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels:
            raise UserError("channels: one or more numbers, got none; for a network without convolutions take mlp")
        if not 0 <= self.padding < self.kernel:
            raise UserError(f"padding must lie between 0 and less than the kernel of {self.kernel}, got {self.padding}")

    def net(self, schema: Schema, outputs: int) -> nets.ConvNet:
        """The deterministic network. Raises UserError for inputs that are not images, and for too small images."""
        layers = schema.input_shape, self.channels, self.hidden, outputs
        return nets.ConvNet(*layers, self.activation, self.bias, self.kernel, self.padding, self.dropout)


@dataclass(frozen=True)
class ConvNet(Convolutions, Network):
    """Settings of a deterministic convolutional network: those of ``Network`` and ``Convolutions``.

    hidden   widths of the hidden layers after the convolutions; the last is the number of features
    prior    as in ``Network``. With fan-in, the mode of a wide network on few images has weights of 0 only
    dropout  dropout rate of the inputs of every fully connected layer in training
    """

    hidden: tuple[int, ...] = setting((256,), low=1)
    prior: str = "normal:1"
    dropout: float = setting(0.5, low=0, below=1)

    summary: ClassVar[str] = "The deterministic convolutional network: one point estimate, or an ensemble of them"
    paper: ClassVar[str] = "LeCun, Bottou, Bengio & Haffner 1998, doi:10.1109/5.726791"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})


@dataclass(frozen=True)
class HiddenLayerNet(MeanField):
    """Settings of a network of hidden layers: those of ``MeanField``, and the dependence of σ on the mean.

    prior       by-target, normal:SCALE, fan-in:SCALE or log-uniform
    scale       free: a σ for every weight; layer, unit or weight: σ = √α·|mean|, with one α < 1 for each of these
    init_scale  initial σ of every weight, or initial α
    """

    activation: str = "leaky_relu"
    init_scale: float = setting(0.01, above=0)
    scale: str = setting("free", choices=SCALES)

    summary: ClassVar[str] = "HiddenLayer: mean-field weights that train on sampled activations"
    paper: ClassVar[str] = "Kingma, Salimans & Welling 2015, arXiv:1506.02557"
    has: ClassVar[frozenset[str]] = frozenset({"guide"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale != "free" and self.init_scale >= 1:
            raise UserError(f"init_scale is the initial α of variational dropout and below 1, got {self.init_scale}")

    def model(self, schema: Schema) -> LocalNet:
        """p(y, h | x) over activations; ``.weight_space`` is p(y, W | x). See ``Entry.model``."""
        return LocalNet(super().model(schema))

    def guide(self, model: nn.Module) -> LocalGuide:
        """q(h | x), starting at the network's own initial weights; ``.weight_space`` is q(W). See ``Entry.guide``."""
        return LocalGuide(model, self.scale, self.init_scale)


@dataclass(frozen=True)
class VariationalDropout(HiddenLayerNet):
    """Settings of a network with variational dropout: those of ``HiddenLayerNet``; init_scale is the initial α."""

    prior: str = "log-uniform"
    scale: str = setting("weight", choices=SCALES)
    init_scale: float = setting(0.05, above=0)

    summary: ClassVar[str] = "Gaussian dropout with learned rates (variational dropout)"


@dataclass(frozen=True)
class SparseDropout(HiddenLayerNet):
    """Settings of a network with sparse variational dropout: those of ``HiddenLayerNet``."""

    prior: str = "log-uniform"

    summary: ClassVar[str] = "A dropout rate for every weight, unbounded, which removes weights"
    paper: ClassVar[str] = "Molchanov, Ashukha & Vetrov 2017, arXiv:1701.05369"


@dataclass(frozen=True)
class BayesianConvNet(Convolutions, HiddenLayerNet):
    """Settings of a small convolutional network: those of ``HiddenLayerNet`` and ``Convolutions``.

    hidden  widths of the hidden layers after the convolutions
    """

    hidden: tuple[int, ...] = setting((128,), low=1)

    summary: ClassVar[str] = "A small convolutional network with mean-field weights, for images"
    paper: ClassVar[str] = "Shridhar, Laumann & Liwicki 2019, arXiv:1901.02731"
