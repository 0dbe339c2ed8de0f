"""Each test of an integration starts like a fresh process: nothing enabled, no warning given."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    """Reset one-time warnings, so that each test receives them."""
    if not importlib.util.find_spec("transformers"):
        yield
        return
    from guild.integrations import transformers
    from guild.integrations.transformers import messages

    messages._warn.cache_clear()
    yield
    transformers.disable()
