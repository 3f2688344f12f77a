"""Networks, fully connected or convolutional: with mean-field Normal weights, a point estimate, or dropout.

    w ~ p(w)    f = net_w(x)    y ~ likelihood(f)          q(w) = ∏ᵢ Normal(wᵢ; μᵢ, softplus(ρᵢ))

The model is an ordinary Pyro model that any method takes. With the "scale-mixture" prior the KL is estimated by Monte
Carlo, with the others it is exact. The deterministic network is the same model at its most probable weights: the
baseline of every comparison, whose epistemic uncertainty is zero. Masks of dropout are no part of the model: map trains
with them and predicts without, mc-dropout keeps them (``inference.svi``).
Layers that sample activations in training (``parts.local_layer``) have the ELBO of mean-field weights. With
p(W) ∝ ∏ 1/|W| and σ² = α μ² they are variational dropout, whose variance α ≤ 1 is learned for a layer, each input unit
of it, or each weight; with a free σ the sparse kind: weights that data do not need become noise around 0.
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

#: Dropout rates of inputs and of hidden units where none are set.
IMAGE_RATES, TABLE_RATES = (0.05, 0.1), (0.0, 0.05)
#: Rates of hidden units that are compared by held-out rows of a table, where none is set.
HIDDEN_RATES = (0.05, 0.1, 0.02, 0.005)


@dataclass(frozen=True)
class Network(Settings):
    """What variants on a network of the package's own share: a fully connected one, and no guide.

    hidden      widths of the hidden layers; () is a linear model
    activation  relu, tanh, sigmoid, leaky_relu or gelu
    bias        in every layer, or in none
    prior       normal:SCALE, fan-in:SCALE, gamma:SHAPE,RATE, ard:SHAPE,RATE or scale-mixture:WIDE,NARROW,WEIGHT; of a
                point estimate the weight decay. by-target: fan-in:8 for classes, fan-in:2 for numbers; narrower ones
                predict too flat. ard:0.5/fan-in:2: the first layer's weights have the first one
    noise       numbers only: learned, heteroscedastic, correlated (several targets), or a standard deviation of theirs
    likelihood  of numbers: normal, student-t or laplace (with outliers); of counts: negative-binomial or poisson; of
                ordered classes: ordinal; the first of the task where not given
    """

    hidden: tuple[int, ...] = setting((50,), low=1)
    activation: str = "relu"
    bias: bool = True
    prior: str = "by-target"
    noise: str | float = "learned"
    likelihood: str | None = setting(None, choices=LIKELIHOODS, optional=True)

    def net(self, schema: Schema, outputs: int, **more: Any) -> nn.Module:
        """The deterministic network.   more: of an ``MLP``."""
        more |= dict(exposure=schema.exposure, tails=self.tails(schema))
        return nets.MLP(schema.input_shape, self.hidden, outputs, self.activation, self.bias, **more)

    def tails(self, schema: Schema) -> tuple:
        """The inputs with long tails whose asinh the network takes beside them: of a linear model none."""
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

    init_scale  σ of every weight where training starts
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

    input_dropout   share of the inputs that a mask removes, by default 0.05 of an image and none of a table; 0 for none
    hidden_dropout  share of every hidden layer's units that a mask removes, by default 0.1 for images; for tables that
                    of 0.1, 0.05, 0.02 and 0.005 (the range of Gal & Ghahramani 2016) whose fit has the lowest NLL of
                    held-out rows, and 0.05 where these are fewer than 8
    """

    hidden: tuple[int, ...] = setting((100,), low=1)
    input_dropout: float | None = setting(None, low=0, below=1)
    hidden_dropout: float | None = setting(None, low=0, below=1)

    #: Of archives of images without them: None was not written then, and meant these. For tables it means what it did.
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
        """Settings to compare by the NLL of held-out rows, with a fit of each; see ``fitting.fit_setup``."""
        is_set = self.hidden_dropout is not None or schema.is_image or not self.hidden
        return () if is_set else tuple({"hidden_dropout": rate} for rate in HIDDEN_RATES)

    def guide(self, model: nn.Module) -> DroppedInputs:
        """q(w): the weights with dropped columns; see ``Entry.guide``."""
        return DroppedInputs(model.initial, {f"layers.{i}.weight": rate for i, rate in enumerate(model.net.rates)})


@dataclass(frozen=True)
class Convolutions(Settings):
    """Convolutions before the fully connected layers of a :class:`Network`.

    channels  of each convolution, which 2 × 2 max-pooling follows
    kernel    height and width of every convolution, in pixels
    padding   pixels of zeros around each one's input; half the kernel keeps the image's size
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
        """The deterministic network. Raises UserError for inputs that are no images, or too small for it."""
        layers = schema.input_shape, self.channels, self.hidden, outputs
        return nets.ConvNet(*layers, self.activation, self.bias, self.kernel, self.padding, self.dropout)


@dataclass(frozen=True)
class ConvNet(Convolutions, Network):
    """Settings of a deterministic convolutional network: those of ``Network`` and ``Convolutions``.

    hidden   widths of the hidden layers after the convolutions; the last is that of the features
    prior    as in ``Network``. Under one by fan-in the mode is a network of zeros: each of a wide layer's many weights
             takes half a nat from its start, and few pictures bring less
    dropout  share of the inputs of every fully connected layer that training removes; 0 for none
    """

    hidden: tuple[int, ...] = setting((256,), low=1)
    prior: str = "normal:1"
    dropout: float = setting(0.5, low=0, below=1)

    summary: ClassVar[str] = "The deterministic convolutional network: one point estimate, or an ensemble of them"
    paper: ClassVar[str] = "LeCun, Bottou, Bengio & Haffner 1998, doi:10.1109/5.726791"
    has: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})


@dataclass(frozen=True)
class HiddenLayerNet(MeanField):
    """Settings of a network of hidden layers: those of ``MeanField``, and how σ depends on the mean.

    prior       by-target, normal:SCALE, fan-in:SCALE or log-uniform
    scale       free: a σ for every weight; layer, unit or weight: σ = √α·|mean|, with one α < 1 for each of these
    init_scale  σ of every weight where training starts, or α
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
            raise UserError(f"init_scale is the first α of variational dropout and below 1, got {self.init_scale}")

    def model(self, schema: Schema) -> LocalNet:
        """p(y, h | x) over activations; ``.weight_space`` is p(y, W | x). See ``Entry.model``."""
        return LocalNet(super().model(schema))

    def guide(self, model: nn.Module) -> LocalGuide:
        """q(h | x), starting at the network's own initial weights; ``.weight_space`` is q(W). See ``Entry.guide``."""
        return LocalGuide(model, self.scale, self.init_scale)


@dataclass(frozen=True)
class VariationalDropout(HiddenLayerNet):
    """Settings of a network with variational dropout: those of ``HiddenLayerNet``; init_scale is the first α."""

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
