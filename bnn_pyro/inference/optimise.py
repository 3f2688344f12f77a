"""The settings of optimisation that SVI and the point estimates share, and the rules for those that are left out.

With N training rows and P weights, Adam uses

    B  = N up to 512 rows, else the power of 2 nearest to √N, 64 ≤ B ≤ 256
    lr = 0.01 · (1000 / P)^(1/3), 0.001 ≤ lr ≤ 0.02          (for wider networks: Yang & Hu 2021, arXiv:2011.14522)

until the objective has settled (``training_loop``) or held-out rows stop it (``early_stopping``); then, except for a q
that held-out rows choose, half as many steps with a falling rate; in total at most 10,000 steps, or 20 epochs if more.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.early_stopping import PATIENT_STEPS, default_patience, hold_out
from bnn_pyro.inference.mini_batches import Augmentation
from bnn_pyro.inference.training_loop import Trace, Training
from bnn_pyro.settings import Settings, plain, setting

#: Number of training rows up to which a step takes all of them; bounds of B for more.
WHOLE, BATCHES = 512, (64, 256)
#: Learning rate for 1,000 weights; bounds of the learning rate for other numbers.
LR, LR_BOUNDS = 0.01, (1e-3, 0.02)
#: Largest number of steps of ``lr_warmup`` by rule, and ``clip`` by rule.
WARMUP, CLIP = 100, 10.0
#: Largest number of steps, unless MIN_EPOCHS epochs take more.
MAX_STEPS, MIN_EPOCHS = 10_000, 20


def schedule(rows: int, weights: int) -> dict[str, Any]:
    """The rule above for N training rows and P weights: {setting: value}; ``epochs`` is the largest number."""
    low, high = BATCHES
    size = 0 if rows <= WHOLE else min(high, max(low, 2 ** round(math.log2(math.sqrt(rows)))))
    lr = min(LR_BOUNDS[1], max(LR_BOUNDS[0], LR * (1000 / max(weights, 1)) ** (1 / 3)))
    epochs = max(MIN_EPOCHS, MAX_STEPS // math.ceil(rows / (size or rows)))
    return {"batch_size": size, "lr": float(f"{lr:.2g}"), "epochs": epochs}


@dataclass(frozen=True)
class Optimisation(Settings):
    """Settings of stochastic gradient descent; those left out follow the rules above.

    epochs      passes over the training rows; by rule until the objective has settled or held-out rows stop it
    batch_size  rows a step, by rule all of up to 512; 0 takes all rows in every step
    lr          first learning rate, by rule from the number of weights; it falls by a cosine to ``final_lr``·lr, but is
                constant if ``epochs`` is left out and held-out rows choose q
    final_lr    last learning rate as a share of the first
    patience    early stopping: training stops after so many epochs without a lower NLL of held-out rows (for a q, a
                mean over some epochs) and keeps what had the lowest, but the last q of a network of your own with ten
                rows for each weight, unless an earlier one is clearly better. By rule for points, and for q of a
                network of your own. Held out are the validation rows (if very few, with some training rows), or 15 % of
                the training rows if there are none. 0: no early stopping
    lr_warmup   steps in which the learning rate rises linearly to ``lr``; by rule a twentieth of all steps, at most
                100, for a network of your own, else 0
    clip        a gradient whose norm exceeds ``clip`` times the running mean of earlier norms is scaled down to that;
                by rule 10, as Adam takes tiny steps after one huge gradient, such as of an outlier; 0: never
    accumulate  number of parts in which the rows of a step are processed, to save memory; batch normalisation then
                normalises each part
    precision   float32, or bfloat16: the network's passes in training under ``torch.autocast``, all else in float32
    augment     data augmentation: a random function from one training input in its own units (pixels in [0, 1]) to
                another, such as a transform of torchvision; or package.module:function
    workers     number of processes that read and augment mini-batches in advance; 0: the training process does it
    """

    former: ClassVar[Mapping[str, Any]] = {"optimiser": "adam"}
    #: Whether several processes can share one fit, and whether its mini-batches may come from a file.
    divisible: ClassVar[bool] = True
    streams: ClassVar[bool] = True
    timed: ClassVar[bool] = True
    incidental: ClassVar[tuple[str, ...]] = ("workers",)
    patient_steps: ClassVar[int] = PATIENT_STEPS
    tiny: ClassVar[Mapping[str, Any]] = {"epochs": 400, "batch_size": 0, "lr": 0.05, "final_lr": 0.0, "patience": 0}

    epochs: int | None = setting(None, low=1, optional=True)
    batch_size: int | None = setting(None, low=0, optional=True)
    lr: float | None = setting(None, above=0, optional=True)
    final_lr: float = setting(0.01, low=0, high=1)
    patience: int | None = setting(None, low=0, optional=True)
    lr_warmup: int | None = setting(None, low=0, optional=True)
    clip: float | None = setting(None, low=0, optional=True)
    accumulate: int | None = setting(None, low=1, optional=True)
    precision: str | None = setting(None, choices=("float32", "bfloat16"), optional=True)
    augment: Any = setting(None, optional=True)  # noqa: RUF009 (a field of any type)
    workers: int = setting(0, low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.augment):
            object.__setattr__(self, "augment", Augmentation(self.augment))

    def held_out(self, model: nn.Module, data: Dataset, seed: int) -> tuple[Dataset, int]:
        """(data whose validation rows are held out, patience; 0: no stopping). Raises UserError for too few rows."""
        if self.patience == 0 or (self.patience is None and not self.stops_early(model)):
            return data, 0
        split = hold_out(data, seed)
        if self.patience and not len(split.x_val):
            raise UserError(f"early stopping (patience {self.patience}) needs validation rows, and of {data.name}'s "
                            f"{len(data.x_train)} training rows none can be held out: set patience to 0")  # fmt: skip
        patience = self.patience or default_patience(split, self.resolved(model, split).batch_size, self.patient_steps)
        return (split, patience) if patience else (data, 0)

    def stops_early(self, model: nn.Module) -> bool:
        """Whether there is early stopping by rule."""
        return True

    def resolved(self, model: nn.Module, data: Dataset) -> Self:
        """These settings, completed by the rules; ``epochs`` is then the largest number."""
        num, weights = len(data.x_train), sum(value.numel() for value in model.initial.values())
        completed = self._by_rule(schedule(num, weights))
        steps = completed.epochs * math.ceil(num / (completed.batch_size or num))
        is_own = getattr(model, "is_own_network", False)
        return completed._by_rule({"clip": CLIP} | ({"lr_warmup": min(WARMUP, steps // 20)} if is_own else {}))

    def _by_rule(self, rule: Mapping[str, Any]) -> Self:
        return replace(self, **{name: value for name, value in rule.items() if getattr(self, name) is None})

    def chosen(self, model: nn.Module, data: Dataset, trace: Trace, reason: str) -> dict[str, Any]:
        """For the provenance: what the rules chose, which rows stopped the training, why the fit ended early."""
        split, patience = self.held_out(model, data, 0)
        rule = plain(self.resolved(model, split)) | {"epochs": round(trace["epoch"][-1])}
        chosen = {k: rule[k] for k in ("epochs", "batch_size", "lr", "scale_lr", "lr_warmup", "clip")
                  if getattr(self, k, 0) is None and rule.get(k) is not None}  # fmt: skip
        if reason:
            warnings.warn(f"{reason}: the weights at that time are kept", stacklevel=4)
        num_val, num = len(data.x_val), len(data.x_train)
        of = f"of {num_val + num} training and validation rows" if num_val else f"of {num} training rows"
        of = "validation rows" if len(split.x_val) == num_val else of
        about = {"early_stopping": {"rows": len(split.x_val), "of": of, "patience": patience}} if patience else {}
        return ({"schedule": chosen} if chosen else {}) | ({"stopped": reason} if reason else {}) | about

    def minimise(self, model: nn.Module, guide: nn.Module, data: Dataset, run: Run, **kw: Any) -> tuple[Training, str]:
        """Fit ``guide``; returns (the training, the result of ``Run.take``). Raises UserError if it is not finite."""
        training = Training(self, model, guide, data, run.seed, **kw)
        reason = run.take(training)
        if training.since:  # it ended between two lines of the trace
            training.record()
        if training.watch is not None:
            training.watch.finish()
        training.check_guide()
        return training, reason
