"""What every refusal must be like."""

import pytest

from bnn_pyro.errors import UserError


def refuses(words, call, *args, **options):
    """A call ends with one line that has these words, a regular expression."""
    with pytest.raises(UserError, match=words) as error:
        call(*args, **options)
    message = str(error.value)
    del error  # which holds all that the call held
    assert "\n" not in message
