"""What an update does is asked of every family that sees."""

import pytest
from update_helpers import FAMILIES


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param
