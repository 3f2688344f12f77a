"""Early stopping: training ends where the NLL of held-out rows no longer falls; the weights of the lowest are kept.

    NLL(t) = −1/M Σ_m log p(y_m | x_m, w_t, σ_t),     σ_t² = 1/(M − 2) Σ_m (y_m − f(x_m, w_t))²

Of all multiples of that sum, 1/(M − 2) gives new rows the highest expected log density. Of a guide q the NLL is that of
an equal mixture of draws of w. The rows held out are the validation rows, or a share of the training rows where the
data have none or few (Prechelt 1998, doi:10.1007/3-540-49430-8_3). They choose the epoch, and a noise that is learned:
that of residuals of rows that train falls to 0 as a network learns them by heart.

While the learning rate stays, as it does first where ``epochs`` is left out, and a step is noisy, by a mini-batch or by
draws of q, these rows score a running mean of the iterates w_1 … w_n (weights, or parameters of q), which a fit keeps.
It is by polynomial decay (Shamir & Zhang 2013, arXiv:1212.1824), here with γ = 3:

    w̄_n = w̄_{n−1} + (γ + 1) / (n + γ) · (w_n − w̄_{n−1}) = 4 Σ_i i (i + 1) (i + 2) w_i / (n (n + 1) (n + 2) (n + 3))

It averages that noise away (of q see Dhaka et al. 2020, arXiv:2009.00666). Training ends when patience is over: of a
point for the second time, after the learning rate has fallen.
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

#: Share of the training rows that are held out where the data have no validation rows.
HELD_OUT = 0.15
#: Held-out rows, at least, where they are no more than a third of all.
MIN_HELD_OUT = 8
#: Patience by rule: steps of a point, of a q (whose σ grows first, with worse predictions for a while); least epochs.
PATIENT_STEPS, GUIDE_STEPS, PATIENT_EPOCHS = 300, 1000, 10
#: Draws of a guide, by the same noise every time, on at most this share of the rows that train, or this number.
DRAWS, SCORED, MIN_SCORED = 8, 1 / 8, 256
#: A q is better by more than chance where the held-out rows favour it by so many nats in all (a Bayes factor of 55:
#: about what one row that is missed costs), and by so many standard errors of the paired differences.
EVIDENCE, ERRORS = 4.0, 2.0
#: γ of the running mean; how many iterates of an epoch are in it.
GAMMA, ITERATES = 3, 10
#: Lines of the trace whose mean NLL is compared.
SMOOTHED = 5
#: Draws for the width of q at the end, which is multiplied by this, and so often at most.
LAST_DRAWS, NARROWER, NARROWINGS = 32, math.sqrt(0.5), 12


def hold_out(data: Dataset, seed: int) -> Dataset:
    """The data with validation rows: their own, or else a share of the training rows that the seed chooses.

    Of a target that has a noise, training rows join them until they are ``MIN_HELD_OUT``, or a third of all; but not
    where rows are divided by groups or time, or in their file.
    """
    x, y, known = data.x_train, data.y_train, len(data.x_val)
    least = min(MIN_HELD_OUT, (len(x) + known) // 3)
    alone = known and (not isinstance(x, Tensor) or data.split.get("kind") in ("groups", "time"))
    more = 0 if known else round(HELD_OUT * len(x))
    more = max(more, least - known) if fewest(data) <= least and not alone else more
    if more == 0:
        return data
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    rest, stopping = order.tensor_split([len(x) - more])
    x_val, y_val = part_of(x, stopping), y[stopping]
    if known:
        x_val, y_val = torch.cat([data.x_val, x_val]), torch.cat([data.y_val, y_val])
    return replace(data, x_train=part_of(x, rest), y_train=y[rest], x_val=x_val, y_val=y_val)


def fewest(data: Dataset) -> int:
    """Held-out rows below which none stop a training by rule: of labels, which have no noise that falls to 0, more."""
    return MIN_HELD_OUT if data.schema.has_classes or data.schema.task == "labels" else 2


def chosen_settings(
    options: Sequence[dict[str, Any]], data: Dataset, seed: int, fit: Callable[..., Posterior], show: bool = False
) -> dict[str, Any]:
    """The settings whose ``fit(settings, data)`` has the lowest NLL of rows of :func:`hold_out`; {} of too few rows."""
    apart, names = hold_out(data, seed), ", ".join(options[0])
    if (num := len(apart.x_val)) < MIN_HELD_OUT:
        return {}
    announce(f"{names}: a fit with each of {len(options)} values, compared by the NLL of {num:,} held-out rows", show)
    log_p = [mixture_log_p(fit(settings, apart), apart.x_val, apart.y_val, LAST_DRAWS).sum() for settings in options]
    chosen = options[int(torch.stack(log_p).nan_to_num(-math.inf).argmax())]
    announce(f"{names}: {', '.join(map(str, chosen.values()))} has the lowest NLL of these rows and is fitted", show)
    return chosen


def default_patience(data: Dataset, batch_size: int, steps: int = PATIENT_STEPS) -> int:
    """Epochs of patience by rule; 0: too few rows are held out.   data: of :func:`hold_out`.   batch_size: 0: all."""
    if len(data.x_val) < fewest(data):
        return 0
    num = len(data.x_train)
    return max(PATIENT_EPOCHS, math.ceil(steps / math.ceil(num / (batch_size or num))))


class EarlyStopping:
    """Watches the NLL (nats per row) of rows x, y by a point's running mean, and keeps the best.   patience: epochs."""

    def __init__(self, model: nn.Module, point: nn.Module, x: Tensor, y: Tensor, patience: int) -> None:
        self.model, self.point, self.x, self.y, self.patience = model, point, x, y, patience
        self.parameters = [p for p in point.parameters() if p.requires_grad]
        #: {site: value} of a learned noise by these rows, for the weights as they are.
        self.noise: dict[str, Tensor] = {}
        #: For a checkpoint: the best weights so far, with their NLL and epoch; and the number of iterates in "mean".
        self.state: dict[str, Any] = {"best": self._weights(), "best_nll": math.inf, "best_epoch": 0.0, "iterates": 0}

    @torch.no_grad()
    def update_mean(self, step: int, per_epoch: int, rate_falls: bool) -> None:
        """Take the weights after this step into the running mean, where one is due; there is none where the rate falls.

        per_epoch: steps.
        """
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
        """The running mean in place of the weights, where there is one."""
        weights = [p.data for p in self.parameters]
        try:
            for p, mean in zip(self.parameters, self.state.get("mean", weights), strict=True):
                p.data = mean
            yield
        finally:
            for p, own in zip(self.parameters, weights, strict=True):
                p.data = own

    def evaluate(self, epoch: float, ranks: Ranks) -> float:
        """The mean NLL after this epoch; the weights are kept where it is the lowest."""
        with self.averaged():
            nll = self.score(ranks)
            self.seen(epoch, nll)
        return nll

    @torch.no_grad()
    def score(self, ranks: Ranks) -> float:
        """The mean NLL by the weights as they are, and the noise that fits; each rank scores its share of the rows."""
        x, y, num = ranks.part(self.x), ranks.part(self.y), len(self.x)
        weights = {site: value[None] for site, value in self.point.sites().items()}
        with in_mode(self.model, training=False):
            likelihood = getattr(self.model, "likelihood", None)
            if getattr(likelihood, "initial", None) and not likelihood.has_classes:
                parts = ((p, p.transform.inv(y_part)) for p, y_part in mixtures(self.model, weights, x, y))
                squares = [(y_part - p.untransformed.mean).square().sum(0) for p, y_part in parts]
                squares = torch.stack([self.y.new_zeros(self.y.shape[1:]), *squares])  # of each target
                total = ranks.total(squares.sum(0, dtype=torch.float64))
                self.noise = likelihood.fitted_noise((total / max(num - 2, 1)).sqrt().to(self.y.dtype))
                weights |= {site: value[None] for site, value in self.noise.items()}
            scores = log_likelihood(self.model, weights, x, y).sum(dtype=torch.float64)
        return -ranks.total(scores).item() / num

    def seen(self, epoch: float, nll: float) -> None:
        """The weights after this epoch have this mean NLL."""
        if nll < self.state["best_nll"]:
            self.state |= {"best": self._weights(), "best_nll": nll, "best_epoch": epoch}

    def enough(self, epochs: list[float], since: float = 0.0) -> bool:
        """Whether to stop after the last of these epochs; patience begins anew at the epoch ``since``."""
        return bool(epochs) and epochs[-1] - max(self.state["best_epoch"], since) >= self.patience

    @torch.no_grad()
    def restore(self) -> None:
        """Put the best weights back, and the noise that fitted."""
        best = self.state["best"]
        self.point.load_state_dict(best.get("weights", best))  # those of an earlier version are the weights alone
        self.model.load_state_dict(best.get("buffers", {}), strict=False)
        for site, value in best.get("noise", {}).items():
            self.point.sites()[site].copy_(value)

    finish = restore  # what is done after the last step

    def _weights(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the weights, of the noise, and of the model's buffers, which training may change too."""
        parts = {"weights": self.point.state_dict(), "noise": self.noise, "buffers": model_buffers(self.model)}
        return {part: {name: value.clone() for name, value in values.items()} for part, values in parts.items()}


class GuideStopping(EarlyStopping):
    """The same by draws of a guide, whose parameters are kept.

    Where the prior outweighs the rows a q on the way to the highest ELBO, on which σ rises, predicts better than that
    one, so that held-out rows decide, by the mean NLL of the last ``SMOOTHED`` lines of the trace: of a single one
    the lowest is partly chance. In the end σ is divided by √2 as long as they gain more than by chance.

    data: with the rows held out as validation rows, of which some are scored where they are many.
    """

    def __init__(self, model: nn.Module, guide: nn.Module, data: Dataset, patience: int) -> None:
        self.posterior = Posterior(model, data.schema, guide=guide)
        #: What every σ of a mean-field q was multiplied by at the end.
        self.factor = 1.0
        most = max(MIN_SCORED, int(SCORED * len(data.x_train)))
        rows = torch.linspace(0, len(data.x_val) - 1, min(most, len(data.x_val))).round().long()
        super().__init__(model, guide, part_of(data.x_val, rows), data.y_val[rows], patience)

    def score(self, ranks: Ranks) -> float:
        """The mean NLL of the mixture by the guide as it is; each rank scores its share of the rows."""
        own = mixture_log_p(self.posterior, ranks.part(self.x), ranks.part(self.y))
        self.log_p = ranks.joined_rows(own, len(self.x))
        return -self.log_p.mean().item()

    def seen(self, epoch: float, nll: float) -> None:
        """See ``EarlyStopping``."""
        recent = [*self.state.get("recent", ()), nll][-SMOOTHED:]
        super().seen(epoch, sum(recent) / len(recent))
        self.state["recent"] = recent

    def finish(self) -> None:
        """The best q; σ divided by √2 as long as that is better by more than chance."""
        self.restore()
        log_p = mixture_log_p(self.posterior, self.x, self.y, LAST_DRAWS)
        for _ in range(NARROWINGS):
            self._narrow(self.factor * NARROWER)
            narrow = mixture_log_p(self.posterior, self.x, self.y, LAST_DRAWS)
            gain = narrow - log_p
            if not gain.sum().item() > max(EVIDENCE, ERRORS * gain.std().item() * math.sqrt(len(gain))):  # by chance
                break
            log_p, self.factor = narrow, self.factor * NARROWER
        self._narrow(self.factor)

    @torch.no_grad()
    def _narrow(self, factor: float) -> None:
        self.restore()
        for part in self.point.modules():
            if isinstance(part, MeanFieldNormal) and factor < 1:
                part.rho.copy_(inverse_softplus(part.scale * factor))


@torch.no_grad()
def mixture_log_p(posterior: Posterior, x: Tensor, y: Tensor, draws: int = DRAWS) -> Tensor:
    """Log-density of each row by an equal mixture of draws, the same ones every time: (B,) float64."""
    with in_mode(posterior.model, training=False):
        log_p = log_likelihood(posterior.model, posterior.draw(draws, seed=0), x, y)
    return log_p.double().logsumexp(0) - math.log(log_p.shape[0])
