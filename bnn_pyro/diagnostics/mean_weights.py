"""Whether q is too wide to be of use: the network at its mean weights against the average over its draws.

Draws that predict worse than their own mean are noise, not knowledge: where there are many weights for the rows the KL
keeps q near the prior. Two numbers show that: the KL's share of −ELBO = KL − E_q[log p(y | w)], and the ratio |μ|/σ of
the median weight.
"""

from contextlib import suppress

import torch

from bnn_pyro import metrics
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior
from bnn_pyro.predictive import Prediction, predict
from bnn_pyro.pruning import signal_to_noise


def against_mean_weights(posterior: Posterior, prediction: Prediction, data: Dataset) -> dict[str, float]:
    """{nll_over_mean_weights and its _low and _high, in nats of a test row; kl_share, signal_to_noise}, what applies.

    prediction: of the test rows.   Empty for stored draws, and a q whose weights have no mean.
    """
    try:
        alone = predict(posterior.at_mean_weights(), data.x_test)
        difference = metrics.paired("nll", prediction, alone, data.y_test)
    except (UserError, metrics.Undefined):
        return {}
    name = "nll_over_mean_weights"
    scores = {name: difference.value, f"{name}_low": difference.low, f"{name}_high": difference.high}
    kl, fit = (posterior.trace.get(key) or [0.0] for key in ("kl", "log_likelihood"))
    if kl[-1] > 0 > fit[-1]:
        scores["kl_share"] = kl[-1] / (kl[-1] - fit[-1])
    with suppress(UserError):
        ratios = torch.cat([ratio.flatten() for ratio in signal_to_noise(posterior).values()])
        scores["signal_to_noise"] = ratios.median().item()
    return scores
