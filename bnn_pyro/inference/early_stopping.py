"""Early stopping: training ends when the NLL of held-out rows no longer falls; the weights of the lowest are kept.

    NLL(t) = −1/M Σ_m log p(y_m | x_m, w_t, σ_t),     σ_t² = 1/(M − 2) Σ_m (y_m − f(x_m, w_t))²

Of all multiples of that sum, 1/(M − 2) gives new rows the highest expected log density. For a guide q the NLL is that
of an equal mixture of draws of w. Held out are the validation rows, or some training rows if the data have none or few
(Prechelt 1998, doi:10.1007/3-540-49430-8_3). They choose the epoch and a learned noise σ: by the residuals of training
rows σ would fall to 0, as the network overfits them.

If steps are noisy, by mini-batches or by draws of q, then as long as the learning rate is constant (``epochs`` is left
out) the held-out rows score, and the fit keeps, a running mean of the iterates w_1 … w_n, weights or parameters of q.
It has polynomial decay, γ = 3 (Shamir & Zhang 2013, arXiv:1212.1824; for q see Dhaka et al. 2020, arXiv:2009.00666):

    w̄_n = w̄_{n−1} + (γ + 1) / (n + γ) · (w_n − w̄_{n−1}) = 4 Σ_i i (i + 1) (i + 2) w_i / (n (n + 1) (n + 2) (n + 3))

When patience is over, the training of q ends. The learning rate of a point then falls, until patience is over again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.datasets.rows import part_of
from bnn_pyro.distributed import Ranks
from bnn_pyro.inference.potential import log_likelihood, mixtures
from bnn_pyro.parts.guides import MeanFieldNormal, PointMass, inverse_softplus
from bnn_pyro.parts.nets import in_mode
from bnn_pyro.posterior import Posterior, model_buffers
from bnn_pyro.progress import announce

HELD_OUT = 0.15  # share of the training rows that are held out if the data have no validation rows
MIN_HELD_OUT = 8  # smallest number of held-out rows, unless that is more than a third of all rows
#: Patience by rule, in steps for points and for q (whose growing σ first worsens predictions), and at least in epochs.
PATIENT_STEPS, GUIDE_STEPS, PATIENT_EPOCHS = 300, 1000, 10
#: A guide is scored by DRAWS draws, on at most SCORED · (training rows) or MIN_SCORED held-out rows if that is more.
DRAWS, SCORED, MIN_SCORED = 8, 1 / 8, 256
#: A q counts as better if the held-out rows favour it by EVIDENCE nats in total (a Bayes factor of 55, about the cost
#: of one outlier) and by this number of standard errors of the paired differences.
EVIDENCE, ERRORS = 4.0, 2.0
GAMMA, ITERATES = 3, 10  # γ of the running mean, and number of iterates of an epoch that enter it
SMOOTHED = 5  # for a guide, means over this number of lines of the trace are compared
ROWS = 10  # number of training rows for each weight from which the prior cannot outweigh them
#: At the end σ is multiplied by NARROWER, at most NARROWINGS times, while LAST_DRAWS draws score better.
LAST_DRAWS, NARROWER, NARROWINGS = 32, math.sqrt(0.5), 12


def hold_out(data: Dataset, seed: int) -> Dataset:
    """The data with validation rows: their own, or a share of the training rows, chosen by the seed.

    For a target with a noise, training rows are added to few validation rows, up to ``MIN_HELD_OUT`` or a third of all
    rows; but not if rows were divided by groups or time, or if they stay in their file.
    """
    x, y, num_val = data.x_train, data.y_train, len(data.x_val)
    least = min(MIN_HELD_OUT, (len(x) + num_val) // 3)
    alone = num_val and (not isinstance(x, Tensor) or data.split.get("kind") in ("groups", "time"))
    more = 0 if num_val else round(HELD_OUT * len(x))
    more = max(more, least - num_val) if fewest(data) <= least and not alone else more
    if more == 0:
        return data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    training, stopping = order.tensor_split([len(x) - more])
    x_val, y_val = part_of(x, stopping), y[stopping]
    if num_val:
        x_val, y_val = torch.cat([data.x_val, x_val]), torch.cat([data.y_val, y_val])
    return replace(data, x_train=part_of(x, training), y_train=y[training], x_val=x_val, y_val=y_val)


def fewest(data: Dataset) -> int:
    """Smallest number of held-out rows for early stopping by rule; more for labels, which have no noise to overfit."""
    return MIN_HELD_OUT if data.schema.has_classes or data.schema.task == "labels" else 2


def chosen_settings(
    options: Sequence[dict[str, Any]], data: Dataset, seed: int, fit: Callable[..., Posterior], show: bool = False
) -> dict[str, Any]:
    """The settings whose ``fit(settings, data)`` has the lowest NLL of held-out rows; {} if these are too few."""
    split, names = hold_out(data, seed), ", ".join(options[0])
    if (num := len(split.x_val)) < MIN_HELD_OUT:
        return {}
    announce(f"{names}: a fit with each of {len(options)} values, compared by the NLL of {num:,} held-out rows", show)
    log_p = [mixture_log_p(fit(settings, split), split.x_val, split.y_val, LAST_DRAWS).sum() for settings in options]
    chosen = options[int(torch.stack(log_p).nan_to_num(-math.inf).argmax())]
    announce(f"{names}: {', '.join(map(str, chosen.values()))} has the lowest NLL of these rows and is fitted", show)
    return chosen


def default_patience(data: Dataset, batch_size: int, steps: int = PATIENT_STEPS) -> int:
    """Patience by rule in epochs; 0: too few rows are held out.   data: from :func:`hold_out`.   batch_size: 0: all."""
    if len(data.x_val) < fewest(data):
        return 0
    num = len(data.x_train)
    return max(PATIENT_EPOCHS, math.ceil(steps / math.ceil(num / (batch_size or num))))


class EarlyStopping:
    """Scores a point or its running mean by the NLL (nats per row) of rows x, y; keeps the best.   patience: epochs."""

    def __init__(self, model: nn.Module, point: nn.Module, x: Tensor, y: Tensor, patience: int) -> None:
        self.model, self.point, self.x, self.y, self.patience = model, point, x, y, patience
        self.parameters = [p for p in point.parameters() if p.requires_grad]
        #: {site: value} of a learned noise, fitted to these rows with the present weights.
        self.noise: dict[str, Tensor] = {}
        #: For checkpoints: the best weights so far, their NLL and epoch, and the number of iterates in "mean".
        self.state: dict[str, Any] = {"best": self._weights(), "best_nll": math.inf, "best_epoch": 0.0, "iterates": 0}

    @torch.no_grad()
    def update_mean(self, step: int, per_epoch: int, rate_falls: bool) -> None:
        """Add the weights after this step to the running mean, if due; drop the mean once the learning rate falls."""
        noisy = per_epoch > 1 or not isinstance(self.point, PointMass)
        if rate_falls:
            self.state.pop("mean", None)
        elif noisy and step % max(1, per_epoch // ITERATES) == 0:
            num = self.state["iterates"] = self.state["iterates"] + 1
            weights = [p.detach() for p in self.parameters]
            if num == 1:
                self.state["mean"] = [w.clone() for w in weights]
            torch._foreach_lerp_(self.state["mean"], weights, (GAMMA + 1) / (num + GAMMA))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the weights by the running mean, if there is one, within a ``with`` block."""
        weights = [p.data for p in self.parameters]
        try:
            for p, mean in zip(self.parameters, self.state.get("mean", weights), strict=True):
                p.data = mean
            yield
        finally:
            for p, value in zip(self.parameters, weights, strict=True):
                p.data = value

    def evaluate(self, epoch: float, ranks: Ranks) -> float:
        """The mean NLL after this epoch; the weights are kept if it is the lowest."""
        with self.averaged():
            nll = self.score(ranks)
            self.add(epoch, nll)
        return nll

    @torch.no_grad()
    def score(self, ranks: Ranks) -> float:
        """The mean NLL with the present weights and the noise fitted to them. Each rank scores its share of rows."""
        x, y, num = ranks.part(self.x), ranks.part(self.y), len(self.x)
        weights = {site: value[None] for site, value in self.point.sites().items()}
        with in_mode(self.model, training=False):
            likelihood = getattr(self.model, "likelihood", None)
            if getattr(likelihood, "initial", None) and not likelihood.has_classes:
                parts = ((p, p.transform.inv(y_part)) for p, y_part in mixtures(self.model, weights, x, y))
                squares = [(y_part - p.untransformed.mean).square().sum(0) for p, y_part in parts]
                squares = torch.stack([self.y.new_zeros(self.y.shape[1:]), *squares])  # (chunks, *targets)
                total = ranks.total(squares.sum(0, dtype=torch.float64))
                self.noise = likelihood.fitted_noise((total / max(num - 2, 1)).sqrt().to(self.y.dtype))
                weights |= {site: value[None] for site, value in self.noise.items()}
            scores = log_likelihood(self.model, weights, x, y).sum(dtype=torch.float64)
        return -ranks.total(scores).item() / num

    def add(self, epoch: float, nll: float) -> None:
        """Keep the weights after this epoch if their mean NLL is the lowest so far."""
        if nll < self.state["best_nll"]:
            self.state |= {"best": self._weights(), "best_nll": nll, "best_epoch": epoch}

    def enough(self, epochs: list[float], since: float = 0.0) -> bool:
        """Whether patience is over at the last of these epochs, counted from the best one or from a later ``since``."""
        return bool(epochs) and epochs[-1] - max(self.state["best_epoch"], since) >= self.patience

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the best weights and the noise fitted to them."""
        best = self.state["best"]
        self.point.load_state_dict(best.get("weights", best))  # in an earlier version "best" were the weights alone
        self.model.load_state_dict(best.get("buffers", {}), strict=False)
        for site, value in best.get("noise", {}).items():
            self.point.sites()[site].copy_(value)

    finish = restore  # called after the last step

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights, the noise, and the model's buffers, which training may change."""
        parts = {"weights": self.point.state_dict(), "noise": self.noise, "buffers": model_buffers(self.model)}
        return {part: {name: value.clone() for name, value in values.items()} for part, values in parts.items()}


