"""Microcanonical Langevin ensembles: M optimised networks, each the start of a chain of its own.

    z, u ← one step ε of the isokinetic integrator,    u ← (u + ν ζ)/|u + ν ζ|,  ν² = (exp(2 ε/L) − 1)/d

Sommer et al. 2025, arXiv:2502.06335, on the dynamics of ``microcanonical`` (Robnik & Seljak 2024, arXiv:2303.18221). A
member is found by AdamW with early stopping on held-out rows, the chain samples the posterior given all training rows.
No proposal is rejected: draws have a bias that falls with the step, which the warm-up finds from the energy error,
E[ΔE²]/d = ``energy_variance``. With h = ε/√d the leapfrog has E[ΔE²] = h⁶λ³/16 in a direction of variance 1/λ, which
is off by at most h²λ/4 = (16 E[ΔE²])^(1/3)/4 of itself; the minimal-norm integrator here is better.

With ``adjusted`` draws are exact (Robnik, Cohn-Gordon & Seljak 2025, arXiv:2503.01707): u is drawn anew, a trajectory
of a random number of steps is accepted with probability min(1, exp(−Σ ΔE)), and ε is that of ``target_accept``.

The warm-up of T transitions finds ε in its first 0.9 T, with L = √d; then L is √Σ Var zᵢ of positions, and at the end
0.4 · way / n_eff by their effective draws. The adjusted sampler does that in 0.6 T; in the rest ε settles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from bnn_pyro.checkpoint import Run
from bnn_pyro.datasets.dataset import Dataset
from bnn_pyro.errors import UserError
from bnn_pyro.inference.hmc import SeparateChains
from bnn_pyro.inference.microcanonical import GRADIENTS
from bnn_pyro.inference.mile_kernel import Kernel
from bnn_pyro.inference.potential import Potential
from bnn_pyro.inference.sampler import STARTS, Drawn, Starts
from bnn_pyro.posterior import Posterior, weight_space
from bnn_pyro.settings import setting

#: Members of a network whose weights are at most so many; four of a larger one.
MEMBERS, SMALL = 8, 10_000
#: Steps that a trajectory may be expected to take where adjusted.
TYPICAL = 20


@dataclass(frozen=True)
class MILE(SeparateChains):
    """Settings of microcanonical Langevin ensembles: optimised members, each the start of a chain.

    chains           M, members and chains; 0: 8, or 4 of a network of more than 10,000 weights
    start            members, or one of the starts of the other samplers
    epochs           of a member's optimisation at most
    patience         epochs without a better NLL of held-out rows after which that stops. They are the validation rows,
                     or 15 % of the training rows where there are none; chains see all training rows
    lr               AdamW's first learning rate
    batch_size       rows of a step of AdamW
    warmup           transitions before the draws: single steps of the integrator, or trajectories where adjusted
    thin             transitions a draw
    first_energy_variance, energy_variance  E[ΔE²]/d that the step is to have, falling linearly over the warm-up
    adjusted         whether trajectories are accepted or rejected by Metropolis, so that draws are exact
    target_accept    acceptance rate that the step is adapted to where adjusted
    max_steps        at most so many steps a trajectory where adjusted
    """

    converges_to: ClassVar[str] = "exact as lr → 0"
    tiny: ClassVar[Mapping[str, Any]] = {
        "draws": 1000, "warmup": 2000, "chains": 4, "thin": 4, "start": "prior", "energy_variance": 1e-6,
        "first_energy_variance": 1e-4, "epochs": 20, "cores": 1,
    }  # fmt: skip
    chains: int = setting(0, low=0)
    draws: int = setting(100, low=1)
    warmup: int = setting(20_000, low=1)
    thin: int = setting(200, low=1)
    target_accept: float = setting(0.9, above=0, below=1)
    start: str = setting("members", choices=("members", *STARTS))
    epochs: int = setting(300, low=1)
    patience: int = setting(50, low=0)
    lr: float = setting(0.01, above=0)
    batch_size: int = setting(64, low=0)
    first_energy_variance: float = setting(0.5, above=0)
    energy_variance: float = setting(0.1, above=0)
    adjusted: bool = False
    max_steps: int = setting(1000, low=1)

    former: ClassVar[Mapping[str, Any]] = {"integrator": "minimal-norm"}
    group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adjusted:  # of this object, above its class's
            object.__setattr__(self, "converges_to", "exact")

    def run(self, model: nn.Module, guide: nn.Module | None, data: Dataset, **how: Any) -> Posterior:
        """Find the members, then sample; see ``Method.run`` and ``Sampler.run``.

        ``stats``, (C, D): lp, n_steps (gradients), step_size, decoherence_length L, diverging; energy_error, the
        root mean square of ΔE a step in nats, or acceptance_rate where adjusted.

        A step diverges whose energy error exceeds 1,000 nats and 30 √d, or is not finite: it is taken back, counted in
        ``diverging``, and its chain goes on with half the step. After 10 such steps a chain is left out with a
        warning. Raises UserError where all of them are.
        """
        if not self.chains:
            size = sum(value.numel() for value in weight_space(model).initial.values())
            return replace(self, chains=MEMBERS if size <= SMALL else 4).run(model, guide, data, **how)
        return super().run(model, guide, data, **how)

    @property
    def untimed(self) -> int:
        """See ``Sampler``. Trajectories take many times as long as steps."""
        return int(0.6 * self.warmup) if self.adjusted else super().untimed

    def _members(self, potential: Potential, data: Dataset, run: Run, num: int, **settings: Any) -> Tensor:
        settings |= dict(epochs=self.epochs, patience=self.patience, lr=self.lr, batch_size=self.batch_size)
        return super()._members(potential, data, run, num, **settings)

    def _draw(self, potential: Potential, starts: Starts, run: Run) -> Drawn:
        if potential.size < 2:
            raise UserError("microcanonical dynamics need two weights or more: one has no direction to turn; take nuts")
        records, stopped = super()._draw(potential, starts, run)
        parts = [record.of_chain(c) for record in records for c in range(self.chains // len(records))]
        for c, part in enumerate(parts):  # of several that move as one
            if not self.adjusted and part.kept and part.columns["diverging"][part.kept - 1]:
                part.kept, stopped = 0, stopped or f"chain {c + 1} diverged"
        return parts, stopped

    def kernel(self, potential: Potential, start: np.ndarray, *seeds: int) -> Kernel:
        """At the start of its chains (G, P), or of one (P,); call inside ``isolated``."""
        return Kernel(self, potential, np.atleast_2d(start), seeds)

    def typical(self, whitened: bool) -> int:
        """See ``SeparateChains``."""
        return GRADIENTS * (TYPICAL if self.adjusted else 1)
