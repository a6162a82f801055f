"""Servers of a World: killed at each point of a delivery, two on one store, killed again and again."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from tests.faults.session import Session
from tests.faults.stores import STORES
from tests.faults.worlds import POINTS_OF_DELIVERIES, ended, flowing, serving_alone

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("url", STORES, indirect=True)
@pytest.mark.parametrize("point", POINTS_OF_DELIVERIES)
def test_a_server_that_dies_at_a_delivery_loses_no_run(url: str, point: str, tmp_path: Path) -> None:
    session = Session(tmp_path, url)
    try:
        serving_alone(session, point)
    finally:
        session.end()


@pytest.mark.parametrize("url", STORES, indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_runs_outlive_kills_at_any_time(url: str, seed: int, tmp_path: Path) -> None:
    """Two servers; one of them is killed again and again, and replaced."""
    session, chance = Session(tmp_path, url), random.Random(seed)
    try:
        with flowing(session) as (servers, flow):
            servers.start()
            runs = []
            for number in range(6):
                victim = servers.start()
                runs.append(flow.start(number))
                time.sleep(chance.uniform(0.0, 1.0))
                with flow.witness.fault("kill", pid=victim.pid):
                    victim.signal(signal.SIGKILL)
            ended(session, flow, runs)
            flow.check(runs, session.app)
    finally:
        session.end()


@pytest.mark.parametrize("url", STORES, indirect=True)
def test_an_application_that_is_down_for_a_while_fails_no_run(url: str, tmp_path: Path) -> None:
    session = Session(tmp_path, url)
    try:
        with flowing(session) as (servers, flow):
            servers.start()
            flow.is_down = True
            runs = [flow.start(number) for number in range(3)]
            session.until(lambda: all(flow.deliveries[run] >= 3 for run in runs), "deliveries fail")
            flow.is_down = False
            ended(session, flow, runs)
            flow.check(runs, session.app)
    finally:
        session.end()


@pytest.mark.parametrize("url", STORES, indirect=True)
def test_a_server_that_was_frozen_ends_no_message_of_another(url: str, tmp_path: Path) -> None:
    """It is declared dead in the middle of a delivery. The answer reaches it when another server has the message."""
    session = Session(tmp_path, url)
    try:
        with flowing(session) as (servers, flow):
            frozen = servers.start()
            flow.may_go_on.clear()
            run = flow.start(0)
            session.until(lambda: flow.deliveries[run], "a delivery begins")
            with flow.witness.fault("freeze", pid=frozen.pid):
                frozen.signal(signal.SIGSTOP)
                servers.start()
                flow.servers = lambda: servers.addresses()[1:]
                session.until(lambda: flow.deliveries[run] >= 2, "another server delivers")
                frozen.signal(signal.SIGCONT)
            flow.may_go_on.set()
            ended(session, flow, [run])
            flow.check([run], session.app)
            assert frozen.code is None
    finally:
        session.end()
