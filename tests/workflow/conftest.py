"""Fixtures of the workflow's tests."""

from __future__ import annotations

import pytest

from tests.workflow.checkout_copy import Checkout, make_checkout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A fresh copy, shared by the tests of one file."""
    return make_checkout(tmp_path_factory.mktemp("checkout"))