class GuideStopping(EarlyStopping):
    """Early stopping of a guide, scored by draws.

    If the prior outweighs the rows, σ grows on the way to the highest ELBO, and an earlier q predicts better. Held-out
    rows, the validation rows of ``data`` or a part of them, choose it by a mean NLL over ``SMOOTHED`` lines of the
    trace. With ``ROWS`` rows for each weight or more the prior cannot outweigh them, and the last q is kept unless an
    earlier one is better by more than chance. At the end σ is divided by √2 as long as that is better likewise.
    """

    def __init__(self, model: nn.Module, guide: nn.Module, data: Dataset, patience: int) -> None:
        self.posterior = Posterior(model, data.schema, guide=guide)
        #: The factor by which every σ of a mean-field q was multiplied at the end.
        self.factor = 1.0
        self.few_weights = ROWS * sum(v.numel() for v in model.initial.values()) <= len(data.x_train)
        most = max(MIN_SCORED, int(SCORED * len(data.x_train)))
        rows = torch.linspace(0, len(data.x_val) - 1, min(most, len(data.x_val))).round().long()
        super().__init__(model, guide, part_of(data.x_val, rows), data.y_val[rows], patience)

    def score(self, ranks: Ranks) -> float:
        """The mean NLL of the mixture of draws from the present guide; each rank scores its share of the rows."""
        log_p = mixture_log_p(self.posterior, ranks.part(self.x), ranks.part(self.y))
        self.log_p = ranks.gather_rows(log_p, len(self.x))
        return -self.log_p.mean().item()

    def add(self, epoch: float, nll: float) -> None:
        """See ``EarlyStopping``."""
        recent = [*self.state.get("recent", ()), nll][-SMOOTHED:]
        super().add(epoch, sum(recent) / len(recent))
        self.state |= {"recent": recent, "last_epoch": epoch}

    def finish(self) -> None:
        """Restore the q to keep, and divide σ by √2 as long as that is better by more than chance."""
        if self.few_weights:
            with self.averaged():
                last, log_p = self._weights(), mixture_log_p(self.posterior, self.x, self.y, LAST_DRAWS)
            self.restore()
            if not _is_better(mixture_log_p(self.posterior, self.x, self.y, LAST_DRAWS) - log_p):
                self.state |= {"best": last, "best_epoch": self.state.get("last_epoch", self.state["best_epoch"])}
        self.restore()
        log_p = mixture_log_p(self.posterior, self.x, self.y, LAST_DRAWS)
        for _ in range(NARROWINGS):
            self._narrow(self.factor * NARROWER)
            narrow = mixture_log_p(self.posterior, self.x, self.y, LAST_DRAWS)
            if not _is_better(narrow - log_p):
                break
            log_p, self.factor = narrow, self.factor * NARROWER
        self._narrow(self.factor)

    @torch.no_grad()
    def _narrow(self, factor: float) -> None:
        self.restore()
        for part in self.point.modules():
            if isinstance(part, MeanFieldNormal) and factor < 1:
                part.rho.copy_(inverse_softplus(part.scale * factor))


def _is_better(gain: Tensor) -> bool:
    """Whether gains of log density (N,) are more than chance."""
    return gain.sum().item() > max(EVIDENCE, ERRORS * gain.std().item() * math.sqrt(len(gain)))


@torch.no_grad()
def mixture_log_p(posterior: Posterior, x: Tensor, y: Tensor, draws: int = DRAWS) -> Tensor:
    """Log density (B,) of each row under an equal mixture of draws, float64; the draws are the same every time."""
    with in_mode(posterior.model, training=False):
        log_p = log_likelihood(posterior.model, posterior.draw(draws, seed=0), x, y)
    return log_p.double().logsumexp(0) - math.log(log_p.shape[0])
