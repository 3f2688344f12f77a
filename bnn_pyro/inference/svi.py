"""Stochastic variational inference, and point estimates, whose guide is a point mass: MAP, MLE, MC dropout, ensembles.

    SVI: argmax_φ ELBO(φ) = E_q[log p(y | x, w)] − KL(q_φ(w) ‖ p(w))
    MAP: argmax_w log p(y | x, w) + log p(w)          MLE: argmax_w log p(y | x, w)

The ELBO is estimated with N/B-scaled mini-batches and reparametrised draws (Blundell et al. 2015; Ranganath et al.
2014). A mean-field q is narrower than the posterior if weights are correlated.

For a point mass the KL to the prior is −log p(w); MLE multiplies it by 0. Training stops early (``early_stopping``).
Dropout averages the likelihood over masks; the result is used without masks (Srivastava et al. 2014, section 10).
"""

import copy
import math
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from bnn_pyro.checkpoint import Checkpoint, Interrupted, Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.distributed import process_group
from bnn_pyro.errors import UserError
from bnn_pyro.inference.cost import ARITHMETIC, PYRO_STEP, choose_cores, multiplications
from bnn_pyro.inference.early_stopping import GUIDE_STEPS, EarlyStopping, GuideStopping, fewest
from bnn_pyro.inference.members import restarted
from bnn_pyro.inference.optimise import Optimisation
from bnn_pyro.inference.training_loop import LOG_SCALES, Trace
from bnn_pyro.isolation import isolated
from bnn_pyro.parallel.executor import executor, on_cluster
from bnn_pyro.parallel.map import map_tasks
from bnn_pyro.parts.guides import DroppedInputs, PointMass, in_one_memory
from bnn_pyro.parts.priors import BY_TARGET
from bnn_pyro.posterior import Posterior, moved_buffers
from bnn_pyro.progress import Figures, report_progress
from bnn_pyro.settings import setting

#: ``scale_lr`` by rule for a user's own network: SCALE_LR without early stopping. With it, SLOWER · ``lr``, so that the
#: means fit the data before the scales reach the prior's; but ``lr`` if there are more than MANY weights a row, or a
#: prior is wider than by default, as it takes long until σ is as wide, and meanwhile rows are overfitted.
SCALE_LR, SLOWER, MANY = 0.03, 0.3, 45
Member = tuple[dict[str, Tensor], Trace, str]  # ({site: weights}, trace, the reason why it ended early or "")


