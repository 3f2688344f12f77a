"""The objectives: the log joint of a Pyro model over one flat vector, for many chains at once, and the ELBO.

    log π(u) = log p(w) + log |∂w/∂u| + (1/T)·(N/B)·Σ_b log p(y_b | x_b, w),     w = transform(u)

u is (C, P), P unconstrained numbers for all latent sites. The factor N/B of a mini-batch is applied here alone.
The model is evaluated in its own precision, for all chains in one call, and its terms are added up in float64: with
50,000 rows a sum in float32 has an error of 0.01 nats, which would be noise in every Metropolis step.
"""

from collections.abc import Callable, Mapping, Sequence

import pyro
import torch
from pyro.distributions import TorchDistribution, constraints
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Transform, biject_to, kl_divergence

from bnn_pyro.errors import UserError, refusing
from bnn_pyro.isolation import isolated
from bnn_pyro.parts.guides import NormalGuide, PointMass
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.parts.observed import OBSERVED, Recorder
from bnn_pyro.parts.weights import FlatNormals, cut, drawn_jointly, joint_kl

Pair = tuple[Tensor, Tensor]
Rows = Tensor | None
Weights = Mapping[str, Tensor]  # {site: (num, *shape)}


class Rescale(Messenger):
    """Multiply log p(y | x, w) by ``likelihood`` and the log-density of every latent site by ``latent``.

    likelihood: N/B, with which the log joint of B random rows is an unbiased estimate for all N rows.
    latent: the temperature T, the same for a model and its guide; 1 is Bayes, 0 leaves only the likelihood.
    """

    def __init__(self, likelihood: float = 1.0, latent: float = 1.0) -> None:
        super().__init__()
        self.likelihood, self.latent = likelihood, latent

    def _pyro_sample(self, msg: dict) -> None:
        msg["scale"] = msg["scale"] * (self.likelihood if msg["name"] == OBSERVED else self.latent)


def check_sites(model: nn.Module, guide: nn.Module | None, x: Tensor, y: Tensor) -> None:
    """Raise UserError if a model, or a guide to train, has sites that a fit would treat wrongly.   x, y: a few rows."""
    values = {site: value.detach().to(x.device) for site, value in model.initial.items()}
    trained = [] if guide is None else list(guide.parameters())  # before a call, in which AutoGuides make parameters
    with isolated(0), torch.no_grad(), in_mode(model, training=False):
        with Recorder() as q:
            if guide is not None:
                guide(x, y)
        _check_shapes("guide", q.sites, values)
        with Recorder(values | {name: site["value"] for name, site in q.sites.items()}) as p:
            model(x, y)
    for name, value in {**q.params, **p.params}.items():
        if not any(value is p or getattr(value, "unconstrained", tuple)() is p for p in trained):
            raise UserError(f"'{name}' is a pyro.param, which no fit trains: make it an nn.Parameter of the guide "
                            "(Pyro's AutoGuides are not taken), and in a model a latent site or a buffer")  # fmt: skip
    if guide is not None and not trained:
        raise UserError(f"the guide, {type(guide).__name__}, has no parameters to train")
    if not p.sites.get(OBSERVED, {}).get("is_observed"):
        raise UserError(f"{type(model).__name__} has no observed site '{OBSERVED}': end it with self.likelihood(f, y), "
                        "of the y that it is called with")  # fmt: skip
    _check_shapes("model", p.sites, values if guide is not None else {})
    for name in q.sites.keys() & p.sites.keys() if isinstance(guide, NormalGuide | PointMass) else ():
        if _of_each(p.sites[name]["fn"].support) is not constraints.real:
            raise UserError(f"'{name}' of the model does not take every number, as {type(guide).__name__} gives it: "
                            "make the site one that does, such as its logarithm, or take a sampler")  # fmt: skip


def _check_shapes(of: str, sites: Mapping[str, dict], values: Weights) -> None:
    for name, value in values.items():
        if name in sites and (shape := sites[name]["fn"].event_shape) != value.shape:
            raise UserError(f"'{name}' of the {of} has event shape {tuple(shape)}, of `initial` {tuple(value.shape)}: "
                            "all dimensions of a weight are those of one event, by .to_event(n)")  # fmt: skip


