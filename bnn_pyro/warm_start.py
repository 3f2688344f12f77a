"""Where a fit starts that is given the posterior of an earlier one, such as of fewer rows: at its q, or its weights.

A start is no prior: the optimum is that of the new rows alone, which must hold the earlier ones too if these are to
count. Inputs are standardised by the new rows, so that the start is near the former fit, not equal to it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from bnn_pyro.errors import UserError
from bnn_pyro.posterior import Posterior, model_buffers, weight_space


@dataclass(frozen=True)
class Start:
    """Where a fit starts: ``how`` "guide" at the posterior's q or "point" at its weights, and facts for provenance."""

    posterior: Posterior
    how: str
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, setup: Any, posterior: Posterior, schema: Any) -> Self:
        """That of the fit of a setup.

        Raises UserError where the method cannot start from a posterior, or from this one: of another variant, task,
        inputs or outputs, or without what the method starts at.
        """
        if not isinstance(posterior, Posterior):
            raise UserError(f"start= takes a posterior, such as of bp.load(folder), not a {type(posterior).__name__}")
        about, how = posterior.provenance, getattr(setup.method, "starts_at", None)
        if how is None:
            raise UserError(f"{setup.inference} does not start from a posterior; svi, map, mle, mc-dropout and "
                            "ensemble do")  # fmt: skip
        then, now = ((s.task, s.target_scale, s.input_shape, s.features, s.classes, s.targets)
                     for s in (posterior.schema, schema))  # fmt: skip
        if about.get("entry") != setup.variant or then != now:
            raise UserError(f"start= takes a posterior of the same variant, inputs, task and classes; this is of "
                            f"{about.get('entry')} on {about.get('data')}")  # fmt: skip
        if how == "guide" and posterior.guide is None:
            raise UserError(f"{setup.inference} starts at a q, and this posterior by {about.get('method')} has none")
        weights = posterior.chains or posterior.guide.state_dict()
        digest = hashlib.sha256(b"".join(value.cpu().contiguous().numpy().tobytes() for value in weights.values()))
        facts = {name: about.get(name) for name in ("method", "data", "fingerprint")}
        return cls(posterior, how, facts | {"digest": digest.hexdigest()[:16]})

    @torch.no_grad()
    def put(self, model: nn.Module, guide: nn.Module | None) -> dict[str, Any]:
        """Move ``guide`` to the posterior's, or return {"start": {site: (C, *shape)}}, the points for ``method.run``.

        The points are stored draws, of a q its mean weights. Raises UserError for weights of other shapes.
        """
        posterior = self.posterior
        weight_space(model).load_state_dict(model_buffers(posterior.model), strict=False)
        if self.how == "guide":
            try:
                weight_space(guide).load_state_dict(posterior.guide.state_dict())
            except RuntimeError:
                raise UserError("start= takes a q of the same family and network; this one has other "
                                "parameters") from None  # fmt: skip
            return {}
        chains = posterior.chains or posterior.at_mean_weights().chains
        device = next(iter(model.initial.values())).device
        points: dict[str, Tensor] = {site: value.flatten(0, 1).to(device) for site, value in chains.items()}
        if {site: value.shape[1:] for site, value in points.items()} != {k: v.shape for k, v in model.initial.items()}:
            raise UserError("start= takes weights of the same network; these have other shapes")
        return {"start": points}
