"""What every refusal must be like."""

import pytest

from bnn_pyro.errors import UserError


def refuses(words, call, *args, **options):
    """A call ends with one line that has these words, a regular expression."""
    with pytest.raises(UserError, match=words) as error:
        call(*args, **options)
    assert "\n" not in str(error.value)