class LogJoint:
    """log π of a model given the rows x (N, *input_shape), y (N,), at temperature T.

    priors       {latent site: its prior}
    free         {latent site: shape of its unconstrained numbers}, in the order of u
    size         P
    initial      (P,), u of the model's initial values, float64
    constrained  whether the support of a site is not all of ℝ, so that u differs from w
    Raises UserError for a latent site that is discrete or has no initial value.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, temperature: float = 1.0) -> None:
        self.model, self.x, self.y, self.temperature = model, x, y, temperature
        values = {site: value.detach().to(x.device) for site, value in model.initial.items()}
        # Pyro's checks of shapes and supports are on in this call alone: trajectories may meet infinities.
        with torch.no_grad(), in_mode(model, training=False), Recorder(values) as first:
            model(x[:2], y[:2])
        self.event_dim = first.sites[OBSERVED]["fn"].event_dim  # 1 for several targets, y (N, T)
        for site in {name for name, site in first.sites.items() if not site["is_observed"]} - values.keys():
            raise UserError(f"the model's `initial` has no value for its latent site '{site}'")
        for site in values.keys() - first.sites.keys():
            raise UserError(f"the model's `initial` has a value for '{site}', which is no site of the model")
        self.priors = {site: first.sites[site]["fn"] for site in values}
        self.dtype = next(iter(values.values())).dtype
        self._transforms = {site: _transform(site, prior) for site, prior in self.priors.items()}
        # Compared by ==, since a copy in another process holds other objects.
        self.constrained = any(transform != _IDENTITY for transform in self._transforms.values())
        self.free = {site: self._transforms[site].inv(value).shape for site, value in values.items()}
        self.initial = self.flat({site: value[None] for site, value in values.items()})[0].double()
        self.size = len(self.initial)

    def terms(self, u: Tensor, x: Rows = None, y: Rows = None) -> Pair:
        """(log p(w) + log |∂w/∂u|, (N/B)·log p(y | x, w)/T), each (C,) in nats, at u (C, P); differentiable.

        x, y: as for :func:`log_joints`; by default all rows.
        """
        y = self.y if y is None else y
        jacobian, w = 0.0, {}
        for site, free in cut(u, self.free).items():
            transform = self._transforms[site]
            value = transform(free)
            w[site] = value.to(self.dtype)
            if transform != _IDENTITY:
                jacobian = jacobian + transform.log_abs_det_jacobian(free, value).reshape(len(u), -1).sum(1)
        factor = len(self.x) / y.shape[-1 - self.event_dim] / self.temperature
        with pyro.validation_enabled(False), in_mode(self.model, training=False):
            prior, likelihood = log_joints(self.model, w, self.x if x is None else x, y, factor)
        return prior + jacobian, likelihood

    def log_density(self, u: Tensor, y: Tensor | None = None) -> Tensor:
        """log π (C,) in nats at u (C, P), given all rows; differentiable.   y: replaces their targets."""
        prior, likelihood = self.terms(u, y=y)
        return prior + likelihood

    def gradient(self, u: Tensor, x: Rows = None, y: Rows = None) -> Pair:
        """(log π (C,), its gradient (C, P)); arguments as for :meth:`terms`."""
        return with_gradient(lambda u: sum(self.terms(u, x, y)), u)

    def sites(self, u: Tensor) -> dict[str, Tensor]:
        """u (…, P) -> {site: (…, *shape)} in the model's own precision."""
        return {site: self._transforms[site](free).to(self.dtype) for site, free in cut(u, self.free).items()}

    def flat(self, w: Weights) -> Tensor:
        """{site: (num, *shape)} -> u (num, P)."""
        return torch.cat([self._transforms[site].inv(w[site]).reshape(len(w[site]), -1) for site in self.free], 1)

    @torch.no_grad()
    @pyro.validation_enabled(False)
    def sample_prior(self, *numbers: int) -> list[dict[str, Tensor]]:
        """For each of ``numbers``, so many draws {site: (number, *shape)}. Raises UserError if a prior has no draws."""
        improper = "samplers need a proper prior, and this variant's has no samples; take another, such as fan-in:1"
        with refusing(improper, NotImplementedError), in_mode(self.model, training=False), _PriorDraws(numbers) as made:
            self.model(self.x[:1], self.y[:1])
        parts = {site: made.sites[site]["value"].split(numbers) for site in self.priors}
        return [{site: draws[i] for site, draws in parts.items()} for i in range(len(numbers))]


