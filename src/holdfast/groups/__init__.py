"""Groups, chains and callbacks: calls that belong together. See docs/guides/groups.md."""

from holdfast.groups.calls import Chain, Group, TaskCall, chain, group
from holdfast.groups.handles import ChainInvocation, Completed, ExpectedInvocation, InvocationGroup
from holdfast.groups.records import GroupRecord

__all__ = [
    "Chain",
    "ChainInvocation",
    "Completed",
    "ExpectedInvocation",
    "Group",
    "GroupRecord",
    "InvocationGroup",
    "TaskCall",
    "chain",
    "group",
]
