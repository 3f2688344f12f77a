"""The loop of mini-batches that maximises an ELBO: what an optimisation is between two steps.

By Adam (Kingma & Ba 2015, arXiv:1412.6980), whose noise a learning rate that falls by a cosine averages away, or a
running mean (``early_stopping``). Each step is a function of (parameters, optimiser state, generator state, number), so
a checkpoint goes on to the very same result. Parts of a step's rows have a draw of w each, and a share of the KL.

Where the fit has several processes (torchrun), each step's rows are divided among them. With R ranks, rank r's
objective is R · N/B · Σ_{its rows} log p(y | x, w_r) − KL, w_r a draw of its own; their mean estimates the same ELBO.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_map_only

from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import here
from bnn_pyro.errors import UserError, diverged
from bnn_pyro.inference.early_stopping import EarlyStopping, GuideStopping
from bnn_pyro.inference.log_joint import Objective
from bnn_pyro.inference.mini_batches import MiniBatches, Step
from bnn_pyro.isolation import generator_state, set_generator_state, set_stream
from bnn_pyro.parts.guides import MeanFieldNormal, PointMass
from bnn_pyro.parts.nets import in_mode, keep_freed_memory
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import model_buffers, moved_buffers

#: The weight of a step in the running mean of the gradient's norm, at least.
MEMORY = 0.01
#: Lines of the trace that a verdict takes; standard errors and √N nats that are no rise; √N nats that may be missed.
LINES, ERRORS, NO_RISE, MOST_RISE = 20, 2.0, 0.3, 1.0
#: Parameters of guides that σ is a function of: softplus(ρ), exp(½ log σ²).
LOG_SCALES = ("rho", "log_variance")
#: The first learning rate of points that were trained already, as a share of the others'.
POINTS_LR = 0.1
Trace = dict[str, list[float]]  # a column of numbers by its name, such as epoch and elbo


@dataclass
class Training:
    """A fit between two steps. The model is in training mode in them, where dropout draws its masks: for points alone.

    settings       an ``Optimisation``
    seed           of the order of mini-batches
    latent         what the KL is multiplied by
    num_particles  draws of w that estimate the ELBO in a step
    watch          an ``EarlyStopping``: its ``validation_nll`` in the trace is of its running mean, if it has one
    """

    settings: Any
    model: nn.Module
    guide: nn.Module
    data: Dataset
    seed: int = 0
    latent: float = 1.0
    num_particles: int = 1
    watch: Any = None

    def __post_init__(self) -> None:
        keep_freed_memory()
        #: The step after which the learning rate falls; None until the objective has settled, or where it never does.
        self.decay: int | None = None if self.settings.epochs is None else 0
        settings = self.settings = self.settings.resolved(self.model, self.data)
        self.x, self.y, self.ranks = self.data.x_train, self.data.y_train, here()
        drawn = not (isinstance(self.guide, PointMass) or getattr(self.model, "points", ()))
        self.without_masks = net = getattr(self.model, "net", None) if drawn else None
        #: Layers that keep averages of their own, which training mode alone updates.
        self.averaging: list[nn.Module] = []
        if net is not None and any(p._buffers and not isinstance(p, _NormBase) for p in net.modules()):
            moved = moved_buffers(self.model, self.x[:32], self.y[:32])
            self.averaging = [self.model.get_submodule(name.rpartition(".")[0]) for name in moved]
        num, size = len(self.x), settings.batch_size
        self.objective = self.ranks.averaged(Objective(self.model, self.guide, self.num_particles))
        self.optimiser = self._adam(getattr(settings, "scale_lr", None) or settings.lr)
        if isinstance(self.model, BayesianNet):
            self.model.precision = settings.precision
        elif settings.precision == "bfloat16":
            raise UserError("precision bfloat16 is for networks whose weights are sites, not activations; leave it out")
        self.per_epoch = math.ceil(num / size) if 0 < size < num else 1
        self.total = self.per_epoch * settings.epochs
        self.window = self.per_epoch * math.ceil(settings.epochs / 1000)  # steps that make one line of the trace
        self.first = self.step = self.since = 0
        self.jointly_drawn = [part for part in self.guide.modules() if isinstance(part, MeanFieldNormal)]
        names = ["epoch", "elbo", "log_likelihood", "kl", *([] if self.watch is None else ["validation_nll"])]
        self.trace: Trace = {name: [] for name in names}
        self.norm: Tensor | None = None  # the running mean of the gradient's
        # Of the steps since the last line, in one tensor: many small ones would keep the allocator from freeing.
        self.figures = torch.empty(self.window, 2, dtype=torch.float64, device=self.x.device)
        if self.ranks.rank:
            set_stream(self.seed, self.ranks.rank, 0)

    def _adam(self, scale_lr: float, points_lr: float = POINTS_LR) -> torch.optim.Adam:
        """With a group for each first learning rate, ``initial_lr`` where it is not ``lr``."""
        trained, lr, groups = getattr(self.model, "is_pretrained", False), self.settings.lr, {self.settings.lr: []}
        for name, parameter in self.guide.named_parameters():
            rate = scale_lr if name.rpartition(".")[2] in LOG_SCALES else lr
            groups.setdefault(points_lr * lr if trained and name.startswith("points.") else rate, []).append(parameter)
        made = [dict(params=ps) | ({} if rate == lr else {"initial_lr": rate}) for rate, ps in groups.items()]
        return torch.optim.Adam(made, lr=lr, fused=True)

    def steps(self) -> Iterator[dict[str, float] | None]:
        """Those that are left, and what to show after a line of the trace."""
        batches = MiniBatches(self.data, self.seed, self.settings.augment)
        loaded = batches.load(self.rows_of_steps(), self.settings.workers)
        while self.step < self.total and not (self.decay is not None and self._over()):
            self.advance(*next(loaded))
            yield self.record() if self.step % self.window == 0 or self.step == self.total else None

    def rows_of_steps(self) -> Iterator[Step]:
        """Rows of each step that is left; an epoch's order is a function of (seed, epoch) alone, as resuming needs."""
        start = self.step
        for epoch in itertools.count(start // self.per_epoch):
            parts = [slice(None)]
            if self.per_epoch > 1:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                parts = torch.randperm(len(self.x), generator=generator).to(self.x.device).tensor_split(self.per_epoch)
            yield from ((i, rows) for i, rows in enumerate(parts, epoch * self.per_epoch) if i >= start)

    def advance(self, x: Tensor, y: Tensor) -> None:
        """One step. Raises UserError where the likelihood is given parameters that are not finite."""
        settings = self.settings
        for group in self.optimiser.param_groups:
            group["lr"] = group.get("initial_lr", settings.lr) * self._share_of_lr()
        for part in self.jointly_drawn:
            part.clear_gradients()
        self.optimiser.zero_grad(set_to_none=True)  # before the forward pass, which needs the memory
        # Pyro's checks of shapes and supports tell what is wrong with a model in its first step.
        checks = nullcontext() if self.step == self.first else pyro.validation_enabled(False)
        rows, (x, y, factor) = len(x), self.ranks.share_of_step(x, y, len(self.x))
        parts = max(1, min(settings.accumulate or 1, rows // self.ranks.size))  # as many on all ranks
        x = x.clone() if self.per_epoch == 1 else x  # which a network may change, as by a mask
        figures = self.figures[self.since].zero_()
        try:
            with checks, in_mode(self.model, training=True), self._without_masks():
                for x_part, y_part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
                    share = len(x_part) / len(x)
                    objective, log_likelihood = self.objective(x_part, y_part, factor, self.latent * share)
                    (-objective).backward()
                    figures += torch.stack([objective.detach(), log_likelihood])
        except ValueError as refused:  # a likelihood is refused its NaN parameters before there is a loss
            if "constraint" not in str(refused):
                raise
            raise diverged("loss became nan at", self.step + 1, settings.lr) from None
        if settings.clip:
            self._clip(settings.clip)
        self.optimiser.step()
        self.step, self.since = self.step + 1, self.since + 1
        if self.watch is not None:
            self.watch.update_mean(self.step, self.per_epoch, self.decay is not None)

    @contextmanager
    def _without_masks(self) -> Iterator[None]:
        """Where weights are drawn p(y | x, w) has none: with them its noise is found larger than predictions are."""
        if (net := self.without_masks) is None:
            yield
            return
        recurrent = {part: part.dropout for part in net.modules() if isinstance(part, nn.RNNBase)}  # cuDNN's must train
        kept = [p for name, p in net.named_modules() if isinstance(p, _NormBase) or "parametrizations." in name]
        try:
            for part in recurrent:
                part.dropout = 0.0
            with in_mode(net, training=False), in_mode(*kept, *recurrent, training=True):
                for part in self.averaging:  # not what is in them
                    part.training = True
                yield
        finally:
            for part, dropout in recurrent.items():
                part.dropout = dropout

    def _share_of_lr(self) -> float:
        first = self.step if self.decay is None else self.decay
        fallen = 0.5 * (1 + math.cos(math.pi * (self.step - first) / (self.total - first)))
        final, warmup = self.settings.final_lr, self.settings.lr_warmup or 0
        return (final + (1 - final) * fallen) * min(1.0, (self.step + 1) / max(1, warmup))

    def _clip(self, most: float) -> None:
        gradients = [p.grad for p in self.guide.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        bound = norm if self.norm is None else most * self.norm
        if norm.is_cuda or norm > bound:  # without waiting for a GPU
            torch._foreach_mul_(gradients, (bound / norm).clamp_max(1.0))
        self.norm = norm if self.norm is None else self.norm.lerp(norm.minimum(bound), max(MEMORY, 1 / (self.step + 1)))

    def record(self) -> dict[str, float]:
        """Add a line to the trace; what to show of it."""
        elbo, likelihood = self._recent().mean(0).tolist()
        line = [self.step / self.per_epoch, elbo, likelihood, likelihood - elbo]
        figures = {"ELBO/N": elbo / len(self.x)}
        if self.watch is not None:
            try:
                figures["validation NLL"] = self.watch.evaluate(line[0], self.ranks)
            except UserError as refused:
                self.check_guide()
                raise UserError(f"held-out rows: {refused}") from None
            line.append(figures["validation NLL"])
        for name, value in zip(self.trace, line, strict=True):
            self.trace[name].append(value)
        self.since = 0
        over = self._over() or (type(self.watch) is not EarlyStopping and settled(self.trace["elbo"], len(self.x)))
        if self.decay is None and isinstance(self.watch, GuideStopping):  # its running mean needs no lower rate
            self.total = self.step if over and self.watch.state["best_epoch"] < line[0] else self.total
        elif self.decay is None and (3 * self.step >= 2 * self.total or over):
            self._decay_from(self.step)
        return figures

    def _over(self) -> bool:  # patience begins anew where the learning rate falls
        return self.watch is not None and self.watch.enough(self.trace["epoch"], (self.decay or 0) / self.per_epoch)

    def _decay_from(self, step: int) -> None:  # the learning rate falls, for half as many steps as there were
        self.decay, self.total = step, step + self.window * math.ceil(step / self.window / 2)

    def _recent(self) -> Tensor:
        """(steps, 2) since the last line of the trace, means over the ranks. Raises UserError where not finite."""
        figures = self.ranks.total(self.figures[: self.since]) / self.ranks.size
        check_finite(figures, self.step, self.settings.lr)
        return figures

    def check_guide(self) -> None:
        """Raises UserError where a parameter is not finite, or not the same on all ranks."""
        with self.ranks.agreed():
            # A finite loss can have a gradient that is not: its harm shows in the weights, before the next loss.
            if not all(bool(torch.isfinite(p).all()) for p in self.guide.parameters()):
                raise diverged("weights stopped being finite at", self.step, self.settings.lr)
        self.ranks.check_alike(self.guide, f"after step {self.step:,}")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold. Raises UserError where something is not finite."""
        figures = self._recent()
        self.check_guide()
        generators = self.ranks.gather(generator_state())
        state = {name: getattr(self, name) for name in ("step", "total", "decay", "trace", "norm")}
        state |= {"recent": figures.clone(), "watch": self.watch and self.watch.state}  # of a part, all would be saved
        state |= {"guide": self.guide.state_dict(), "optimiser": self.optimiser.state_dict()}
        return dict(state, buffers=model_buffers(self.model), generators=generators[0], others=generators[1:])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.guide.load_state_dict(state["guide"])
        lr = self.settings.lr
        rates = itertools.product((getattr(self.settings, "scale_lr", None) or lr, lr), (POINTS_LR, 1.0))
        begun = [len(group["params"]) for group in state["optimiser"]["param_groups"]]
        for scale_lr, points_lr in rates:  # of an earlier version with fewer of them: it goes on with these
            self.optimiser = self._adam(scale_lr, points_lr)
            if [len(group["params"]) for group in self.optimiser.param_groups] == begun:
                break
        self.optimiser.load_state_dict(state["optimiser"])
        if hasattr(self.settings, "scale_lr"):  # that with which it was begun
            own = self.optimiser.param_groups[1]["initial_lr"] if scale_lr != lr else None
            self.settings = replace(self.settings, scale_lr=own)
        self.model.load_state_dict(state.get("buffers", {}), strict=False)
        self.first = self.step = state["step"]
        own = [state.get(name) for name in ("norm", "watch")]  # a checkpoint is read to the CPU
        self.norm, watch = tree_map_only(Tensor, lambda value: value.to(self.figures.device), own)
        if decay := state.get("decay"):
            self._decay_from(decay)
        self.total = state.get("total", self.total)
        self.trace, self.since = state["trace"], len(state["recent"])
        self.figures[: self.since] = state["recent"]
        if self.watch is not None and watch is not None:  # few rows watched nothing in an earlier version
            self.watch.state |= watch
        generators = [state["generators"], *state.get("others", ())]
        if self.ranks.rank < len(generators):
            set_generator_state(generators[self.ranks.rank])
        else:  # it was saved by fewer ranks
            set_stream(self.seed, self.ranks.rank, self.step)


def check_finite(recent: Sequence[Tensor] | Tensor, step: int, lr: float) -> None:
    """Raise UserError where the first figure of a line of ``recent`` is not finite, the last of them of this step."""
    if bad := [i for i, parts in enumerate(recent) if not bool(torch.isfinite(parts[0]))]:
        raise diverged(f"loss became {recent[bad[0]][0].item()} at", step - len(recent) + bad[0] + 1, lr)


def settled(objective: Sequence[float], rows: int) -> bool:
    """Whether the objective's slope over the last third of its lines is within its noise.

    objective: nats of all rows, a line the mean of equally many steps.

    The rise over that third, by least squares, is no more than 2 of its standard errors, or than 0.3·√N nats; and with
    2 of them added it is no more than √N nats, as noise that could hide more shows nothing. √N nats is one standard
    error of the log density of N rows, of which each differs by about a nat.
    """
    y = np.asarray(objective[-(len(objective) // 3) :], dtype=np.float64)
    if len(objective) < LINES:
        return False
    (slope, _), covariance = np.polyfit(np.arange(len(y)), y, 1, cov=True)
    rise, error, noise = slope * len(y), len(y) * math.sqrt(covariance[0, 0]), math.sqrt(rows)
    return bool(rise <= max(ERRORS * error, NO_RISE * noise) and rise + ERRORS * error <= MOST_RISE * noise)