@dataclass(frozen=True)
class SVI(Optimisation):
    """Settings of stochastic variational inference: the guide of the highest ELBO.

    num_particles  number of draws of w that estimate the ELBO in a step
    temperature    T: the KL is multiplied by T; 1 is Bayes, less is a cold posterior and is reported as such
    scale_lr       first learning rate of q's scales (of ρ in σ = softplus(ρ), of log σ²), by rule ``lr``. The rule for
                   a network of your own: 0.3·lr with early stopping, if it has at most 45 weights a row and no prior
                   wider than by default; 0.03 with ``patience=0`` and no ``lr``, as the change that ρ needs does not
                   depend on the number of weights, and ``lr`` does
    """

    converges_to: ClassVar[str] = "best in family"
    needs: ClassVar[frozenset[str]] = frozenset({"guide"})
    starts_at: ClassVar[str] = "guide"
    former: ClassVar[Mapping[str, Any]] = {**Optimisation.former, "kl_warmup": 0}
    patient_steps: ClassVar[int] = GUIDE_STEPS
    num_particles: int = setting(1, low=1)
    temperature: float = setting(1.0, above=0)
    scale_lr: float | None = setting(None, above=0, optional=True)

    def resolved(self, model: nn.Module, data: Dataset) -> Self:
        """See ``Optimisation.resolved``; ``scale_lr`` is None if it equals ``lr``."""
        rule = super().resolved(model, data)
        if not self.stops_early(model):
            return rule
        if self.patience == 0:
            return rule._by_rule({"scale_lr": SCALE_LR} if self.lr is None else {})
        usual = BY_TARGET[getattr(model.likelihood, "has_classes", False)]
        drawn = {site: usual if text == "by-target" else text for site, text in model.texts.items()}
        drawn = {site: text.partition(":") for site, text in drawn.items() if site not in model.points}
        widest = float(usual.partition(":")[2])
        slow = len(data.x_val) >= fewest(data)  # ``data`` comes from ``held_out``
        slow &= sum(model.initial[site].numel() for site in drawn) <= MANY * len(data.x_train)
        slow &= all(kind == "fan-in" and float(scale or 1) <= widest for kind, _, scale in drawn.values())
        return rule._by_rule({"scale_lr": float(f"{SLOWER * rule.lr:.2g}")} if slow else {})

    def stops_early(self, model: nn.Module) -> bool:
        """True for a user's own network: with many weights, the q of the highest ELBO may predict worse than others."""
        return getattr(model, "is_own_network", False)

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Fit the guide; see ``Method.run``."""
        if guide is None:
            raise UserError("SVI needs a guide, and this variant has none; use --inference map")
        run, options = Run(**options), dict(latent=self.temperature, num_particles=self.num_particles)
        if self.scale_lr and not any(name.rpartition(".")[2] in LOG_SCALES for name, _ in guide.named_parameters()):
            raise UserError("this guide has no scales of Normals that scale_lr would be for; leave it out")
        split, patience = self.held_out(model, data, run.seed)
        if patience:
            options["watch"] = watch = GuideStopping(model, guide, split, patience)
            if getattr(model, "is_pretrained", False):  # the start may be the best
                watch.evaluate(0.0, process_group())
        with in_one_memory(guide, model.net) if self.stops_early(model) else nullcontext():
            training, reason = self.minimise(model, guide, split, run, **options)
        about = self.chosen(model, data, training.trace, reason)
        if "scale_lr" in (schedule := about.get("schedule", {})):  # the rule of the version that began the fit counts
            schedule["scale_lr"] = training.settings.scale_lr
            about["schedule"] = {name: value for name, value in schedule.items() if value is not None}
        if patience:
            about["early_stopping"] |= dict(rows=len(watch.x), epoch=watch.state["best_epoch"], sd_factor=watch.factor)
        return Posterior(model, data.schema, guide=guide, trace=training.trace, provenance=about)


@dataclass(frozen=True)
class MAP(Optimisation):
    """Settings of the maximum a posteriori estimate. The prior is the weight decay.

    With early stopping, a learned noise is the one that fits the residuals of the held-out rows.
    """

    converges_to: ClassVar[str] = "point"
    needs: ClassVar[frozenset[str]] = frozenset({"weights"})
    former: ClassVar[Mapping[str, Any]] = {**Optimisation.former, "max_norm": 0.0}
    prior_weight: ClassVar[float] = 1.0
    starts_at: ClassVar[str] = "point"

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Find the point and return it as one chain of one draw; see ``Method.run``. The guide is not used."""
        point, trace, reason = self.find(model, data, Run(**options))
        chains = {site: value.detach()[None, None] for site, value in point.sites().items()}
        about = self.chosen(model, data, trace, reason)
        return Posterior(model, data.schema, chains=chains, trace=trace, provenance=about)

    def find(self, model: nn.Module, data: Dataset, run: Run) -> tuple[PointMass, Trace, str]:
        """(the point, the trace {epoch, log_likelihood, log_joint, log_prior}, the reason as of ``minimise``)."""
        started = run.start is not None and len(next(iter(run.start.values()))) > 0
        first = {site: value[0] for site, value in run.start.items()} if started else model.initial
        point, options = PointMass(first).to(data.x_train.device), {}
        data, patience = self.held_out(model, data, run.seed)
        if patience:
            options["watch"] = EarlyStopping(model, point, data.x_val, data.y_val, patience)
            if started or getattr(model, "is_pretrained", False):  # trained weights, which may be the best
                options["watch"].evaluate(0.0, process_group())
        training, reason = self.minimise(model, point, data, run, latent=self.prior_weight, **options)
        trace = training.trace
        trace["log_joint"], trace["log_prior"] = trace.pop("elbo"), [-kl for kl in trace.pop("kl")]
        return point, trace, reason


