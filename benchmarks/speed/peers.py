"""Other packages' Bayesian layers, each as its README says, with the ELBO's own weight of the KL, 1/N, and fused Adam.

    pip install -e ".[peers]"

One that cannot be imported is reported as absent. Every prior is N(0, 1); one draw is taken a step, as of everybody.
"""

from __future__ import annotations

import operator

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, TraceMeanField_ELBO

from benchmarks.speed.problem import NOISE, Contestant, Problem, Step, adam_step, network
from benchmarks.speed.through_pyro import adam

__all__ = ["PEERS"]


def bayesian_torch(problem: Problem, kind: str) -> Step:
    """``dnn_to_bnn`` and ``get_kl_loss``."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = network(problem)
    settings = dict(prior_mu=0.0, prior_sigma=1.0, posterior_mu_init=0.0, posterior_rho_init=-3.0)
    dnn_to_bnn(net, {**settings, "type": kind, "moped_enable": False, "moped_delta": 0.5})
    net = net.to(problem.device)
    return adam_step(problem, net, lambda x, y: problem.nll(net(x), y) + get_kl_loss(net) / problem.rows)


def tyxe(problem: Problem) -> Step:
    """``VariationalBNN`` with its own AutoNormal guide, trained by the SVI that its ``fit`` makes."""
    import tyxe

    # TyXe 0.0.2 calls pyro.util.deep_getattr, which Pyro 1.9 has no more; that is all it needs to run.
    pyro.util.deep_getattr = lambda module, name: operator.attrgetter(name)(module)
    net = network(problem).to(problem.device)
    zero, one = torch.zeros((), device=problem.device), torch.ones((), device=problem.device)
    if problem.regression:
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(problem.rows, scale=NOISE)
    else:
        likelihood = tyxe.likelihoods.Categorical(problem.rows)
    bnn = tyxe.VariationalBNN(net, tyxe.priors.IIDPrior(dist.Normal(zero, one)), likelihood, tyxe.guides.AutoNormal)
    step = SVI(bnn.model, bnn.guide, adam(problem), loss=TraceMeanField_ELBO()).step
    return (lambda x, y: step(x, y.unsqueeze(-1))) if problem.regression else step


def torch_blue(problem: Problem) -> Step:
    """``convert_to_vimodule`` and ``AnalyticalKullbackLeiblerLoss``, one draw a step, as of everybody."""
    from torch_blue import vi
    from torch_blue.vi.distributions import Categorical, MeanFieldNormal

    net = network(problem)
    vi.convert_to_vimodule(net, prior=MeanFieldNormal(), variational_distribution=MeanFieldNormal())
    net = net.to(problem.device)
    kind = MeanFieldNormal if problem.regression else Categorical
    loss = vi.KullbackLeiblerLoss(kind(), dataset_size=problem.rows)
    return adam_step(problem, net, lambda x, y: loss(net(x, samples=1), y))


PEERS: dict[str, Contestant] = {
    "bayesian-torch": Contestant(
        lambda p: bayesian_torch(p, "Reparameterization"), "LinearReparameterization", "bayesian_torch", modules=True
    ),
    "bayesian-torch Flipout": Contestant(
        lambda p: bayesian_torch(p, "Flipout"), "LinearFlipout", "bayesian_torch", modules=True
    ),
    "TyXe": Contestant(tyxe, "VariationalBNN", "tyxe", modules=True),
    "torch_blue": Contestant(torch_blue, "convert_to_vimodule", "torch_blue", modules=True),
}
