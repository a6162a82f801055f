"""Chains and groups in the simulated world: what is submitted, with the ids that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.simulation.plan import APP, TASK, Party

from holdfast.groups.calls import GroupSubmit
from holdfast.groups.records import GroupRecord
from holdfast.groups.rules import done_id, error_id, group_id, link_id, member_ids
from holdfast.model.records import Follow, InvocationRecord, NextCall, StoredCall, Terms, registered
from holdfast.runtime.engine import Engine

if TYPE_CHECKING:
    from tests.support.simulation.world import World


def call_of(world: World, token: str, **fields: Any) -> NextCall:
    call = StoredCall(task=TASK, arguments=world.codec.encode_call((token,), {}), **fields)
    return NextCall(call=call, takes=False)


async def submit_party(world: World, engine: Engine, party: Party) -> None:
    """Submit a chain and a group, again and again: every try stores the same."""
    now = world.start_at + party.at
    chain, group = group_id(f"chain {party.token}", now), group_id(f"group {party.token}", now)
    links = [call_of(world, token) for token in party.links[1:]]
    ids = [link_id(chain, place) for place in range(len(party.links))]
    world.ids |= dict(zip(party.links, ids, strict=True)) | {party.failed_link: error_id(chain)}
    follow = Follow(rest=tuple(links), on_error=call_of(world, party.failed_link))
    await engine.submitter.submit([_record(world, chain, party.links[0], Terms(follow=follow))])

    tail = Follow(rest=(call_of(world, party.after_done),))
    done = call_of(world, party.done, terms=Terms(follow=tail))
    record = GroupRecord(
        app=APP,
        id=group,
        size=len(party.members),
        created_at=now,
        then=done,
        on_error=done,
        cancels=party.cancels,
    )
    members = member_ids(group, 0, record.size)
    world.ids |= dict(zip(party.members, members, strict=True))
    world.ids |= {party.done: done_id(group), party.after_done: link_id(done_id(group), 1)}
    terms = Terms(group=group)
    records = [_record(world, id, token, terms) for id, token in zip(members, party.members, strict=True)]
    await GroupSubmit(engine, record, records, []).store()


def _record(world: World, id: Any, token: str, terms: Terms) -> InvocationRecord:
    now = world.start_at
    record = InvocationRecord(
        id=id,
        app=APP,
        task=TASK,
        arguments=world.codec.encode_call((token,), {}),
        created_at=now,
        due_at=now,
        terms=terms,
    )
    return registered(record, operation=f"submit {id}", at=now)
