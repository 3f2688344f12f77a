"""From numbers to sentences: what a diagnosis says, to someone who knows no statistics of Markov chains."""

from __future__ import annotations

from collections.abc import Iterator

from bnn_pyro.diagnostics.importance import GOOD_K
from bnn_pyro.diagnostics.sampler import DIVERGENT
from bnn_pyro.diagnostics.verdicts import Findings, Verdict, overall, times

__all__ = ["verdicts"]

#: BFMI below which energies mix badly.
BFMI = 0.3
#: p-values below which a check is said to have failed.
SURPRISING = 0.01


def verdicts(found: Findings) -> tuple[Verdict, ...]:
    """The overall verdict, then what else there is to say."""
    return (overall(found), *(verdict for speak in _DETAILS for verdict in speak(found)))


# -- the details ---------------------------------------------------------------------------------------------------
def _not_the_posterior(f: Findings) -> Iterator[Verdict]:
    if f.temperature != 1:
        yield Verdict(
            "caution",
            "temperature",
            f"This is the posterior at temperature {f.temperature:g}, not that of the stated model: it is "
            f"{'more' if f.temperature < 1 else 'less'} certain than Bayes' rule would have it.",
        )
    if f.stochastic:
        yield Verdict(
            "caution",
            "step size",
            "The sampler follows noisy gradients and rejects nothing: chains that agree may all have the bias of one "
            "step size. A run with half the step size that predicts the same is the proof.",
        )
    if not f.tested:
        yield Verdict(
            "caution",
            "test rows",
            "The data set has no test rows, so that predictions for the training rows were judged; networks agree "
            "more easily there.",
        )


def _sampler(f: Findings) -> Iterator[Verdict]:
    total = f.get("chains") * f.get("draws")
    if f.get("stuck_chains") > 0:
        num = int(f.get("stuck_chains"))
        yield Verdict(
            "bad" if num > 0.05 * f.get("chains") else "caution",
            "stuck chains",
            f"{times(num, 'chain')} of {int(f.get('chains'))} never moved, or stayed where the posterior density is "
            "far below that of the others (a poor mode). Its draws count like the others' and distort the average: "
            "try other starting points (a fit, or less jitter), or a longer warm-up.",
        )
    if f.get("divergences") > 0:
        num = int(f.get("divergences"))
        yield Verdict(
            "bad" if num > DIVERGENT * total else "caution",
            "divergences",
            f"{num:,} of {int(total):,} transitions diverged, in {times(int(f.get('divergent_chains')), 'chain')}: "
            "the step size is too large for some part of the posterior, which may then be missed. Try a higher "
            "target acceptance (--set target_accept=0.95) or a prior with less room.",
        )
    elif f.has("divergences"):
        yield Verdict("good", "divergences", "No transition diverged.")
    if f.get("bfmi_min") < BFMI:
        yield Verdict(
            "caution",
            "energy",
            f"The energy changes too little from draw to draw (BFMI {f.get('bfmi_min'):.2f}, below {BFMI}): the far "
            "tails of the posterior are reached slowly. Try more draws, or a prior without long tails.",
        )
    for cause in f.causes:
        if cause.about != "divergences":
            sentence = f"{cause.clause[0].upper()}{cause.clause[1:]}. Try {cause.remedy}."
            yield Verdict("bad" if cause.fatal else "caution", cause.about, sentence)


def _weights(f: Findings) -> Iterator[Verdict]:
    if not f.has("weight_rhat_max") or not f.has("rhat_max"):
        return
    worst, shown = f.get("weight_rhat_max"), int(f.get("weights_shown"))
    if not f.apart("weight_"):
        yield Verdict(
            "good", "weights", f"The chains agree on each of {shown} weights too (R-hat at most {worst:.3f})."
        )
    elif not f.apart():
        yield Verdict(
            "good",
            "weights",
            f"Chains disagree about single weights (R-hat up to {worst:.2f} of {shown}) and agree about the "
            "predictions: hidden units can change places without changing what the network computes. That is no "
            "reason for concern, but do not interpret single weights.",
        )
    else:
        yield Verdict(
            "caution",
            "weights",
            f"Chains disagree about single weights (R-hat up to {worst:.2f} of {shown}). In a network with hidden "
            "units they may; the predictions are what to judge by.",
        )


def _approximate(f: Findings) -> Iterator[Verdict]:
    if f.get("elbo_rise") > 0:
        yield Verdict(
            "caution",
            "training",
            f"The training objective still rose by {f.get('elbo_rise'):,.1f} nats over the last epochs: it had not "
            "settled. Try more epochs (--set epochs=…).",
        )
    elif f.get("elbo_rise") == 0:
        yield Verdict("good", "training", "The training objective had settled.")


def _held_out(f: Findings) -> Iterator[Verdict]:
    if not f.has("elpd_loo"):
        if f.kind == "approximation" and f.has("khat"):
            yield Verdict(
                "caution",
                "leave-one-out",
                "Leave-one-out cross-validation was left out: its importance weights would start from those of the "
                "approximation, which cannot be trusted. Compare log densities of test rows.",
            )
        return
    bad, rows = int(f.get("pareto_k_bad")), int(f.get("loo_rows"))
    some = f"{rows:,}" if rows == f.rows else f"{rows:,} evenly chosen of {f.rows:,}"
    elpd = f"{f.get('elpd_loo'):,.1f}".replace("-", "−")
    number = (
        f"The log density of {some} training rows, each left out in turn, is {elpd} ± "
        f"{f.get('elpd_loo_se'):,.1f} nats (PSIS-LOO, an effective number of {f.get('p_loo'):,.1f} parameters)"
    )
    if bad:
        yield Verdict(
            "caution" if bad <= 0.1 * rows else "bad",
            "leave-one-out",
            f"{number}, but for {times(bad, 'row')} that matter too much for the estimate to be trusted (Pareto k "
            f"above {GOOD_K}): look at them, or compare by test rows.",
        )
    else:
        yield Verdict("good", "leave-one-out", f"{number}; no row matters too much (Pareto k below {GOOD_K}).")
    if f.get("pit_p") < SURPRISING:
        how = "too certain" if f.spread > 0.01 else "too unsure" if f.spread < -0.01 else "shifted to one side"
        yield Verdict(
            "caution",
            "calibration",
            f"Predictions of rows that were left out are {how}: where the observed targets fall in them is not "
            f"uniform (LOO-PIT, p = {f.get('pit_p'):.1g}). Look at the noise model and the prior.",
        )
    elif f.has("pit_p"):
        yield Verdict(
            "good", "calibration", "Targets of rows that were left out fall where the predictions expect (LOO-PIT)."
        )


def _replicated(f: Findings) -> Iterator[Verdict]:
    p = f.get("ppc_p")
    if p < SURPRISING:
        yield Verdict(
            "caution",
            "predictive check",
            f"The observed targets fit worse than nearly all that the fitted model makes itself (p = {p:.1g}): it "
            "misses something of the data, such as outliers or noise that varies. Look at the largest residuals.",
        )
    elif p > 1 - SURPRISING:
        yield Verdict(
            "caution",
            "predictive check",
            f"The observed targets fit better than nearly all that the fitted model makes itself (p = {p:.3f}): it "
            "takes the training rows to be noisier than they are. That is common where the prior is strong.",
        )
    elif f.has("ppc_p"):
        yield Verdict(
            "good", "predictive check", f"Data made by the fitted model look like the observed ones (p = {p:.2f})."
        )


_DETAILS = (_not_the_posterior, _sampler, _weights, _approximate, _held_out, _replicated)
