"""Wrong input is refused by name; in the pass that checks shapes and types, the checker may be first to refuse it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from jaxtyping import TypeCheckError


@contextmanager
def refuses(text: str) -> Iterator[None]:
    """A ValueError whose message has `text` (a pattern) in it."""
    with pytest.raises((ValueError, TypeCheckError)) as caught:
        yield
    if not isinstance(caught.value, TypeCheckError):
        assert re.search(text, str(caught.value)), f"{text!r} is not in {str(caught.value)!r}"
