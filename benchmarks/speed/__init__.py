"""Parts of ``benchmarks/hidden_layer.py``: the contestants, and how a step is timed and weighed."""

from __future__ import annotations

from speed.peers import PEERS
from speed.plain import PLAIN
from speed.problem import Contestant, Problem
from speed.through_pyro import THROUGH_PYRO
from speed.zoo import OURS, ZOO_STEPS

__all__ = ["CONTESTANTS", "OURS", "Contestant", "Problem"]

#: Every contestant of the training step by name, in the order of the table.
CONTESTANTS: dict[str, Contestant] = {**PLAIN, **ZOO_STEPS, **THROUGH_PYRO, **PEERS}
