"""Many independent tasks at once, on this machine or on a cluster: the one ``map``, on joblib.

A task computes on one thread wherever it runs, so that the results are the same in this process, in many, and on other
machines, bit for bit.
"""

from bnn_pyro.side_by_side.each import each, usable_cores
from bnn_pyro.side_by_side.lines import stopping, tell, telling
from bnn_pyro.side_by_side.task import one_thread

__all__ = ["each", "one_thread", "stopping", "tell", "telling", "usable_cores"]