@dataclass(frozen=True)
class MLE(MAP):
    """Settings of the maximum likelihood estimate: MAP with the prior left out."""

    prior_weight: ClassVar[float] = 0.0
    tiny: ClassVar[Mapping[str, Any]] = {**MAP.tiny, "epochs": 1200, "lr": 0.2}  # the way is long without a prior


@dataclass(frozen=True)
class MCDropout(MAP):
    """Settings of MC dropout: train with dropout and predict with it, averaging over masks as over draws of w.

        q(w): W_l = M_l · diag(z_l / (1 − p_l)),  z_l ~ Bernoulli(1 − p_l)          maximise over M
        E_z[log p(y | x, w)] + log p(M)

    Training is that of MAP with a mask for every row: it maximises an ELBO whose latent variables are the masks, with
    q(z) = p(z) and so a KL of 0, plus the log prior of M as weight decay (Gal & Ghahramani 2016, arXiv:1506.02142,
    equation 7 up to its scaling of the decay). The rates p are fixed, so the spread of draws does not shrink with N.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights", "dropout"})

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Find the weights as MAP does, for the guide; see ``Method.run``. Raises UserError without dropout."""
        if not isinstance(guide, DroppedInputs):
            raise UserError("mc-dropout needs a network with dropout; use the variant dropout-mlp")
        point, trace, reason = self.find(model, data, Run(**options))
        with torch.no_grad():
            guide.loc.copy_(point.loc)
        about = self.chosen(model, data, trace, reason)
        return Posterior(model, data.schema, guide=guide, trace=trace, provenance=about)


