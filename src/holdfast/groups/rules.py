"""What follows the end of an invocation, decided from its record alone.

Every id follows from what is known at submit, so a call that is made twice is made once: links of a chain from its
first link and their place, members of a group from the group and their number, a callback from its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.msgpack import Ext

from holdfast.codec import MARK, DataCodec, ErrorRecord, NamePayload, Payload, Reference, SizeLimits, references
from holdfast.codec.payloads import Spill, split
from holdfast.codec.sealing import refuse_sealed
from holdfast.errors import NotDecodable
from holdfast.ids import MOST_NUMBERED, InvocationId, derived_id, made_at, numbered_id
from holdfast.model.records import InvocationRecord, NextCall
from holdfast.model.status import FINAL, Status

DATA = DataCodec()
MOST_LINKS = 100
MOST_MEMBERS = MOST_NUMBERED - 1
LONGEST_MESSAGE = 2000


def group_id(fresh: str, now: float) -> InvocationId:
    return numbered_id(derived_id("group", fresh, at=now), 0)


def member_ids(group: str, start: int, stop: int) -> list[InvocationId]:
    return [numbered_id(group, number + 1) for number in range(start, stop)]


def group_of(member: str) -> InvocationId:
    """Return the group that a member with this id would have."""
    return numbered_id(member, 0)


def link_id(first: str, place: int) -> InvocationId:
    """Return the id of a link of the chain that begins with `first`."""
    return InvocationId(first) if place == 0 else derived_id("link", first, str(place), at=made_at(first))


def error_id(first: str) -> InvocationId:
    """Return the id of the call that is made when a link of this chain fails."""
    return derived_id("on_error", first, at=made_at(first))


def done_id(group: str) -> InvocationId:
    """Return the id of the call that is made when the group is done: there is one, with results or with failures."""
    return derived_id("group", group, "done", at=made_at(group))


def first_of(record: InvocationRecord) -> InvocationId:
    """Return the first link of the chain that an invocation with `terms.follow` is a link of."""
    follow = record.terms.follow
    return record.id if follow is None or follow.chain is None else follow.chain


# --- arguments


class Passed(NamedTuple):
    """The arguments of a call, and the payloads that it refers to: new ones, and stored ones."""

    arguments: bytes
    new: tuple[Payload, ...] = ()
    stored: tuple[Reference, ...] = ()


_call = msgspec.msgpack.Decoder(tuple[list[msgspec.Raw], dict[str, msgspec.Raw]])
_pack = msgspec.msgpack.Encoder().encode


def following(link: NextCall, result: bytes) -> Passed:
    """Return the call of a link whose first argument is a result, as it was encoded."""
    refuse_sealed(link.call.arguments)
    if not link.takes:
        return Passed(link.call.arguments)
    refuse_sealed(result)
    refers, body = split(result)
    args, kwargs = _call.decode(link.call.arguments)
    data = _pack(([msgspec.Raw(bytes(body)), *args], kwargs))
    return Passed(result[: len(result) - len(body)] + data, stored=refers)


def collected(
    link: NextCall,
    values: Sequence[bytes],
    payloads: Mapping[str, bytes],
    limits: SizeLimits,
    name_of: NamePayload | None = None,
) -> Passed:
    """Return the call of a link whose first argument is the list of these values, as they were encoded. What they refer
    to is among the `payloads`, and becomes part of the list. Raises `Refused` if the list is too large.
    """
    refuse_sealed(link.call.arguments)
    if not link.takes:
        return Passed(link.call.arguments)
    args, kwargs = _call.decode(link.call.arguments)
    whole = _pack([msgspec.Raw(plain(value, payloads)) for value in values])
    if len(whole) + len(link.call.arguments) <= limits.inline:
        return Passed(_pack(([msgspec.Raw(whole), *args], kwargs)))
    spill = Spill(limits, None, name_of)
    packed = spill.packed(_pack(([spill.put_out(whole).ext, *args], kwargs)))
    return Passed(packed.data, new=packed.payloads)


def plain(value: bytes, payloads: Mapping[str, bytes]) -> bytes:
    """Return an encoded value without references. A result refers to one payload at most, which is all of it."""
    if value[:1] != MARK:
        return value
    refuse_sealed(value)
    (reference,), body = split(value)
    ext = msgspec.msgpack.decode(body)
    if not isinstance(ext, Ext) or reference.digest not in payloads:
        raise NotDecodable(f"the payload {reference.digest} of {reference.size:,} bytes is not at hand")
    _, is_value = msgspec.msgpack.decode(ext.data)
    return _pack(payloads[reference.digest]) if is_value else payloads[reference.digest]


def wanted(values: Iterable[bytes]) -> list[Reference]:
    """Return the payloads that these values refer to."""
    return [reference for value in values if value[:1] == MARK for reference in references(value)]


# --- failures


def is_failure(record: InvocationRecord | None) -> bool:
    return record is None or (record.status in FINAL and record.status is not Status.SUCCESS)


def failure_of(record: InvocationRecord | None, id: str) -> dict[str, Any]:
    """Return a failure as a callback gets it: plain data, readable without classes."""
    if record is None:
        return {"invocation": id, "task": "", "status": "removed", "type": "", "message": "it is not in the store"}
    error = record.error
    return {
        "invocation": record.id,
        "task": record.task,
        "status": record.status.value,
        "type": "" if error is None else error.type_name.rpartition(":")[2],
        "message": (record.reason if error is None else error.message)[:LONGEST_MESSAGE],
    }


def error_of(record: InvocationRecord) -> ErrorRecord | None:
    """Return the error of a failed link for the end of its chain. Large values of an error stay with the link."""
    error = record.error
    if error is not None and error.data is not None and error.data[:1] == MARK:
        return msgspec.structs.replace(error, data=None)
    return error


def of_failures(failed: Sequence[str], size: int) -> str:
    """Return in words how many members have failed."""
    return f"{len(failed)} of {size} calls of its group did not succeed, the first of them {failed[0]}"
