"""The quick bench calls what is right right, and every planted fault by its name: bad."""

from functools import cache

import pytest
from planted_faults import CAUGHT_BY, FAULTS, SUFFERS

from bnn_pyro.checks import CHECKS, Subject
from bnn_pyro.checks.linear_regression import correlated
from bnn_pyro.zoo import ZOO

#: Checks of a few seconds, the quickest first; a fault is caught by the first that says so.
BENCH = ("predictive", "estimator", "closed-form")
SVI = ("mean-field", "svi")


def subject(variant, method):
    settings = {"hidden": (3,), "activation": "tanh", "noise": 0.7}
    return Subject(variant, ZOO[variant](**settings), method, correlated(60, 2).data)


def levels(variant, method, checks=BENCH):
    """The level of each check, up to the first that is bad."""
    found = {}
    for name in checks:
        check = CHECKS[name](**CHECKS[name].quick)
        if not check.refuses(who := subject(variant, method)):
            found[name] = check.run(who).level
            if found[name] == "bad":
                break
    return found


@cache
def sound(variant, method):
    return levels(variant, method)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    with FAULTS[name]():
        found = levels(*SUFFERS.get(name, SVI), CAUGHT_BY.get(name, BENCH))
    assert "bad" in found.values(), f"{name} passed: {found}"


@pytest.mark.parametrize("suffers", sorted({SVI, *SUFFERS.values()}), ids=" ".join)
def test_without_a_fault_nothing_is_bad(suffers):
    found = sound(*suffers)
    assert set(found.values()) <= {"good", "caution"} and len(found) == len(BENCH), found


def test_closed_forms_alone_would_catch_it():
    with FAULTS["KL counted twice"]():
        assert levels(*SVI, checks=("closed-form",)) == {"closed-form": "bad"}
