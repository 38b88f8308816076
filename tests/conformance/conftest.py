"""No run of these tests is drawn."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def without_pictures(no_curves):
    pass
