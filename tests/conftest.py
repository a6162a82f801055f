"""Hypothesis profiles: `ci` is the default; HYPOTHESIS_PROFILE=thorough looks longer.

HOLDFAST_TEST_ORDER=7 runs the tests in an order of its own for each number: none may rely on another one.
HOLDFAST_TEST_DEADLINE, in seconds since the epoch, skips what has not begun by then: `.ci/run` has 90 minutes, and a
machine that is six times slower than usual would need more. The number of skipped tests is in its last line.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from tests.support.hanging import pytest_runtest_protocol as pytest_runtest_protocol
from tests.support.hanging import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from tests.support.mongod import fresh_database, given_url, quick_server

# Plain asserts of the shipped suite shall explain themselves here as they do in a test module.
pytest.register_assert_rewrite("holdfast.testing")

settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Where the tests are started in the background or with nohup, some signals are ignored, by them and by the processes
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if seed := os.environ.get("HOLDFAST_TEST_ORDER"):
        random.Random(seed).shuffle(items)


_DEADLINE = float(os.environ.get("HOLDFAST_TEST_DEADLINE", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > _DEADLINE:
        pytest.skip("HOLDFAST_TEST_DEADLINE is over")


@pytest.fixture(autouse=True)
def _every_line_is_news() -> None:
    """What an earlier test has logged does not keep a line of this one back."""
    from holdfast.telemetry.logs import REPEATS

    REPEATS.forget()


@pytest.fixture(scope="session")
def replica_set() -> Iterator[str]:
    """The URL of a replica set of one node, one for each test process."""
    if url := given_url():
        yield url
        return
    with quick_server(replica_set="rs0") as server:
        yield server.url()


@pytest.fixture(scope="session")
def standalone() -> Iterator[str]:
    """The URL of a server that is no replica set."""
    with quick_server() as server:
        yield server.url()


@pytest.fixture
def mongo_url(replica_set: str) -> Iterator[str]:
    """The URL of a new database on the replica set."""
    with fresh_database(replica_set) as url:
        yield url
