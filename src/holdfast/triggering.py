"""Triggers of an app: what its tasks declare as it is stored, and the tasks that decide where code is called for.

A trigger calls for code if it has a predicate or a function for the arguments, or if the identity of its task's calls
depends on their arguments (limits by argument, twins, debouncing): then the call has to be made by somebody who has the
task. For each of those there is a task of its own, declared beside the one that is called. Only runners that have the
same trigger know it, so in the midst of a deploy each happening goes to somebody who has the right code.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from holdfast.codec import Payload, references
from holdfast.engine.concurrency import RunningConcurrency
from holdfast.engine.core import Engine
from holdfast.engine.declarations import Declaration
from holdfast.engine.definition import Place, TaskDefinition, TaskSchedule, TaskTrigger
from holdfast.engine.telling import Firing, happened, holding, said
from holdfast.errors import (
    HoldfastError,
    InvalidSchedule,
    InvalidTrigger,
    InvocationNotFound,
    TriggerFailed,
    UsageError,
)
from holdfast.ids import InvocationId
from holdfast.lifecycle import joins
from holdfast.lifecycle.limits import limit_key
from holdfast.lifecycle.records import InvocationRecord, Source, registered
from holdfast.lifecycle.schedules import Call, CatchUp, Rules
from holdfast.lifecycle.triggers import DATA, END, Condition, Facts, OnEnd, TriggerRecord, put_together, told_of
from holdfast.scheduling import call_of
from holdfast.triggers import known_as, needs_code, tick_condition, tick_name

if TYPE_CHECKING:
    from holdfast.app import App
    from holdfast.task import Submittable

log = logging.getLogger("holdfast.triggers")

_BY_ARGUMENTS = (RunningConcurrency.ARGUMENTS, RunningConcurrency.KEYS)
EVALUATES = "trigger:"
_MOST_BESIDE = 50


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What a function for the arguments of a trigger is given: one for each thing that has happened, in the order of
    the conditions. Values are what they were, with their classes.
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


def trigger_records(tasks: Sequence[Submittable[..., Any]], app: str) -> list[TriggerRecord]:
    """Those that these tasks declare."""
    _warn_of_strangers(tasks)
    return [
        replace(_record(task, each, app), beside=_beside(task, tasks))
        for task in tasks
        for each in task.definition.triggers
    ]


def _beside(task: Submittable[..., Any], tasks: Iterable[Submittable[..., Any]]) -> tuple[str, ...]:
    """Other tasks of the same module."""
    module, colon, _ = task.name.partition(":")
    others = [each.name for each in tasks if each is not task and each.name.startswith(module + ":")] if colon else []
    return tuple(sorted(set(others))[:_MOST_BESIDE])


def refuse_doubles(definition: TaskDefinition, others: Iterable[TaskDefinition]) -> None:
    """A name stands for one trigger, and for one schedule. Raises `InvalidTrigger`, `InvalidSchedule`."""
    if not definition.triggers and not definition.schedules:
        return
    apart = [other for other in others if other.name != definition.name]
    scheduled = {each.name: other.name for other in apart for each in other.schedules}
    for name in (each.name for each in definition.schedules if each.name):
        if name in scheduled:
            raise InvalidSchedule(f"two schedules are named '{name}': of {scheduled[name]} and of {definition.name}")
        scheduled[name] = definition.name
    taken = {known_as(each, other.name): other.name for other in apart for each in other.triggers}
    for each in definition.triggers:
        name = known_as(each, definition.name)
        if name in taken:
            raise InvalidTrigger(f"two triggers are named '{name}': of {taken[name]} and of {definition.name}")
        taken[name] = definition.name


def _warn_of_strangers(tasks: Sequence[Submittable[..., Any]]) -> None:
    """Ends of a task that is not declared here: of another program, or of nobody."""
    known = {name for task in tasks for name in task.definition.names}
    for task in tasks:
        for each in task.definition.triggers:
            for condition in (asked.condition for asked in each.asked):
                if isinstance(condition, OnEnd) and known.isdisjoint(condition.tasks):
                    name, near = condition.tasks[0], difflib.get_close_matches(condition.tasks[0], known, n=1)
                    log.log(
                        logging.WARNING if near else logging.INFO,
                        "the trigger '%s' is for ends of the task '%s', which is not declared here.%s",
                        known_as(each, task.name),
                        name,
                        f" Did you mean '{near[0]}'?" if near else " Another program may declare it.",
                    )


def _record(task: Submittable[..., Any], declared: TaskTrigger, app: str) -> TriggerRecord:
    name = known_as(declared, task.name)
    parameters = task.definition.signature.parameters.values()
    by_name = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return TriggerRecord(
        app=app,
        name=name,
        clauses=_conditions(declared, name),
        call=_call(task),
        arguments=declared.arguments,
        takes=None if any(each.kind is each.VAR_KEYWORD for each in parameters) else tuple(by_name),
        within_seconds=declared.within_seconds,
        evaluator=EVALUATES + name if _calls_for_code(task.definition, declared) else "",
    )


def _conditions(declared: TaskTrigger, name: str) -> tuple[tuple[tuple[Condition, ...], ...], ...]:
    number = iter(range(len(declared.asked)))
    return tuple(
        tuple(tuple(asked.condition or tick_condition(name, next(number)) for asked in member) for member in clause)
        for clause in declared.clauses
    )


def _call(task: Submittable[..., Any]) -> Call:
    """The call, without its arguments."""
    definition = task.definition
    whole = limit_key(task.name, "")
    return Call(
        task=task.name,
        arguments=b"",
        queue=definition.queue,
        tags=definition.tags,
        priority=definition.priority,
        at_most_once=definition.at_most_once,
        limit_key=whole if definition.concurrency.mode is RunningConcurrency.TASK else None,
        twin=whole if definition.registration.mode is RunningConcurrency.TASK else None,
        expires_seconds=definition.time.expires,
        terms=task._terms,
    )


def _calls_for_code(task: TaskDefinition, declared: TaskTrigger) -> bool:
    by_arguments = task.concurrency.mode in _BY_ARGUMENTS or task.registration.mode in _BY_ARGUMENTS
    return needs_code(declared) or by_arguments or task.pacing is not None


def declarations(tasks: Sequence[Submittable[..., Any]], engine: Engine) -> list[Declaration]:
    """The schedules that the tasks declare, and those that their triggers need."""
    own = [
        Declaration(
            timing=each.timing,
            call=_declared_call(task, each, engine),
            rules=each.rules,
            name=each.name,
            beside=_beside(task, tasks),
        )
        for task in tasks
        for each in task.definition.schedules
    ]
    return own + _tick_declarations(tasks)


def _declared_call(task: Submittable[..., Any], declared: TaskSchedule, engine: Engine) -> Call:
    try:
        return call_of(task, engine, declared.args, dict(declared.kwargs))
    except HoldfastError as error:
        error.add_note(f"That is what {task.name} is to be called with, {declared.timing.describe()}.")
        raise


def _tick_declarations(tasks: Sequence[Submittable[..., Any]]) -> list[Declaration]:
    """The schedules whose ticks triggers wait for, beside other conditions."""
    found = []
    for task in tasks:
        for each in task.definition.triggers:
            name = known_as(each, task.name)
            timings = [asked.timing for asked in each.asked if asked.timing is not None]
            for number, timing in enumerate(timings):
                event = tick_condition(name, number).name
                call = Call(task=task.name, arguments=b"", event=event)
                rules = Rules(catch_up=CatchUp.LAST)
                beside = _beside(task, tasks)
                found.append(
                    Declaration(timing=timing, call=call, rules=rules, name=tick_name(name, number), beside=beside)
                )
    return found


# --- where code decides


def evaluators(app: App, definition: TaskDefinition) -> list[TaskDefinition]:
    """The tasks that decide for the triggers of this one."""
    return [
        _evaluator(app, definition, each, known_as(each, definition.name))
        for each in definition.triggers
        if _calls_for_code(definition, each)
    ]


def _evaluator(app: App, target: TaskDefinition, declared: TaskTrigger, name: str) -> TaskDefinition:
    def evaluate(kind: str, id: str) -> list[str]:
        return Evaluation(app, target.name, declared, name).run(kind, id)

    evaluate.__module__, evaluate.__qualname__ = __name__, f"evaluate[{name}]"
    return TaskDefinition(
        name=EVALUATES + name,
        function=evaluate,
        signature=inspect.signature(evaluate),
        place=Place.THREAD,
        queue=target.queue,
        tags=target.tags,
        priority=target.priority,
        is_hidden=True,
    )


class Evaluation:
    """One happening, one trigger, and the code of both. It runs in a thread, as a task."""

    def __init__(self, app: App, task: str, declared: TaskTrigger, name: str) -> None:
        self._app = app
        self._task = app.get_task(task)
        self._declared = declared
        self._name = name

    def run(self, kind: str, id: str) -> list[str]:
        """The invocations that came of it."""
        engine = self._app._ready()
        known = self._app._run(engine.subscriptions.get([self._name]))
        if self._name not in known:
            raise UsageError(f"the trigger '{self._name}' is gone")
        # By the conditions of this code: they are what its functions belong to.
        trigger = replace(known[self._name], clauses=_conditions(self._declared, self._name))
        if kind == joins.KIND:
            return self._left_over(engine, trigger, id)
        facts, cause = self._happening(engine, trigger, Source(kind=kind, id=id))
        made: dict[str, None] = {}
        for clause, members in holding(trigger, facts, self._unmet(trigger, facts, cause)).items():
            if len(trigger.clauses[clause]) == 1:
                firing = Firing(trigger=trigger, clause=clause, happened=(happened(trigger, facts),))
                if firing.id not in made:
                    made[self._fire(engine, firing, [cause])] = None
            else:
                join = self._app._run(engine.teller.put(trigger, clause, members, facts))
                made |= dict.fromkeys(self._fire_all(engine, trigger, join) if join else ())
        return list(made)

    def _left_over(self, engine: Engine, trigger: TriggerRecord, name: str) -> list[str]:
        """What was complete when somebody crashed."""
        entries = self._app._run(engine.store.entries(self._app.name, joins.KIND, [name]))
        return self._fire_all(engine, trigger, joins.from_entry(entries[0])) if entries else []

    def _fire_all(self, engine: Engine, trigger: TriggerRecord, join: joins.Join) -> list[str]:
        made = []
        for each in join.firings:
            firing = Firing(trigger=trigger, clause=join.clause, happened=each)
            causes = (
                [self._happening(engine, trigger, one.source)[1] for one in each] if self._declared.provider else []
            )
            made.append(self._fire(engine, firing, causes))
        self._app._run(engine.teller.clear(trigger, join))
        return made

    def _fire(self, engine: Engine, firing: Firing, causes: Sequence[Cause]) -> str:
        """Submit the call, as the task itself would; the id of what is there then."""
        payloads: list[Payload] = []
        record = self._invocation(engine, firing, causes, payloads)
        (before,) = self._app._run(engine.submitter.submit([record], payloads, self._task._debounce))
        return record.id if before is None else before.id

    def _invocation(
        self, engine: Engine, firing: Firing, causes: Sequence[Cause], payloads: list[Payload]
    ) -> InvocationRecord:
        if self._declared.provider is not None:
            kwargs = self._declared.provider(*causes)
            if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
                raise TriggerFailed(f"the arguments for {self._task.name} are {kwargs!r:.200}, and not a dict by name")
        else:
            given = [DATA.decode(each.picked) for each in firing.happened]
            kwargs, missing = put_together(firing.trigger, given)
            if missing:
                return engine.teller.invocation(firing, payloads)  # which says what is missing
            kwargs = self._app._codec.decode(DATA.encode(kwargs))
        record, large = self._task.prepared(engine, (), dict(kwargs))
        payloads += large
        fresh = replace(record, id=firing.id, origin=firing.origin, parent_id=None, history=())
        named = registered(fresh, operation=engine.ids.operation(), at=fresh.created_at, why=said(firing.origin))
        return engine.teller.bounded(named)

    def _unmet(self, trigger: TriggerRecord, facts: Facts, cause: Cause) -> list[Condition]:
        """The conditions whose code says no."""
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

    def _happening(self, engine: Engine, trigger: TriggerRecord, source: Source) -> tuple[Facts, Cause]:
        """As data, and as what it was."""
        if source.kind != END:
            event = self._app._run(engine.events.get(source.id))
            return event.facts, self._cause(event.facts, payload=self._app._codec.decode(event.payload))
        (record,) = self._app._run(engine.store.get(self._app.name, [InvocationId(source.id)]))
        if record is None:
            raise InvocationNotFound(f"{source.id}, whose end the trigger '{self._name}' is for, is no longer there")
        facts = self._app._run(engine.teller.facts_of(record))
        wanted = [*references(record.arguments), *references(record.result)]
        payloads = self._app._run(engine.depot.fetch(wanted)) if wanted else {}
        args, kwargs = self._app._codec.decode_call(record.arguments, payloads)
        result = None if record.result is None else self._app._codec.decode(record.result, payloads)
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
        told = None if error is None else told_of(error)
        status = "" if facts.status is None else facts.status.value
        return Cause(kind=source.kind, id=source.id, name=source.name, at=facts.at, status=status, error=told, **values)


def _says(code: Callable[[Any], bool] | None, value: Any) -> bool:
    if code is None:
        return True
    answer = code(value)
    if answer is not True and answer is not False:
        raise TriggerFailed(f"{code.__qualname__} is to answer True or False, not {answer!r:.80}")
    return answer