@dataclass(frozen=True)
class Ensemble(MAP):
    """Settings of a deep ensemble, whose members are MAP estimates.

        ŵ_m = argmax_w log p(y | x, w) + log p(w),  m = 1 … M          p(y | x, D) ≈ 1/M Σ_m p(y | x, ŵ_m)

    Lakshminarayanan, Pritzel & Blundell 2017, arXiv:1612.01474, without its adversarial examples. The posterior around
    the M points is not approximated: their disagreement shows how differently training can end. A member depends only
    on its own seed, and several members are trained on one thread each.

    members  M, each with its own initial weights, order of rows and dropout masks; if the data have no validation rows,
             also with its own held-out rows, so that the members together train on all rows
    cores    number of processes, which changes no member; 1: members are trained in this one, in turn; 0: one for each
             core, if training is long and the data are on the CPU
    """

    needs: ClassVar[frozenset[str]] = frozenset({"weights", "deterministic"})
    tiny: ClassVar[Mapping[str, Any]] = {**MAP.tiny, "members": 2}
    members: int = setting(5, low=1)
    cores: int = setting(0, low=0)

    incidental: ClassVar[tuple[str, ...]] = ("cores", "workers")  # no member depends on them

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **options: Any) -> Posterior:
        """Find the members and return each as a chain of one draw; see ``Method.run``. The guide is not used.

        The trace is the mean over the members, up to the epoch at which the first one ended. Each member has its own
        checkpoint. Raises UserError for a network with a buffer that training changes, such as running statistics.
        """
        if moved := moved_buffers(model, data.x_train[:2], data.y_train[:2]):
            raise UserError(f"training changes '{moved[0]}', of which each member of an ensemble has its own, and "
                            "draws hold weights only; take layer or group normalisation, not batch normalisation (or "
                            "frozen statistics), and no spectral norm, moving averages or buffer of calls")  # fmt: skip
        run, numbers = Run(**options), range(self.members)
        children = [None if run.checkpoint is None else run.checkpoint.child(f"member-{m + 1}") for m in numbers]
        states = [None if child is None else child.load() for child in children]
        saved = {m: state["found"] for m, state in enumerate(states) if state and "found" in state}
        finished: dict[int, Member] = {m: (*entry, "")[:3] for m, entry in saved.items()}  # in earlier versions a pair
        todo = [m for m in numbers if m not in finished]
        split, before = self.held_out(model, data, run.seed)[0], len(finished)
        rule, num = self.resolved(model, split), len(split.x_train)
        steps = rule.epochs * math.ceil(num / (rule.batch_size or num))

        def keep(index: int, member: Member) -> None:
            finished[todo[index]] = member
            if (child := children[todo[index]]) is not None:
                child.save({"found": member})

        def watch() -> None:
            if run.stop:
                raise Interrupted(f"stopped with {len(finished)} of {self.members} members found")

        def progress(done: float, of: int, figures: Figures) -> None:
            run.tell(round((before + done) * steps), self.members * steps, figures)

        rows = replace(data, x_test=data.x_test[:0], y_test=data.y_test[:0])  # not sent to other processes
        work = rule.epochs * num * multiplications(model, data.x_train[:1])
        seconds = self.members * (steps * PYRO_STEP + ARITHMETIC * work)
        together = self.members == 1 or process_group().size > 1
        cores = 1 if together else choose_cores(self.cores, self.members, data.x_train.device, seconds)
        # One after the other in this process: on all threads. Processes that share a fit agree on when to stop.
        where = dict(all_threads=True) if together else dict(cores=cores, watch=watch)
        alone = replace(run, checkpoint=None, report=None)
        if run.max_minutes is not None:  # each member has an equal share of the time that is left
            left = max(0.0, run.max_minutes - run.minutes)
            alone = replace(alone, max_minutes=left / max(1, math.ceil(len(todo) / cores)))
        train = partial(self._train, model, rows, alone, [None] * self.members if on_cluster() else children)
        names = [f"member {m + 1} of {self.members}" for m in todo]
        with executor("here" if together else None):
            map_tasks(train, todo, names=names, report=progress, done=keep, **where)
        members = [finished[m] for m in numbers]
        chains = {s: torch.stack([w[s].to(data.x_train.device) for w, *_ in members])[:, None] for s in members[0][0]}
        if self.members > 1 and all(torch.allclose(value, value[:1]) for value in chains.values()):
            warnings.warn("all members are equal, as each began with the same weights and saw the same rows in every "
                          f"step; take batch_size below {num}, or start='initial'", stacklevel=2)  # fmt: skip
        shared = min(len(trace["epoch"]) for _, trace, _ in members)
        lines = {name: [trace[name][:shared] for _, trace, _ in members] for name in members[0][1]}
        trace = {name: torch.tensor(line, dtype=torch.float64).mean(0).tolist() for name, line in lines.items()}
        about = self.chosen(model, data, trace, next((why for *_, why in members if why), ""))
        return Posterior(model, data.schema, chains=chains, trace=trace, provenance=about)

    def _train(self, model: nn.Module, data: Dataset, run: Run, children: list[Checkpoint | None], m: int) -> Member:
        """Train member m, in any process.   children: the members' checkpoints; None if their files are elsewhere."""
        seed = run.seed if m == 0 else int(np.random.SeedSequence([run.seed, m]).generate_state(1)[0])
        with isolated(seed):
            model = restarted(model) if m else copy.deepcopy(model)  # the first starts as MAP would
            report = lambda done, of, figures: report_progress(done, of, {"member": m + 1, **figures})  # noqa: E731
            start = None if run.start is None else {site: value[m : m + 1] for site, value in run.start.items()}
            point, trace, reason = self.find(model, data, Run(seed, children[m], report, run.max_minutes, start=start))
            reason = reason.replace("the limit of", "its share of the limit,")
            reason = reason and f"member {m + 1} of {self.members} {reason}"
        return {site: value.detach().clone() for site, value in point.sites().items()}, trace, reason
