"""Triggers of an app: the stored form of the declared triggers, and the hidden tasks that evaluate code.

A trigger needs code if it has a predicate or a function for the arguments. It also does if the identity of its task's
calls depends on their arguments (limits by argument, dedup keys, debouncing). Then a runner that has the task makes the
call. Each such trigger has a hidden task that evaluates it. Only runners with the same trigger know that task, so
during a deploy each happening goes to a runner with the right code.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast import errors
from holdfast.codec import Payload, references
from holdfast.ids import InvocationId
from holdfast.model.limits import limit_key
from holdfast.model.names import unversioned
from holdfast.model.records import InvocationRecord, Source, registered
from holdfast.runtime.app_runtime import AppRuntime, DeclaredTask
from holdfast.runtime.definition import ExecutorKind, TaskDefinition
from holdfast.runtime.engine import Engine
from holdfast.schedules.api import call_of
from holdfast.schedules.declared import Declaration
from holdfast.schedules.options import TaskSchedule
from holdfast.schedules.records import CatchUp, PreparedCall, Rules, StoredCall
from holdfast.telemetry import Telemetry
from holdfast.telemetry.events import TaskUnknown
from holdfast.triggers import joins
from holdfast.triggers.conditions import Trigger, known_as, named_parameters, needs_code, tick_condition, tick_name
from holdfast.triggers.dispatch import Firing, TriggerDispatcher, describe_origin, happened, holding
from holdfast.triggers.outbox import Events
from holdfast.triggers.rules import DATA, END, Condition, Facts, OnEnd, TriggerRecord, combine, error_fields
from holdfast.triggers.subscriptions import Subscriptions

EVALUATES = "trigger:"
_MAX_BESIDE = 50


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What a function for a trigger's arguments receives: one for each happening, in the order of the conditions.
    Values have their original classes.
    """

    kind: str  # event, tick or end
    id: str
    name: str
    at: float
    payload: Any = None
    status: str = ""
    arguments: Mapping[str, Any] = {}
    result: Any = None
    error: Mapping[str, str] | None = None


# --- as it is stored


def trigger_records(tasks: Sequence[DeclaredTask], app: str, telemetry: Telemetry) -> list[TriggerRecord]:
    """Return the triggers that these tasks declare."""
    _warn_of_unknown_tasks(tasks, telemetry)
    versions = _versions(tasks)
    return [
        replace(_with_versions(_record(task, each, app), versions), module_tasks=_module_tasks(task, tasks))
        for task in tasks
        for each in task.definition.triggers
    ]


