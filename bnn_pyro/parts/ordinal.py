"""Ordered classes: one number of the network against cut points that are learned, a cumulative logit.

P(y ≤ k) = sigmoid(c_k − f),  c_0 < … < c_{K−2};    McCullagh 1980, JRSS B 42:109-142
"""

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from bnn_pyro.parts.mixtures import ClassMixture
from bnn_pyro.parts.observed import Likelihood


class OrdinalMixture(ClassMixture):
    """Mixture of Categoricals over classes that have an order, by which ``metrics.rps`` scores it."""

    task = "ordinal"


class Ordinal(Likelihood):
    """P(y ≤ k) = sigmoid(c_k − f), f (…, B, 1); c_k = c_{k−1} + exp(gap_k), a latent site "cuts" (first cut, gaps).

    Its prior is Normal around the cuts that make the K classes equally probable at f = 0: of scale 1.5 for the first
    cut, and of scale 1 for each gap, which is the logarithm of a difference.
    """

    has_classes = True
    mixture = OrdinalMixture

    def __init__(self, classes: int) -> None:
        super().__init__()
        even = torch.arange(1, classes).div(classes).logit()
        self.add_own(cuts=(torch.cat([even[:1], even.diff().log()]), torch.tensor([1.5] + [1.0] * (classes - 2))))
        self.register_buffer("sums", torch.ones(classes - 1, classes - 1).triu(), persistent=False)

    def components(self, f: Tensor) -> dist.Categorical:
        """See ``Likelihood``."""
        own = self.own("cuts")
        first, gaps = own[..., :1], own[..., 1:].exp()
        above = torch.cat([first, gaps], -1) @ self.sums.to(own.dtype) - f  # c_k − f, (…, B, K − 1)
        # log(sigmoid(a) − sigmoid(b)) = log sigmoid(a) + log sigmoid(−b) + log(1 − exp(b − a)): no digits are lost.
        end, between = torch.zeros_like(above[..., :1]), (-torch.expm1(-gaps)).log()
        tails = torch.cat([F.logsigmoid(above), end], -1) + torch.cat([end, F.logsigmoid(-above)], -1)
        return dist.Categorical(logits=tails + torch.cat([0 * first, between, 0 * first], -1))
