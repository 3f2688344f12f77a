"""What every refusal must be like."""

import pytest

import bnn_pyro as bp


def refuses(words, call, *args, **options):
    """A call ends with one line that has these words, a regular expression."""
    with pytest.raises(bp.UserError, match=words) as error:
        call(*args, **options)
    message = str(error.value)
    del error  # which holds all that the call held
    assert "\n" not in message