def _versions(tasks: Iterable[DeclaredTask]) -> dict[str, list[str]]:
    """Return the declared versions of workflows by the name that they have without one."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        if task.definition.is_workflow and (name := unversioned(task.name)) != task.name:
            found.setdefault(name, []).append(task.name)
    return found


def _with_versions(record: TriggerRecord, versions: Mapping[str, list[str]]) -> TriggerRecord:
    """Return a trigger whose conditions on a workflow without a version hold for each declared version."""

    def extended(condition: Condition) -> Condition:
        if not isinstance(condition, OnEnd):
            return condition
        more = [name for each in condition.tasks for name in versions.get(each, ())]
        return replace(condition, tasks=tuple(dict.fromkeys((*condition.tasks, *more)))) if more else condition

    clauses = tuple(tuple(tuple(map(extended, member)) for member in clause) for clause in record.clauses)
    return replace(record, clauses=clauses)


def _module_tasks(task: DeclaredTask, tasks: Iterable[DeclaredTask]) -> tuple[str, ...]:
    """Return the names of other tasks of the same module."""
    module, colon, _ = task.name.partition(":")
    others = [each.name for each in tasks if each is not task and each.name.startswith(module + ":")] if colon else []
    return tuple(sorted(set(others))[:_MAX_BESIDE])


def refuse_duplicate_names(definition: TaskDefinition, others: Iterable[TaskDefinition]) -> None:
    """Raise `InvalidTrigger` or `InvalidSchedule` if a name is used twice."""
    if not definition.triggers and not definition.schedules:
        return
    apart = [other for other in others if other.name != definition.name]
    scheduled = {each.name: other.name for other in apart for each in other.schedules}
    for name in (each.name for each in definition.schedules if each.name):
        if name in scheduled:
            raise errors.InvalidSchedule(
                f"two schedules are named '{name}': of {scheduled[name]} and of {definition.name}"
            )
        scheduled[name] = definition.name
    taken = {known_as(each, other.name): other.name for other in apart for each in other.triggers}
    for each in definition.triggers:
        name = known_as(each, definition.name)
        if name in taken:
            raise errors.InvalidTrigger(f"two triggers are named '{name}': of {taken[name]} and of {definition.name}")
        taken[name] = definition.name


def _warn_of_unknown_tasks(tasks: Sequence[DeclaredTask], telemetry: Telemetry) -> None:
    """Report triggers on the end of a task that is not declared here: another program may have it."""
    known = {name for task in tasks for name in task.definition.names} | _versions(tasks).keys()
    for task in tasks:
        for each in task.definition.triggers:
            for condition in (asked.condition for asked in each.asked):
                if isinstance(condition, OnEnd) and known.isdisjoint(condition.tasks):
                    name, near = condition.tasks[0], difflib.get_close_matches(condition.tasks[0], known, n=1)
                    hint = f"did you mean '{near[0]}'?" if near else "another program may declare it"
                    what = f"trigger '{known_as(each, task.name)}'"
                    telemetry.emit(TaskUnknown("triggers", what, f"not declared here, {hint}", name, bool(near)))


def _record(task: DeclaredTask, declared: Trigger, app: str) -> TriggerRecord:
    name = known_as(declared, task.name)
    return TriggerRecord(
        app=app,
        name=name,
        clauses=_conditions(declared, name),
        call=_call(task),
        arguments=declared.arguments,
        takes=named_parameters(task.definition.signature),
        within_seconds=declared.within_seconds,
        evaluator=EVALUATES + name if _calls_for_code(task.definition, declared) else "",
    )


def _conditions(declared: Trigger, name: str) -> tuple[tuple[tuple[Condition, ...], ...], ...]:
    number = iter(range(len(declared.asked)))
    return tuple(
        tuple(tuple(asked.condition or tick_condition(name, next(number)) for asked in member) for member in clause)
        for clause in declared.clauses
    )


def _call(task: DeclaredTask) -> StoredCall:
    """Return the call, without its arguments."""
    definition = task.definition
    whole = limit_key(task.name, "")
    return StoredCall(
        task=task.name,
        arguments=b"",
        queue=definition.queue,
        tags=definition.tags,
        priority=definition.priority,
        at_most_once=definition.at_most_once,
        limit_key=None if definition.limit_by or definition.rate_by else definition.waits_under(),
        dedup_key=whole if definition.unique and not definition.unique_by else None,
        expires_seconds=definition.time.expires,
        terms=task.terms,
        is_run=definition.is_workflow,
    )


def _calls_for_code(task: TaskDefinition, declared: Trigger) -> bool:
    return bool(needs_code(declared) or task.limit_by or task.rate_by or task.unique_by or task.pacing is not None)


def declarations(tasks: Sequence[DeclaredTask], engine: Engine) -> list[Declaration]:
    """Return the schedules that the tasks declare, and the schedules that their triggers need."""
    own = []
    for task in tasks:
        for each in task.definition.schedules:
            call, payloads = _declared_call(task, each, engine)
            beside = _module_tasks(task, tasks)
            own.append(
                Declaration(
                    timing=each.timing,
                    call=call,
                    rules=each.rules,
                    name=each.name,
                    module_tasks=beside,
                    payloads=payloads,
                )
            )
    return own + _tick_declarations(tasks)


def _declared_call(task: DeclaredTask, declared: TaskSchedule, engine: Engine) -> PreparedCall:
    try:
        return call_of(task, engine, declared.args, dict(declared.kwargs))
    except errors.HoldfastError as error:
        error.add_note(f"That is what {task.name} is to be called with, {declared.timing.describe()}.")
        raise


def _tick_declarations(tasks: Sequence[DeclaredTask]) -> list[Declaration]:
    """Return the schedules whose ticks triggers wait for, beside other conditions."""
    return [
        Declaration(
            timing=timing,
            call=StoredCall(
                task=task.name, arguments=b"", event=tick_condition(known_as(each, task.name), number).name
            ),
            rules=Rules(catch_up=CatchUp.LAST),
            name=tick_name(known_as(each, task.name), number),
            module_tasks=_module_tasks(task, tasks),
        )
        for task in tasks
        for each in task.definition.triggers
        for number, timing in enumerate(asked.timing for asked in each.asked if asked.timing is not None)
    ]


# --- where code decides


def evaluators(runtime: AppRuntime, definition: TaskDefinition) -> list[TaskDefinition]:
    """Return the tasks that decide for the triggers of this one."""
    return [
        _evaluator(runtime, definition, each, known_as(each, definition.name))
        for each in definition.triggers
        if _calls_for_code(definition, each)
    ]


def _evaluator(runtime: AppRuntime, target: TaskDefinition, declared: Trigger, name: str) -> TaskDefinition:
    def evaluate(kind: str, id: str) -> list[str]:
        return Evaluation(runtime, target.name, declared, name).run(kind, id)

    evaluate.__module__, evaluate.__qualname__ = __name__, f"evaluate[{name}]"
    return TaskDefinition(
        name=EVALUATES + name,
        function=evaluate,
        signature=inspect.signature(evaluate),
        executor=ExecutorKind.THREAD,
        queue=target.queue,
        tags=target.tags,
        priority=target.priority,
        is_hidden=True,
    )


class Evaluation:
    """Decides about one happening and one trigger with the user's code. It runs in a thread, as a task."""

    def __init__(self, runtime: AppRuntime, task: str, declared: Trigger, name: str) -> None:
        self._runtime = runtime
        self._engine = runtime.ready()
        self._task = runtime.tasks[task]
        self._declared = declared
        self._name = name

    def run(self, kind: str, id: str) -> list[str]:
        """Evaluate the happening; return the ids of the invocations that it caused."""
        known = self._runtime.run(self._engine.part(Subscriptions).get([self._name]))
        if self._name not in known:
            raise errors.UsageError(f"the trigger '{self._name}' is gone")
        # By the conditions of this code: they are what its functions belong to.
        trigger = replace(known[self._name], clauses=_conditions(self._declared, self._name))
        if kind == joins.KIND:
            return self._left_over(trigger, id)
        facts, cause = self._happening(trigger, Source(kind=kind, id=id))
        made: dict[str, None] = {}
        for clause, members in holding(trigger, facts, self._unmet(trigger, facts, cause)).items():
            if len(trigger.clauses[clause]) == 1:
                firing = Firing(trigger=trigger, clause=clause, happened=(happened(trigger, facts),))
                if firing.id not in made:
                    made[self._fire(firing, [cause])] = None
            else:
                join = self._runtime.run(self._engine.part(TriggerDispatcher).put(trigger, clause, members, facts))
                made |= dict.fromkeys(self._fire_all(trigger, join) if join else ())
        return list(made)

    def _left_over(self, trigger: TriggerRecord, name: str) -> list[str]:
        """Fire the complete firings of a join that a crash has left."""
        entries = self._runtime.run(self._engine.store.entries(self._runtime.name, joins.KIND, [name]))
        return self._fire_all(trigger, joins.from_entry(entries[0])) if entries else []

    def _fire_all(self, trigger: TriggerRecord, join: joins.Join) -> list[str]:
        made = []
        for each in join.firings:
            firing = Firing(trigger=trigger, clause=join.clause, happened=each)
            causes = [self._happening(trigger, one.source)[1] for one in each] if self._declared.provider else []
            made.append(self._fire(firing, causes))
        self._runtime.run(self._engine.part(TriggerDispatcher).clear(trigger, join))
        return made

    def _fire(self, firing: Firing, causes: Sequence[Cause]) -> str:
        """Submit the call, as the task itself would; return the id of the stored invocation."""
        payloads: list[Payload] = []
        record = self._invocation(firing, causes, payloads)
        (before,) = self._runtime.run(self._engine.submitter.submit([record], payloads, self._task.debounce))
        return record.id if before is None else before.id

    def _invocation(self, firing: Firing, causes: Sequence[Cause], payloads: list[Payload]) -> InvocationRecord:
        if self._declared.provider is not None:
            kwargs = self._declared.provider(*causes)
            if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
                raise errors.TriggerFailed(
                    f"the arguments for {self._task.name} are {kwargs!r:.200}, and not a dict by name"
                )
        else:
            at_hand = self._runtime.run(self._engine.part(TriggerDispatcher).at_hand([firing.happened]))
            given = [DATA.decode(each.picked, at_hand) for each in firing.happened]
            kwargs, missing = combine(firing.trigger, given)
            if missing:
                return self._engine.part(TriggerDispatcher).invocation(firing, payloads, at_hand=at_hand)
            kwargs = self._runtime.codec.decode(DATA.encode(kwargs))
        record, large = self._task.prepared(self._engine, (), dict(kwargs))
        payloads += large
        fresh = replace(record, id=firing.id, origin=firing.origin, parent_id=None, history=())
        named = registered(
            fresh, operation=self._engine.ids.operation(), at=fresh.created_at, why=describe_origin(firing.origin)
        )
        return self._engine.part(TriggerDispatcher).bounded(named)

    def _unmet(self, trigger: TriggerRecord, facts: Facts, cause: Cause) -> list[Condition]:
        """Return the conditions that their code denies."""
        unmet: list[Condition] = []
        conditions = [
            each for clause in _conditions(self._declared, self._name) for member in clause for each in member
        ]
        for asked, condition in zip(self._declared.asked, conditions, strict=True):
            if not condition.holds(facts):
                continue
            about = cause.payload if cause.kind != END else cause.result
            if not (_says(asked.where, about) and _says(asked.called_with, cause.arguments)):
                unmet.append(condition)
        return unmet

    def _happening(self, trigger: TriggerRecord, source: Source) -> tuple[Facts, Cause]:
        """Return a happening as data, and with its original classes."""
        if source.kind != END:
            event = self._runtime.run(self._engine.part(Events).get(source.id))
            large = references(event.payload)
            payloads = self._runtime.run(self._engine.payloads.fetch(large)) if large else {}
            facts = event.facts_with(payloads)
            return facts, self._cause(facts, payload=self._runtime.codec.decode(event.payload, payloads))
        (record,) = self._runtime.run(self._engine.store.get(self._runtime.name, [InvocationId(source.id)]))
        if record is None:
            raise errors.InvocationNotFound(
                f"{source.id}, whose end the trigger '{self._name}' is for, is no longer there"
            )
        facts = self._runtime.run(self._engine.part(TriggerDispatcher).facts_of(record))
        wanted = [*references(record.arguments), *references(record.result)]
        payloads = self._runtime.run(self._engine.payloads.fetch(wanted)) if wanted else {}
        args, kwargs = self._runtime.codec.decode_call(record.arguments, payloads)
        result = None if record.result is None else self._runtime.codec.decode(record.result, payloads)
        named = replace(facts, args=args, kwargs=kwargs)
        arguments = next(
            (
                each.arguments(named)
                for each in trigger.conditions
                if isinstance(each, OnEnd) and record.task in each.tasks
            ),
            kwargs,
        )
        return facts, self._cause(facts, arguments=arguments, result=result)

    def _cause(self, facts: Facts, **values: Any) -> Cause:
        source, error = facts.source, facts.error
        raised = None if error is None else error_fields(error)
        status = "" if facts.status is None else facts.status.value
        return Cause(
            kind=source.kind, id=source.id, name=source.name, at=facts.at, status=status, error=raised, **values
        )


def _says(code: Callable[[Any], bool] | None, value: Any) -> bool:
    if code is None:
        return True
    answer = code(value)
    if answer is not True and answer is not False:
        raise errors.TriggerFailed(f"{code.__qualname__} is to answer True or False, not {answer!r:.80}")
    return answer
