"""Pyro's HMC and NUTS kernels with trajectories of our own: set-up, adaptation and their schedule stay Pyro's.

``setup`` finds the first step size, ``WarmupAdapter`` averages it (dual averaging) and estimates the mass matrix
(Welford) in the windows of Stan; ``sample`` alone is replaced, by :mod:`bnn_pyro.inference.trajectories`. The
positions that Pyro sees are a dictionary of the blocks of the mass matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import mcmc
from torch import Tensor

from bnn_pyro.errors import UserError
from bnn_pyro.inference.trajectories import Metric, Point, Transition, at_once, fused, gradient_of, hmc, nuts, stepwise
from bnn_pyro.isolation import generator_state, set_generator_state

__all__ = ["SMALLEST", "FlatHMC", "FlatNUTS"]

#: A step size below this is no step: the gradient is not that of the density, or not a number.
SMALLEST = 1e-10


class _Flat:
    """Mixed into Pyro's kernels: ``transition`` moves a flat point, everything else is called as Pyro calls it.

    potential: a ``Potential``.   sizes: {block of the mass matrix: its length}, in the order of z.
    dense: whether each block's mass matrix is a whole one.   start: (P,), where the chain starts.
    """

    def __init__(
        self, potential: Any, sizes: Mapping[str, int], dense: bool, start: np.ndarray, target_accept: float, seed: int
    ) -> None:
        super().__init__(
            potential_fn=lambda z: _Energy.apply(self._joined(z), potential),
            target_accept_prob=target_accept,
            full_mass=[(block,) for block in sizes] if dense else False,
        )
        self.potential, self.sizes = potential, dict(sizes)
        self.rng = np.random.default_rng(seed)
        self.gradient = gradient_of(potential)
        self.initial_params = self._split(start)

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Pyro's own: the density at the start, the first step size, the schedule of adaptation."""
        with pyro.validation_enabled(False):  # trajectories may meet infinities
            super().setup(warmup_steps, *args, **kwargs)
        self.point = self._point()
        self._adopt()

    def sample(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """One transition, and in the warm-up one step of Pyro's adaptation."""
        self.last = result = self.transition()
        self.point = result.point
        warm = self._t < self._warmup_steps
        self._t += 1
        if result.diverging and not warm:
            self._divergences.append(self._t - 1 - self._warmup_steps)
        z = self._split(result.point.z)
        if warm:
            self._adapter.step(self._t, z, torch.tensor(result.acceptance, dtype=torch.float64), None)
            self._adopt()
        since = self._t if self._t <= self._warmup_steps else self._t - self._warmup_steps
        self._mean_accept_prob += (result.acceptance - self._mean_accept_prob) / since
        return z

    def step(self) -> dict[str, float]:
        """One transition: what ``stats`` keeps of it."""
        step_size = float(self.step_size)
        self.sample({})
        return {
            "acceptance_rate": self.last.acceptance,
            "diverging": float(self.last.diverging),
            "energy": self.last.energy,
            "lp": self.point.log_density,
            "n_steps": float(self.last.steps),
            "step_size": step_size,
            **self.shape(),
        }

    def shape(self) -> dict[str, float]:
        """What tells the trajectory of one kernel from that of another."""
        raise NotImplementedError

    def transition(self) -> Transition:
        """From ``self.point``, with ``self.metric`` and ``self.step_size``."""
        raise NotImplementedError

    def _adopt(self) -> None:
        """Take over the step size and the mass matrix that Pyro's adapter holds.

        Raises UserError where the step size has become too small to move.
        """
        if not self.step_size > 1.001 * SMALLEST:
            raise UserError(
                f"the step size fell to {self.step_size:.1e} at transition {self._t:,}: trajectories are rejected "
                "however short, as with a gradient that is not a number; try another start (start=map), a narrower "
                "prior or scaled inputs"
            )
        roots = list(self.mass_matrix_adapter._mass_matrix_sqrt_inverse.values())  # transposed factors of M⁻¹
        if roots[0] is not getattr(self, "_root", None):
            self._root = roots[0]
            self.metric = Metric([root.T.numpy() if root.dim() > 1 else root.numpy() for root in roots])

    def _point(self) -> Point:
        z, energy, gradient = self._fetch_from_cache()
        return Point(self._joined(z).numpy().copy(), -energy.item(), -self._joined(gradient).numpy())

    def _split(self, z: np.ndarray) -> dict[str, Tensor]:
        parts = torch.from_numpy(z).split(list(self.sizes.values()))
        return dict(zip(self.sizes, parts, strict=True))

    def _joined(self, z: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([z[block] for block in self.sizes])

    def state(self) -> dict[str, Any]:
        """Everything that the next transition depends on: tensors, numbers and a line of JSON."""
        adapter, mass = self._adapter, self.mass_matrix_adapter
        z, log_density, gradient = self.point
        return {
            "point": [torch.from_numpy(z), log_density, torch.from_numpy(gradient)],
            "kernel": {name: getattr(self, name) for name in _COUNTS},
            "adapter": {name: getattr(adapter, name) for name in ("step_size", "_current_window")},
            "averaging": dict(vars(adapter._step_size_adapt_scheme)),
            "welford": [dict(vars(scheme)) for scheme in mass._adapt_scheme.values()],
            "inverse_mass": list(mass.inverse_mass_matrix.values()),
            "generators": generator_state(),
            "rng": json.dumps(self.rng.bit_generator.state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from such a state, in a kernel that was made and set up in the same way."""
        adapter, mass = self._adapter, self.mass_matrix_adapter
        z, log_density, gradient = state["point"]
        self.point = Point(z.numpy(), log_density, gradient.numpy())
        vars(self).update(state["kernel"])
        vars(adapter).update(state["adapter"])
        vars(adapter._step_size_adapt_scheme).update(state["averaging"])
        blocks = list(mass._adapt_scheme)
        mass.inverse_mass_matrix = dict(zip(blocks, state["inverse_mass"], strict=True))  # which empties Welford's sums
        for scheme, sums in zip(mass._adapt_scheme.values(), state["welford"], strict=True):
            vars(scheme).update(sums)
        set_generator_state(state["generators"])
        self.rng.bit_generator.state = json.loads(state["rng"])
        self._adopt()


#: What Pyro's kernels count.
_COUNTS = ("_t", "_mean_accept_prob", "_divergences")


class FlatNUTS(_Flat, mcmc.NUTS):
    """The No-U-Turn sampler. max_depth: at most 2^depth − 1 gradients a transition."""

    def __init__(self, max_depth: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._max_tree_depth = max_depth
        self._grown: Metric | None = None  # the metric that ``_subtree`` is of

    def transition(self) -> Transition:
        """See ``_Flat``."""
        if self._grown is not self.metric:
            self._grown = self.metric
            self._subtree = at_once(self.potential, self.metric) or stepwise(self.gradient, self.metric)
        return nuts(self.rng, self.point, self._subtree, self.step_size, self._max_tree_depth)

    def shape(self) -> dict[str, float]:
        """How often the tree was doubled."""
        return {"tree_depth": float(self.last.depth)}


class FlatHMC(_Flat, mcmc.HMC):
    """Trajectories of random lengths, so that no direction of the posterior comes back to where it started.

    length: their mean, in posterior standard deviations as the mass matrix knows them.   max_steps: at most so many.
    """

    def __init__(self, length: float, max_steps: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.length, self.max_steps = length, max_steps
        self._moved: Metric | None = None  # the metric that ``_trajectory`` is of

    def transition(self) -> Transition:
        """See ``_Flat``."""
        length = self.length * (0.5 + self.rng.random())
        steps = min(self.max_steps, max(1, int(length / self.step_size)))
        self.trajectory_length = steps * self.step_size
        if self._moved is not self.metric:
            self._moved = self.metric
            self._trajectory = fused(self.potential, self.metric) or self.metric.trajectory(self.gradient)
        return hmc(self.rng, self.point, self._trajectory, self.step_size, steps)

    def shape(self) -> dict[str, float]:
        """How long it was, in posterior standard deviations."""
        return {"trajectory_length": self.trajectory_length}


class _Energy(torch.autograd.Function):
    """−log density of one z (P,), by the potential's own gradient: for Pyro's search of a first step size."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, potential: Any) -> Tensor:
        density, gradient = potential(z.detach().to(potential.initial.device)[None])
        ctx.save_for_backward(-gradient[0].to(z.device))
        return -density[0].to(z.device)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None
