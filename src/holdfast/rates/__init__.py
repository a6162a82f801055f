"""Limits and rates in force: ``app.limits``. Buckets and decisions are in `holdfast.model.rates`."""

from holdfast.model.rates import LimitChange
from holdfast.rates.api import Allowance, LimitAccess, LimitInForce

__all__ = ["Allowance", "LimitAccess", "LimitChange", "LimitInForce"]
