"""Hypothesis profiles: `ci` is the default; HYPOTHESIS_PROFILE=thorough looks longer."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Plain asserts of the shipped suite shall explain themselves here as they do in a test module.
pytest.register_assert_rewrite("holdfast.testing")

settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
