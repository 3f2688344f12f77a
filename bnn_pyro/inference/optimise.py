"""Settings of an optimisation that SVI and the point estimates share, and the rules of those that are left out.

With N training rows and P weights, Adam takes

    B  = N up to 512 rows, else the power of 2 nearest to √N, 64 ≤ B ≤ 256
    lr = 0.01 · (1000 / P)^(1/3), 0.001 ≤ lr ≤ 0.02

until the objective has settled (``training_loop``) or held-out rows stop it, and then half as many steps, in which the
learning rate falls, but not of a q that held-out rows choose (``early_stopping``); at most 10,000 steps in all, or 20
epochs where these are more (of wider networks: Yang & Hu 2021, arXiv:2011.14522).
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

#: Training rows up to which a step takes all of them; bounds of the rows of a step above.
WHOLE, BATCHES = 512, (64, 256)
#: Learning rate of 1,000 weights; bounds of those of any other number.
LR, LR_BOUNDS = 0.01, (1e-3, 0.02)
#: Most steps of warm-up, of networks of one's own; a gradient is clipped at this multiple of its norm's running mean.
WARMUP, CLIP = 100, 10.0
#: Most steps, and epochs that are taken in any case.
MAX_STEPS, MIN_EPOCHS = 10_000, 20


def schedule(rows: int, weights: int) -> dict[str, Any]:
    """The rule above for N training rows and P weights: {setting: value}; ``epochs`` is the most."""
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
    lr          the first learning rate, by rule of the number of weights; it falls by a cosine to ``final_lr``·lr, but
                stays where ``epochs`` is left out and held-out rows choose q
    final_lr    the last learning rate as a share of the first
    patience    epochs without a better NLL of held-out rows (of a q a mean over some epochs) after which training
                stops, with what the best had; by a rule for points, and any q of a network of one's own. The rows are
                the validation rows, or 15 % of the training rows where the data have none, or more of few. 0: all
    lr_warmup   steps in which the learning rate rises to ``lr`` in equal parts; of a network of one's own by rule a
                twentieth of the steps, 100 at most, else none
    clip        a gradient whose norm is more than so many times the running mean of those before is scaled down to
                that: by rule 10, as after one row that a narrow noise excludes Adam would hardly move; 0: never
    accumulate  parts that the rows of a step are divided in, for memory; batch normalisation is then by each part
    precision   float32, or bfloat16: the network's passes in training under ``torch.autocast``, all else in float32
    augment     draws another input from each training input in each step: a function of one in its own units (pixels in
                [0, 1]), such as a transform of torchvision; or package.module:function
    workers     processes that read and augment mini-batches ahead of the steps; with 0 it is done between them
    """

    former: ClassVar[Mapping[str, Any]] = {"optimiser": "adam"}
    #: Several processes can share one fit; its mini-batches may come from a file; and it takes ``max_minutes``.
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
        """(data whose validation rows stop the training, patience; 0: none do). Raises UserError for too few rows."""
        if self.patience == 0 or (self.patience is None and not self.stops_early(model)):
            return data, 0
        apart = hold_out(data, seed)
        if self.patience and not len(apart.x_val):
            raise UserError(f"early stopping (patience {self.patience}) needs validation rows, and of {data.name}'s "
                            f"{len(data.x_train)} training rows none can be held out: set patience to 0")  # fmt: skip
        patience = self.patience or default_patience(apart, self.resolved(model, apart).batch_size, self.patient_steps)
        return (apart, patience) if patience else (data, 0)

    def stops_early(self, model: nn.Module) -> bool:
        """Whether held-out rows stop the training by rule."""
        return True

    def resolved(self, model: nn.Module, data: Dataset) -> Self:
        """These settings with every number in them; ``epochs`` is then the most."""
        num, weights = len(data.x_train), sum(value.numel() for value in model.initial.values())
        whole = self._by_rule(schedule(num, weights))
        steps = whole.epochs * math.ceil(num / (whole.batch_size or num))
        own = getattr(model, "is_own_network", False)
        return whole._by_rule({"clip": CLIP} | ({"lr_warmup": min(WARMUP, steps // 20)} if own else {}))

    def _by_rule(self, rule: Mapping[str, Any]) -> Self:
        return replace(self, **{name: value for name, value in rule.items() if getattr(self, name) is None})

    def chosen(self, model: nn.Module, data: Dataset, trace: Trace, over: str) -> dict[str, Any]:
        """For the provenance: what the rule chose, what rows stopped the training, why the fit ended before its end."""
        apart, patience = self.held_out(model, data, 0)
        rule = plain(self.resolved(model, apart)) | {"epochs": round(trace["epoch"][-1])}
        chosen = {k: rule[k] for k in ("epochs", "batch_size", "lr", "scale_lr", "lr_warmup", "clip")
                  if getattr(self, k, 0) is None and rule.get(k) is not None}  # fmt: skip
        if over:
            warnings.warn(f"{over}: the weights of then are kept", stacklevel=4)
        known, num = len(data.x_val), len(data.x_train)
        of = f"of {known + num} training and validation rows" if known else f"of {num} training rows"
        of = "validation rows" if len(apart.x_val) == known else of
        about = {"early_stopping": {"rows": len(apart.x_val), "of": of, "patience": patience}} if patience else {}
        return ({"schedule": chosen} if chosen else {}) | ({"stopped": over} if over else {}) | about

    def minimise(self, model: nn.Module, guide: nn.Module, data: Dataset, run: Run, **how: Any) -> tuple[Training, str]:
        """Fit ``guide``: (what did so, as ``Run.take``). Raises UserError where it is not finite."""
        training = Training(self, model, guide, data, run.seed, **how)
        over = run.take(training)
        if training.since:  # it was over within a line of the trace
            training.record()
        if training.watch is not None:
            training.watch.finish()
        training.check_guide()
        return training, over
