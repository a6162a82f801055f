"""With keys, no value of a user lies in the store in the clear; all of them come back."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import logging
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.testclient import TestClient
from tests.encryption.conftest import Dump, key
from tests.support.patience import eventually, patient

from holdfast import App, chain, context, group, hook, on_event, stream
from holdfast.errors import EncryptionKeyMissing, NotDecodable, ValueEncrypted
from holdfast.groups.service import Groups
from holdfast.ids import InvocationId
from holdfast.model.records import InvocationRecord
from holdfast.model.status import Status
from holdfast.retries import Fixed
from holdfast.store.key_use import KeySurvey
from holdfast.triggers import from_event
from holdfast.web.asgi import WebApp

CANARY = "canary-4711"
LARGE = CANARY * 20_000
FAST = {"poll_interval_seconds": 0.1, "runner_heartbeat_seconds": 0.5}


@dataclasses.dataclass
class Order:
    card: str


def declare(app: App) -> dict[str, Any]:
    @app.task(name="pay", log_lines=10)
    def pay(order: Order, note: str = "") -> str:
        logging.getLogger("shop").warning("paying %s", order.card)
        context().progress(1, total=2, message=f"at {order.card}")
        context().checkpoint({"card": order.card})
        stream("steps").write({"card": order.card})
        return f"paid {order.card}"

    @app.task(name="boom", retries=Fixed(1, "10ms"))
    def boom(text: str) -> None:
        raise ValueError(text)

    @app.step(name="charge")
    def charge(card: str) -> str:
        return f"charged {card}"

    @app.workflow(name="checkout")
    def checkout(card: str) -> list[str]:
        approval = hook(f"approve-{card[-4:]}", metadata={"card": card})
        return [charge(card), pay.submit(Order(card)).result(), str(approval.wait())]

    @app.task(name="follow", triggers=[on_event("ordered", arguments={"card": from_event("card")})])
    def follow(card: str) -> str:
        return card

    return {"pay": pay, "boom": boom, "checkout": checkout, "follow": follow}


def forms(text: str) -> list[bytes]:
    """Return a text as it stands in bytes, and in the three ways in which it may stand in base64."""
    shifted = [base64.b64encode(b"\0" * shift + text.encode()) for shift in range(3)]
    return [text.encode(), *[each[4 if shift else 0 : -4] for shift, each in enumerate(shifted)]]


def stored(app: App, id: str, *, raw: bool = False) -> InvocationRecord:
    store: Any = app.runtime.ready().store
    (record,) = app.runtime.run((store.below if raw else store).get(app.name, [InvocationId(id)]))
    assert isinstance(record, InvocationRecord)
    return record


def test_nothing_of_a_value_lies_in_the_store_in_the_clear(url: str, dump: Dump) -> None:
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        tasks = declare(app)
        paid, large = tasks["pay"].submit(Order(CANARY), note=CANARY), tasks["pay"].submit(Order(CANARY), note=LARGE)
        failed, run = tasks["boom"].submit(CANARY), tasks["checkout"].submit(CANARY)
        linked = chain(tasks["follow"].s(CANARY), tasks["follow"].s()).submit()
        app.emit("ordered", {"card": CANARY})
        app.schedules.create("later", tasks["follow"], [CANARY], every="90s")
        with app.runner():
            assert paid.result(timeout=patient(30)) == f"paid {CANARY}"
            assert large.result(timeout=patient(30)) == f"paid {CANARY}"
            with pytest.raises(ValueError, match=CANARY):
                failed.result(timeout=patient(30))
            assert linked.result(timeout=patient(30)) == CANARY
            eventually(lambda: app.hooks())
            app.resume_hook(f"approve-{CANARY[-4:]}", CANARY)
            assert run.result(timeout=patient(30)) == [f"charged {CANARY}", f"paid {CANARY}", CANARY]
            assert [chunk.value for chunk in paid.stream("steps")] == [{"card": CANARY}]
        notes = stored(app, paid.id).notes
        assert notes is not None
        assert notes.progress is not None
        assert notes.progress.message == f"at {CANARY}"
        assert CANARY in notes.log[-1].text
        there = dump(app)
        assert [form for form in forms(CANARY) if form in there] == []
        assert failed.id.encode() in dump(app)  # it has looked at the right store


def test_values_from_before_stay_readable_and_older_keys_too(url: str) -> None:
    if url == "memory://":
        pytest.skip("it ends with its app")
    with App(url, name="shop", **FAST) as app:
        plain = declare(app)["pay"].submit(Order("plain"), note="x" * 200_000)
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        first = declare(app)["pay"].submit(Order("first"), note="x" * 200_000)
    with App(url, name="shop", encryption_keys=f"{key('k2')},{key('k1')}", **FAST) as app:
        tasks = declare(app)
        second = tasks["pay"].submit(Order("second"))
        with app.runner():
            for call in (plain, first, second):
                assert app.invocation(call.id).result(timeout=patient(30)).startswith("paid ")
        assert b"k1" in stored(app, first.id, raw=True).arguments
        assert b"k2" in (stored(app, first.id, raw=True).result or b"")


def test_a_survey_tells_which_keys_are_needed(url: str) -> None:
    if url == "memory://":
        pytest.skip("it ends with its app")
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        declare(app)["follow"].submit(LARGE)
    with App(url, name="shop", encryption_keys=f"{key('k2')},{key('k1')},{key('k0')}", **FAST) as app:
        declare(app)["follow"].submit(CANARY)
        survey = KeySurvey(app.runtime.ready().store, "shop")
        used = {use.key: (use.invocations, use.payloads) for use in app.runtime.run(survey.run(["k2", "k1", "k0"]))}
        assert used == {"k2": (1, 0), "k1": (1, 1), "k0": (0, 0)}


def test_a_process_without_the_key_shows_that_and_passes_nothing_on(url: str) -> None:
    if url == "memory://":
        pytest.skip("it ends with its app")
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        tasks = declare(app)
        done, waiting = tasks["pay"].submit(Order(CANARY)), tasks["follow"].submit(CANARY)
        with app.runner(queues=["default"]):
            done.result(timeout=patient(30))
            waiting.result(timeout=patient(30))
        waiting = tasks["follow"].submit(CANARY)
    with App(url, name="shop", **FAST) as app:
        declare(app)
        with pytest.raises(ValueEncrypted, match="key 'k1'"):
            app.invocation(done.id).result(timeout=1)
        with pytest.raises((EncryptionKeyMissing, NotDecodable), match="'k1'"):
            app.invocation(done.id).rerun()
        with pytest.raises(EncryptionKeyMissing, match="in the clear"):
            app.invocation(done.id).rerun(arguments=(Order(CANARY),))
        with TestClient(WebApp(app, is_local=True), base_url="http://127.0.0.1") as client:
            answers = [
                client.post(f"/api/v1/invocations/{done.id}/rerun", json=body)
                for body in ({}, {"arguments": [{"card": CANARY}]})
            ]
        assert [(each.status_code, each.json()["title"]) for each in answers] == [(409, "EncryptionKeyMissing")] * 2
        with app.runner():
            eventually(lambda: "lacks" in stored_plain(app, waiting.id).reason)
        record = stored_plain(app, waiting.id)
        assert record.status is Status.REROUTED
        assert record.attempt == 0
        assert "the key 'k1'" in app.invocation(waiting.id).explain()
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        declare(app)
        with app.runner():
            assert app.invocation(waiting.id).result(timeout=patient(60)) == CANARY


def stored_plain(app: App, id: str) -> InvocationRecord:
    (record,) = app.runtime.run(app.runtime.ready().store.get(app.name, [InvocationId(id)]))
    assert record is not None
    return record


def test_a_value_that_was_moved_to_another_call_is_not_opened(url: str) -> None:
    if url == "memory://":
        pytest.skip("nothing meddles with it")
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        tasks = declare(app)
        call = tasks["follow"].submit(CANARY)
        store: Any = app.runtime.ready().store
        other = replace(stored(app, call.id, raw=True), id=app.runtime.ids.new())
        operation = replace(other.history[0], operation=app.runtime.ids.operation())
        app.runtime.run(store.below.insert([replace(other, history=(operation,))]))
        with app.runner():
            assert call.result(timeout=patient(30)) == CANARY
            eventually(lambda: stored_plain(app, other.id).status is Status.PARKED)
        assert "changed, or belongs to another place" in stored_plain(app, other.id).reason


def test_the_same_large_value_is_stored_once_under_a_name_that_says_nothing(url: str, dump: Dump) -> None:
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        tasks = declare(app)
        calls = [tasks["follow"].submit(LARGE) for _ in range(2)]
        first, second = (stored(app, call.id).payloads for call in calls)
        assert first == second != ()
        encoded = app.runtime.codec.encode(LARGE)
        assert first[0] not in (hashlib.sha256(encoded).hexdigest(), hashlib.sha256(LARGE.encode()).hexdigest())
        assert first[0].encode() in dump(app)


def test_two_apps_with_one_key_give_equal_values_different_names() -> None:
    names = set()
    for name in ("shop", "bank"):
        with App("memory://", name=name, encryption_keys=key("k1"), **FAST) as app:
            names.add(stored(app, declare(app)["follow"].submit(LARGE).id).payloads)
    assert len(names) == 2


def test_a_process_without_the_key_of_a_result_leaves_the_callback_of_its_group_to_others(url: str) -> None:
    if url == "memory://":
        pytest.skip("it ends with its app")
    with App(url, name="shop", encryption_keys=key("k1"), **FAST) as app:
        follow = declare(app)["follow"]
        done = group(follow.s(f"{CANARY} {number}") for number in range(2)).then(follow).submit()
    with App(url, name="shop", encryption_keys=f"{key('k2')},{key('k1')}", **FAST) as app:
        declare(app)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Groups, "check", lambda *_: asyncio.sleep(0))
            with app.runner():
                values = app.group(done.id).results(timeout=patient(30))
    for keys in (None, key("k1")):
        with App(url, name="shop", encryption_keys=keys, **FAST) as app, pytest.raises(ValueEncrypted):
            app.runtime.run(app.runtime.ready().part(Groups).check(done.id))
    with App(url, name="shop", encryption_keys=f"{key('k2')},{key('k1')}", **FAST) as app:
        declare(app)
        app.runtime.run(app.runtime.ready().part(Groups).check(done.id))
        with app.runner():
            assert app.invocation(done.callback.id).result(timeout=patient(30)) == values
