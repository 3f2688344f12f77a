"""The training loop: maximises an ELBO over mini-batches.

The optimiser is Adam (Kingma & Ba 2015, arXiv:1412.6980); its noise is averaged away by a learning rate that falls by a
cosine, or by a running mean (``early_stopping``). A step depends on parameters, optimiser, generators and number alone.

If a fit has several processes (torchrun), they divide the rows of each step. With R ranks, the objective of rank r is
R · N/B · Σ_{its rows} log p(y | x, w_r) − KL with its own draw w_r; the mean over ranks estimates the same ELBO.
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
from bnn_pyro.distributed import process_group
from bnn_pyro.errors import UserError, diverged
from bnn_pyro.inference.early_stopping import EarlyStopping, GuideStopping
from bnn_pyro.inference.log_joint import Objective
from bnn_pyro.inference.mini_batches import MiniBatches, Step
from bnn_pyro.isolation import generator_state, set_generator_state, set_stream
from bnn_pyro.parts.guides import MeanFieldNormal, PointMass
from bnn_pyro.parts.nets import in_mode, keep_freed_memory
from bnn_pyro.parts.priors import BayesianNet
from bnn_pyro.posterior import model_buffers, moved_buffers

MEMORY = 0.01  # smallest weight of a step in the running mean of the gradient's norm
#: When a fit has settled: smallest share of its steps; number of lines; standard errors; multiples of √N nats.
MIN_SHARE, LINES, ERRORS, NO_RISE, MAX_RISE = 0.2, 20, 2.0, 0.3, 1.0
LOG_SCALES = ("rho", "log_variance")  # parameters of guides that determine σ: softplus(ρ), exp(½ log σ²)
POINTS_LR = 0.1  # first learning rate of pretrained parameters without a posterior ("points"), as a share of ``lr``
Trace = dict[str, list[float]]  # columns by name, such as epoch and elbo


@dataclass
class Training:
    """The job (see ``Run.take``) of an optimisation. In its steps the model is in training mode.

    settings       an ``Optimisation``
    seed           determines the order of mini-batches
    latent         factor of the KL
    num_particles  number of draws of w that estimate the ELBO in a step
    watch          an ``EarlyStopping``, or None
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
        #: The step after which the learning rate falls; None as long as it is constant.
        self.decay: int | None = None if self.settings.epochs is None else 0
        settings = self.settings = self.settings.resolved(self.model, self.data)
        self.x, self.y, self.ranks = self.data.x_train, self.data.y_train, process_group()
        drawn = not (isinstance(self.guide, PointMass) or getattr(self.model, "points", ()))
        #: The network if its weights are drawn: then no dropout masks are; see ``_without_masks``.
        self.without_masks = net = getattr(self.model, "net", None) if drawn else None
        #: Layers with their own running statistics, which are updated in training mode alone.
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
        self.norm: Tensor | None = None  # running mean of the gradient's norm
        # (objective, log-likelihood) of the steps since the last line; one tensor, as many small ones fragment memory.
        self.figures = torch.empty(self.window, 2, dtype=torch.float64, device=self.x.device)
        if self.ranks.rank:
            set_stream(self.seed, self.ranks.rank, 0)

    def _adam(self, scale_lr: float, points_lr: float = POINTS_LR) -> torch.optim.Adam:
        """Adam with one group of parameters for each first learning rate, ``initial_lr`` if it differs from ``lr``."""
        trained, lr, groups = getattr(self.model, "is_pretrained", False), self.settings.lr, {self.settings.lr: []}
        for name, parameter in self.guide.named_parameters():
            rate = scale_lr if name.rpartition(".")[2] in LOG_SCALES else lr
            groups.setdefault(points_lr * lr if trained and name.startswith("points.") else rate, []).append(parameter)
        made = [dict(params=ps) | ({} if rate == lr else {"initial_lr": rate}) for rate, ps in groups.items()]
        return torch.optim.Adam(made, lr=lr, fused=True)

    def steps(self) -> Iterator[dict[str, float] | None]:
        """Take the steps that are left, and yield the figures to show after each line of the trace, else None."""
        batches = MiniBatches(self.data, self.seed, self.settings.augment)
        loaded = batches.load(self.rows_of_steps(), self.settings.workers)
        while self.step < self.total and not (self.decay is not None and self._over()):
            self.advance(*next(loaded))
            yield self.record() if self.step % self.window == 0 or self.step == self.total else None

    def rows_of_steps(self) -> Iterator[Step]:
        """The rows of each step that is left. The order in an epoch depends on (seed, epoch) alone, for resuming."""
        start = self.step
        for epoch in itertools.count(start // self.per_epoch):
            parts = [slice(None)]
            if self.per_epoch > 1:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                parts = torch.randperm(len(self.x), generator=generator).to(self.x.device).tensor_split(self.per_epoch)
            yield from ((i, rows) for i, rows in enumerate(parts, epoch * self.per_epoch) if i >= start)

    def advance(self, x: Tensor, y: Tensor) -> None:
        """Take one step. Raises UserError if the likelihood's parameters are not finite."""
        settings = self.settings
        for group in self.optimiser.param_groups:
            group["lr"] = group.get("initial_lr", settings.lr) * self._share_of_lr()
        for part in self.jointly_drawn:
            part.clear_gradients()
        self.optimiser.zero_grad(set_to_none=True)  # frees memory for the forward pass
        # The first step has Pyro's checks of shapes and supports, which explain errors in a model.
        checks = nullcontext() if self.step == self.first else pyro.validation_enabled(False)
        rows, (x, y, factor) = len(x), self.ranks.share_of_step(x, y, len(self.x))
        parts = max(1, min(settings.accumulate or 1, rows // self.ranks.size))  # the same number on all ranks
        x = x.clone() if self.per_epoch == 1 else x  # a network may change it in place
        figures = self.figures[self.since].zero_()
        try:
            with checks, in_mode(self.model, training=True), self._without_masks():
                for x_part, y_part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
                    share = len(x_part) / len(x)
                    objective, log_likelihood = self.objective(x_part, y_part, factor, self.latent * share)
                    (-objective).backward()
                    figures += torch.stack([objective.detach(), log_likelihood])
        except ValueError as refused:  # a distribution refuses parameters that are NaN
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
        """Switch dropout off if weights are drawn: p(y | x, w) has no masks, which would enlarge a learned noise."""
        if (net := self.without_masks) is None:
            yield
            return
        # Recurrent layers stay in training mode, which cuDNN needs for gradients, with a dropout rate of 0.
        recurrent = {part: part.dropout for part in net.modules() if isinstance(part, nn.RNNBase)}
        kept = [p for name, p in net.named_modules() if isinstance(p, _NormBase) or "parametrizations." in name]
        try:
            for part in recurrent:
                part.dropout = 0.0
            with in_mode(net, training=False), in_mode(*kept, *recurrent, training=True):
                for part in self.averaging:  # the layer itself, not its parts
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
        if norm.is_cuda or norm > bound:  # on a GPU, the comparison would wait for it
            torch._foreach_mul_(gradients, (bound / norm).clamp_max(1.0))
        self.norm = norm if self.norm is None else self.norm.lerp(norm.minimum(bound), max(MEMORY, 1 / (self.step + 1)))

    def record(self) -> dict[str, float]:
        """Add a line to the trace and return the figures to show."""
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
        may_settle = type(self.watch) is not EarlyStopping and self.step >= MIN_SHARE * self.total
        over = self._over() or (may_settle and settled(self.trace, len(self.x)))
        if self.decay is None and isinstance(self.watch, GuideStopping):  # the running mean replaces a lower rate
            self.total = self.step if over and self.watch.state["best_epoch"] < line[0] else self.total
        elif self.decay is None and (3 * self.step >= 2 * self.total or over):
            self._decay_from(self.step)
        return figures

    def _over(self) -> bool:  # patience is counted anew once the learning rate falls
        return self.watch is not None and self.watch.enough(self.trace["epoch"], (self.decay or 0) / self.per_epoch)

    def _decay_from(self, step: int) -> None:  # the learning rate falls, for half as many steps as before
        self.decay, self.total = step, step + self.window * math.ceil(step / self.window / 2)

    def _recent(self) -> Tensor:
        """Figures (steps, 2) since the last line of the trace, means over ranks. Raises UserError if not finite."""
        figures = self.ranks.total(self.figures[: self.since]) / self.ranks.size
        check_finite(figures, self.step, self.settings.lr)
        return figures

    def check_guide(self) -> None:
        """Raise UserError if a parameter is not finite, or not the same on all ranks."""
        with self.ranks.sharing_errors():
            # A finite loss can have a gradient that is not finite, which shows in the weights first.
            if not all(bool(torch.isfinite(p).all()) for p in self.guide.parameters()):
                raise diverged("weights stopped being finite at", self.step, self.settings.lr)
        self.ranks.check_same_parameters(self.guide, f"after step {self.step:,}")

    def state_dict(self) -> dict[str, Any]:
        """The contents of a checkpoint. Raises UserError if a number in it is not finite."""
        figures = self._recent()
        self.check_guide()
        generators = self.ranks.gather(generator_state())
        state = {name: getattr(self, name) for name in ("step", "total", "decay", "trace", "norm")}
        state |= {"recent": figures.clone(), "watch": self.watch and self.watch.state}  # a view would be saved whole
        state |= {"guide": self.guide.state_dict(), "optimiser": self.optimiser.state_dict()}
        return dict(state, buffers=model_buffers(self.model), generators=generators[0], others=generators[1:])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        self.guide.load_state_dict(state["guide"])
        lr = self.settings.lr
        rates = itertools.product((getattr(self.settings, "scale_lr", None) or lr, lr), (POINTS_LR, 1.0))
        begun = [len(group["params"]) for group in state["optimiser"]["param_groups"]]
        for scale_lr, points_lr in rates:  # an earlier version had fewer groups, with which its fits go on
            self.optimiser = self._adam(scale_lr, points_lr)
            if [len(group["params"]) for group in self.optimiser.param_groups] == begun:
                break
        self.optimiser.load_state_dict(state["optimiser"])
        if hasattr(self.settings, "scale_lr"):  # keep the one with which the fit began
            rate = self.optimiser.param_groups[1]["initial_lr"] if scale_lr != lr else None
            self.settings = replace(self.settings, scale_lr=rate)
        self.model.load_state_dict(state.get("buffers", {}), strict=False)
        self.first = self.step = state["step"]
        saved = [state.get(name) for name in ("norm", "watch")]  # on the CPU, to which checkpoints are read
        self.norm, watch = tree_map_only(Tensor, lambda value: value.to(self.figures.device), saved)
        if decay := state.get("decay"):
            self._decay_from(decay)
        self.total = state.get("total", self.total)
        self.trace, self.since = state["trace"], len(state["recent"])
        self.figures[: self.since] = state["recent"]
        if self.watch is not None and watch is not None:  # an earlier version had no early stopping by few rows
            self.watch.state |= watch
        generators = [state["generators"], *state.get("others", ())]
        if self.ranks.rank < len(generators):
            set_generator_state(generators[self.ranks.rank])
        else:  # the checkpoint was saved by fewer ranks
            set_stream(self.seed, self.ranks.rank, self.step)


def check_finite(recent: Sequence[Tensor] | Tensor, step: int, lr: float) -> None:
    """Raise UserError if the first number of a row of ``recent`` is not finite; its last row is of this step."""
    if bad := [i for i, parts in enumerate(recent) if not bool(torch.isfinite(parts[0]))]:
        raise diverged(f"loss became {recent[bad[0]][0].item()} at", step - len(recent) + bad[0] + 1, lr)


def settled(trace: Trace, rows: int) -> bool:
    """Whether the slopes of the ELBO and of the KL over the last third of the trace are within their noise.

    By least squares, the ELBO's rise and the KL's change must not exceed 2 standard errors or 0.3·√N nats; the rise and
    2 standard errors together not √N nats, about one standard error of the log density of N rows. The KL has little
    noise: while it changes, q still moves, even where the noise of the log-likelihood hides what is gained.
    """
    if len(trace["elbo"]) < LINES:
        return False
    (rise, error), (change, error_of_kl), noise = _rise(trace["elbo"]), _rise(trace["kl"]), math.sqrt(rows)
    flat = rise <= max(ERRORS * error, NO_RISE * noise) and abs(change) <= max(ERRORS * error_of_kl, NO_RISE * noise)
    return flat and rise + ERRORS * error <= MAX_RISE * noise


def _rise(lines: Sequence[float]) -> tuple[float, float]:
    """Return the rise of a straight line through the last third, and its standard error."""
    y = np.asarray(lines[-(len(lines) // 3) :], dtype=np.float64)
    (slope, _), covariance = np.polyfit(np.arange(len(y)), y, 1, cov=True)
    return slope * len(y), len(y) * math.sqrt(covariance[0, 0])
