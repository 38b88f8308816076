"""Tests of updates run for every vision family."""

import pytest
from update_helpers import FAMILIES


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param
