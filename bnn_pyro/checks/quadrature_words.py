"""What numerical integration found, in a sentence that needs no statistician."""

from __future__ import annotations

from collections.abc import Sequence

from bnn_pyro.checks.check import ALPHA, Finding
from bnn_pyro.checks.problems import SmallProblem

__all__ = ["sentence"]

#: What is held to, by what the method claims.
CLAIMS = {
    "posterior": "the exact posterior",
    "posterior at step size 0": "the exact posterior, up to the bias of its step size",
    "best of a family": "the best Normal of its family",
    "normal at the mode": "the Normal at the mode",
    "points": "the mode",
}


def sentence(findings: Sequence[Finding], problems: Sequence[SmallProblem], limit: str, apart: Sequence[float]) -> str:
    """The verdict. apart: of each problem, the mean distance of E[y | x] from the exact one (a probability; or σ)."""
    where = " and ".join(p.title for p in problems)
    bad = [f for f in findings if f.level == "bad"]
    if bad:
        first = min(bad, key=lambda f: f.p if f.p is not None else 0.0)
        return (
            f"On {where} this is not {CLAIMS[limit]}: {len(bad)} quantities are off, most of all the {first.about}: "
            f"{first.found:.3g}, and {first.expected:.3g} is exact."
        )
    held = [f.p for f in findings if f.p is not None and f.level == "good"]
    said = f"On {where}, two weights each, "
    if held:
        said += f"this is {CLAIMS[limit]} (smallest p {min(held):.2g}, alarm below {ALPHA:g})."
    else:
        said += "what this method tends to is not known; it can only be compared with the posterior."
    if limit in ("best of a family", "normal at the mode", "points"):
        if any(p.two_modes for p in problems):
            said += " Of two modes of equal mass it sees one."
        far = [
            f"{100 * a:.1f} percentage points of probability" if p.noise is None else f"{a:.2f} σ of the noise"
            for a, p in zip(apart, problems, strict=True)
        ]
        said += f" Its predictions are off the exact ones by {' and '.join(far)} on average."
    return said + "".join(f" {f.about}." for f in findings if f.about.startswith("Monte-Carlo"))