class _PriorDraws(Recorder):
    """Draws latent sites, each given the previous ones: (sum of ``numbers``, *shape), by one call for each number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.numbers = numbers

    def _pyro_sample(self, msg: dict) -> None:
        if not (msg["is_observed"] or site_is_subsample(msg)):
            prior, batch_shape = msg["fn"], msg["fn"].batch_shape  # not empty if the prior depends on another site
            every = (sum(self.numbers),)
            parts = [prior.expand(every).sample()] if batch_shape else [prior.sample((num,)) for num in self.numbers]
            msg["value"], msg["done"] = torch.cat(parts), True


def with_gradient(density: Callable[[Tensor], Tensor], u: Tensor) -> Pair:
    """(densities (C,), their gradients (C, P)) at u (C, P)."""
    with torch.enable_grad():
        leaf = u.detach().requires_grad_(True)
        value = density(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


_IDENTITY = biject_to(constraints.real)


def _transform(site: str, prior: TorchDistribution) -> Transform:
    """The transform from ℝ to the support of a site."""
    if (support := prior.support).is_discrete:
        raise UserError(f"the latent site '{site}' is discrete, and samplers need gradients; sum it out of the model, "
                        "or give it a continuous relaxation")  # fmt: skip
    return _IDENTITY if _of_each(support) is constraints.real else biject_to(support)


def _of_each(support: constraints.Constraint) -> constraints.Constraint:
    """The support of one number of a site."""
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support


def log_joints(model: nn.Module, w: Weights, x: Tensor, y: Tensor, likelihood: float = 1.0) -> Pair:
    """(log p(w), ``likelihood`` · log p(y | x, w)) of C sets of weights at once, each (C,), in nats.

    w: {site: (C, *shape)}.   x, y: the same rows for all, (B, *input_shape) and (B,), or rows for each, (C, B, …).
    likelihood: N/B/T if the B rows represent N rows, at temperature T.
    """
    with _Terms(w) as terms:
        model(x, y)
    return terms.totals[False], likelihood * terms.totals[True]


class _Terms(Recorder):
    """Adds up log densities (C,): ``totals[True]`` of the site "y", ``totals[False]`` of all others."""

    def __init__(self, values: Weights) -> None:
        super().__init__(values)
        self.totals = {False: 0.0, True: 0.0}

    def _pyro_post_sample(self, msg: dict) -> None:
        if site_is_subsample(msg):
            return
        term = scale_and_mask(msg["fn"].log_prob(msg["value"]), msg["scale"], msg["mask"])
        if term.dim() > 1:
            term = term.flatten(1).sum(1, dtype=torch.float64)
        is_y = msg["name"] == OBSERVED  # another observed site belongs to no row
        self.totals[is_y] = self.totals[is_y] + term


def elbo_of(model: Callable, guide: Callable, *args: Tensor, particles: int = 1) -> tuple[Tensor, Tensor]:
    """(the ELBO, differentiable; its likelihood part, detached), scalars in nats, means over the particles.

    The value is that of Pyro's TraceMeanField_ELBO, but densities that a closed-form KL makes superfluous, more than
    half of the time of a step at 784-400-400-10, are not computed. No site may be subsampled or enumerated.
    """
    terms, likelihood = [], 0.0
    for _ in range(particles):
        jointly: dict[FlatNormals, list] = {}
        with Recorder() as q:
            guide(*args)
        with Recorder({name: site["value"] for name, site in q.sites.items()}) as p:
            model(*args)
        for name, site in p.sites.items():
            if site["is_observed"]:
                term = _scaled(site["fn"].log_prob(site["value"]), site)
                likelihood = likelihood + term.detach()
                terms.append(-term)
            elif (of := q.sites.get(name)) is not None:
                plain = of["mask"] is None and isinstance(of["scale"], float | int)
                if plain and drawn_jointly(of["fn"], site["fn"]):
                    jointly.setdefault(of["fn"].joint, []).append((of["fn"], site["fn"], of["scale"]))
                else:
                    terms.append(_kl(of, site))
            else:
                raise UserError(f"the guide lacks the model's site '{name}'; `initial` takes the likelihood's too")
        terms += map(joint_kl, jointly.values())
        terms += [-_entropy(site) for name, site in q.sites.items() if name not in p.sites]
    return -torch.stack(terms).sum() / particles, likelihood / particles


class Objective(nn.Module):
    """:func:`elbo_of` some rows, as a module, since DistributedDataParallel averages the gradients of a module."""

    def __init__(self, model: nn.Module, guide: nn.Module, num_particles: int) -> None:
        super().__init__()
        self.guide, self.num_particles = guide, num_particles
        self._model = (model,)  # not as a submodule: its parameters are not trained

    def forward(self, x: Tensor, y: Tensor, likelihood: float, latent: float) -> tuple[Tensor, Tensor]:
        """The log-likelihood of the rows x, y is multiplied by ``likelihood``, the KL by ``latent``."""
        model, guide = Rescale(likelihood, latent)(self._model[0]), Rescale(latent=latent)(self.guide)
        return elbo_of(model, guide, x, y, particles=self.num_particles)


def _kl(q: dict, p: dict) -> Tensor:
    """KL(q ‖ p) of one latent site in closed form, or else log q(w) − log p(w) at the draw w."""
    try:
        return _scaled(kl_divergence(q["fn"], p["fn"]), q)
    except NotImplementedError:
        return _scaled(q["fn"].log_prob(q["value"]), q) - _scaled(p["fn"].log_prob(q["value"]), p)


def _entropy(q: dict) -> Tensor:
    """−E[log q] of a site of the guide alone. Raises UserError if it is not marked auxiliary: it may be misspelt."""
    if not q["infer"].get("is_auxiliary"):
        raise UserError(f"the guide's site '{q['name']}' is none of the model's, and is not marked as auxiliary")
    try:
        return _scaled(q["fn"].entropy(), q)
    except NotImplementedError:
        return -_scaled(q["fn"].log_prob(q["value"]), q)


def _scaled(term: Tensor, site: dict) -> Tensor:
    term = scale_and_mask(term, site["scale"], site["mask"])
    return term.sum() if term.dim() else term
