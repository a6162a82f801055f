"""The state machine as a picture, derived from `model.status.TABLE`.

Sixty edges drawn one by one are a hairball, so the SVG borrows from statecharts: statuses that share exits stand in a
frame, and an arrow that starts at a frame's border leaves every status in it. Which arrows start at a frame is computed
from the table; only places (`POSITIONS`, `FRAMES`) and the bends of arrows (`ROUTES`) are laid out by hand. An edge
without a route is drawn as a straight line: ugly, never missing.

Pure text in, text out. The same table gives the same bytes, so CI can compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from html import escape
from textwrap import wrap
from types import MappingProxyType
from typing import Literal, NamedTuple

from holdfast.model.status import INITIAL, TABLE, Rescuer, Rule, Status

Format = Literal["svg", "mermaid", "text"]
Point = tuple[float, float]
S = Status


class Kind(StrEnum):
    """What a status is, in one word. The value is shown in legends."""

    AVAILABLE = "available"
    OWNED = "owned"
    WAITING = "waiting"
    RECOVERY = "recovery"
    FINAL = "final"


def kind_of(rule: Rule) -> Kind:
    if rule.is_final:
        return Kind.FINAL
    if rule.available_for_run:
        return Kind.AVAILABLE
    if rule.requires_ownership:
        return Kind.OWNED
    if rule.rescued_by in (Rescuer.RECOVER_PENDING, Rescuer.RECOVER_RUNNING):
        return Kind.RECOVERY
    return Kind.WAITING


_KIND_COLOURS = {
    Kind.AVAILABLE: "#0e7490",
    Kind.OWNED: "#1d4ed8",
    Kind.WAITING: "#7c3aed",
    Kind.RECOVERY: "#b45309",
    Kind.FINAL: "#475569",
}
# How it ended is what people look for first, so a good and a bad end have colours of their own.
_END_COLOURS = {S.SUCCESS: "#15803d", S.FAILED: "#b91c1c"}

COLOURS: Mapping[Status, str] = MappingProxyType(
    {status: _END_COLOURS.get(status, _KIND_COLOURS[kind_of(rule)]) for status, rule in TABLE.items()}
)
"""A colour for each status, dark enough for white text on it. The monitor uses the same ones."""


def render(format: Format) -> str:
    """Return the table as an SVG image, a Mermaid state diagram, or text for a terminal."""
    if format == "svg":
        return _svg()
    if format == "mermaid":
        return _mermaid()
    if format == "text":
        return _text()
    raise ValueError(f"no format {format!r}; use svg, mermaid or text")


def _ordered(statuses: frozenset[Status]) -> list[Status]:
    return [status for status in Status if status in statuses]


# --- Text -------------------------------------------------------------------------------------------------------------


_COLUMNS = 80


def _owner_rule(rule: Rule) -> str:
    leave = "no change leaves it" if rule.is_final else "any actor may leave it"
    parts = {
        "entering takes ownership": rule.acquires_ownership,
        "entering gives ownership up": rule.releases_ownership,
        "entering keeps the owner": not (rule.acquires_ownership or rule.releases_ownership),
        "a non-owner may enter it": rule.overrides_ownership,
        "only the owner may leave it": rule.requires_ownership,
        leave: not rule.requires_ownership,
    }
    return "; ".join(text for text, holds in parts.items() if holds)


def _text() -> str:
    width = max(len(status.name) for status in TABLE)
    lines = [f"(start) → {INITIAL.name}"]
    for status, rule in TABLE.items():
        following = ", ".join(target.name for target in _ordered(rule.next)) or "(none)"
        lines += [
            "",
            *_wrapped(f"{status.name:<{width}}  {kind_of(rule):<9}  ", rule.meaning),
            *_wrapped("    next     ", following),
            *_wrapped("    owner    ", _owner_rule(rule)),
            *_wrapped("    rescuer  ", rule.rescued_by or "(none needed)"),
        ]
    return "\n".join(lines) + "\n"


def _wrapped(label: str, text: str) -> list[str]:
    """Return the lines of a label and its text, which is indented by the label's width."""
    return wrap(text, _COLUMNS, initial_indent=label, subsequent_indent=" " * len(label))


# --- Mermaid ----------------------------------------------------------------------------------------------------------


def _mermaid() -> str:
    lines = ["stateDiagram-v2", "    direction LR", f"    [*] --> {INITIAL.name}"]
    for status, rule in TABLE.items():
        lines += [f"    {status.name} --> {target.name}" for target in _ordered(rule.next)]
        lines += [f"    {status.name} --> [*]"] if rule.is_final else []
    members: dict[str, list[str]] = {}
    colours: dict[str, str] = {}
    for status, rule in TABLE.items():
        name = status.value if status in _END_COLOURS else kind_of(rule).value
        members.setdefault(name, []).append(status.name)
        colours[name] = COLOURS[status]
    lines += [f"    classDef {name} fill:{fill},stroke:{fill},color:#ffffff" for name, fill in colours.items()]
    lines += [f"    class {','.join(names)} {name}" for name, names in members.items()]
    return "\n".join(lines) + "\n"


# --- SVG: the layout --------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 1450, 800
_NODE_WIDTH, _NODE_HEIGHT = 176, 44

# Centres. The spine REGISTERED → PENDING → RUNNING → SUCCESS reads from left to right; below is what comes back to it.
POSITIONS: Mapping[Status, Point] = {
    S.REGISTERED: (170, 205),
    S.REROUTED: (170, 295),
    S.RETRY: (170, 390),
    S.CONCURRENCY_CONTROLLED_FINAL: (430, 135),
    S.PENDING_RECOVERY: (430, 212),
    S.PENDING: (430, 295),
    S.RESUMED: (680, 205),
    S.RUNNING: (680, 295),
    S.PAUSED: (1000, 205),
    S.CANCELLING: (1000, 390),
    S.CONCURRENCY_CONTROLLED: (170, 610),
    S.KILLED: (380, 610),
    S.RUNNING_RECOVERY: (590, 610),
    S.PARKED: (800, 610),
    S.SUSPENDED: (1015, 610),
    S.SUCCESS: (1300, 285),
    S.FAILED: (1300, 425),
    S.CANCELLED: (1300, 610),
}


class Frame(NamedTuple):
    """Statuses that share exits. An inner frame comes after the outer one, which then has the first say."""

    label: str
    members: frozenset[Status]
    left: float
    top: float
    right: float
    bottom: float


FRAMES: Mapping[str, Frame] = {
    "ready": Frame("ready: a runner may claim it", frozenset({S.REGISTERED, S.REROUTED, S.RETRY}), 56, 124, 284, 436),
    "expires": Frame("may expire unstarted", frozenset({S.REGISTERED, S.REROUTED}), 68, 152, 272, 328),
    "started": Frame(
        "started, with an owner", frozenset({S.RUNNING, S.PAUSED, S.RESUMED, S.CANCELLING}), 560, 124, 1120, 436
    ),
    "active": Frame("its code runs", frozenset({S.RUNNING, S.RESUMED}), 576, 152, 784, 328),
    "away": Frame(
        "away from the queue",
        frozenset({S.CONCURRENCY_CONTROLLED, S.KILLED, S.RUNNING_RECOVERY, S.PARKED, S.SUSPENDED}),
        56,
        526,
        1120,
        662,
    ),
    "fallible": Frame(
        "may end as failed",
        frozenset({S.CONCURRENCY_CONTROLLED, S.KILLED, S.RUNNING_RECOVERY, S.PARKED}),
        68,
        554,
        902,
        646,
    ),
}

# The bends of an arrow, from border to border, by (status or frame, target).
ROUTES: Mapping[tuple[str, Status], tuple[Point, ...]] = {
    ("ready", S.PENDING): ((284, 287), (342, 287)),
    ("ready", S.CONCURRENCY_CONTROLLED): ((238, 436), (238, 588)),
    ("ready", S.CANCELLED): ((56, 410), (40, 410), (40, 700), (1300, 700), (1300, 632)),
    ("expires", S.FAILED): ((254, 152), (254, 96), (1422, 96), (1422, 425), (1388, 425)),
    ("registered", S.CONCURRENCY_CONTROLLED_FINAL): ((258, 205), (310, 205), (310, 135), (342, 135)),
    ("pending", S.RUNNING): ((518, 295), (592, 295)),
    ("pending", S.REROUTED): ((342, 303), (258, 303)),
    ("pending", S.PENDING_RECOVERY): ((430, 273), (430, 234)),
    ("pending", S.KILLED): ((375, 317), (375, 588)),
    ("pending", S.PARKED): ((410, 317), (410, 472), (740, 472), (740, 588)),
    ("pending", S.CANCELLING): ((445, 317), (445, 402), (912, 402)),
    ("pending_recovery", S.REROUTED): ((342, 212), (326, 212), (326, 273), (258, 273)),
    ("active", S.PAUSED): ((784, 195), (912, 195)),
    ("paused", S.RESUMED): ((912, 215), (768, 215)),
    ("paused", S.CANCELLING): ((1000, 227), (1000, 368)),
    ("active", S.CANCELLING): ((784, 314), (866, 314), (866, 380), (912, 380)),
    ("active", S.SUCCESS): ((784, 275), (1212, 275)),
    ("active", S.FAILED): ((784, 295), (1150, 295), (1150, 433), (1212, 433)),
    ("active", S.RETRY): ((600, 328), (600, 378), (258, 378)),
    ("active", S.PARKED): ((765, 328), (765, 588)),
    ("active", S.SUSPENDED): ((740, 328), (740, 350), (832, 350), (832, 455), (1000, 455), (1000, 588)),
    ("cancelling", S.SUCCESS): ((1088, 380), (1180, 380), (1180, 295), (1212, 295)),
    ("cancelling", S.FAILED): ((1088, 390), (1190, 390), (1190, 417), (1212, 417)),
    ("cancelling", S.CANCELLED): ((1088, 402), (1138, 402), (1138, 600), (1212, 600)),
    ("started", S.KILLED): ((580, 436), (580, 500), (420, 500), (420, 588)),
    ("started", S.RUNNING_RECOVERY): ((620, 436), (620, 588)),
    ("away", S.REROUTED): ((56, 600), (24, 600), (24, 295), (82, 295)),
    ("away", S.CANCELLED): ((1120, 620), (1212, 620)),
    ("fallible", S.FAILED): ((870, 554), (870, 490), (1300, 490), (1300, 447)),
}


class Arrow(NamedTuple):
    """One line of the picture, from a status or a frame (`start`), standing for an edge of each of `sources`."""

    start: str
    sources: tuple[Status, ...]
    target: Status


def _arrows() -> Iterator[Arrow]:
    """Yield each edge of the table in one arrow: a frame's if all its members have it, else the status's own."""
    for target in TABLE:
        left = {source for source, rule in TABLE.items() if target in rule.next}
        for name, frame in FRAMES.items():
            if frame.members <= left:
                left -= frame.members
                yield Arrow(name, tuple(_ordered(frame.members)), target)
        for source in _ordered(frozenset(left)):
            yield Arrow(source.value, (source,), target)


class DrawnNode(NamedTuple):
    """A status of the picture: the corner of its box and its centre."""

    status: Status
    left: float
    top: float
    x: float
    y: float
    meaning: str


class DrawnArrow(NamedTuple):
    """An arrow of the picture, as an SVG path."""

    sources: tuple[Status, ...]
    target: Status
    path: str


class Drawing(NamedTuple):
    """The picture as geometry, for pages that colour it themselves."""

    width: int
    top: int
    height: int
    node_width: int
    node_height: int
    frames: tuple[Frame, ...]
    arrows: tuple[DrawnArrow, ...]
    nodes: tuple[DrawnNode, ...]


def drawing() -> Drawing:
    """Return places of statuses and arrows. The same table gives the same picture as `render`."""
    nodes = [
        DrawnNode(status, *_box(status.value)[:2], *POSITIONS[status], rule.meaning) for status, rule in TABLE.items()
    ]
    arrows = [
        DrawnArrow(
            each.sources,
            each.target,
            _rounded(ROUTES.get((each.start, each.target)) or _straight(each.start, each.target)),
        )
        for each in _arrows()
    ]
    top, height = 84, 630  # without title and legend
    return Drawing(_WIDTH, top, height, _NODE_WIDTH, _NODE_HEIGHT, tuple(FRAMES.values()), tuple(arrows), tuple(nodes))


# --- SVG: the drawing -------------------------------------------------------------------------------------------------


def _box(name: str) -> tuple[float, float, float, float]:
    if name in FRAMES:
        return FRAMES[name][2:]
    x, y = POSITIONS[Status(name)]
    return x - _NODE_WIDTH / 2, y - _NODE_HEIGHT / 2, x + _NODE_WIDTH / 2, y + _NODE_HEIGHT / 2


def _straight(start: str, target: Status) -> tuple[Point, ...]:
    """Return a line from border to border between the centres, for an edge without a route."""
    boxes = (_box(start), _box(target.value))
    (ax, ay), (bx, by) = [((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in boxes]
    ends = []
    for (left, top, right, bottom), (x, y), (dx, dy) in zip(
        boxes, ((ax, ay), (bx, by)), ((bx - ax, by - ay), (ax - bx, ay - by)), strict=True
    ):
        reach = min((right - left) / 2 / (abs(dx) or 1e-9), (bottom - top) / 2 / (abs(dy) or 1e-9), 0.45)
        ends.append((x + dx * reach, y + dy * reach))
    return tuple(ends)


def _rounded(points: tuple[Point, ...], radius: float = 12) -> str:
    """Return an SVG path through `points` with round corners."""
    path = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        entry, leave = (_towards(corner, other, radius) for other in (before, after))
        path.append(f"L{entry[0]:g} {entry[1]:g}Q{corner[0]:g} {corner[1]:g} {leave[0]:g} {leave[1]:g}")
    return "".join(path) + f"L{points[-1][0]:g} {points[-1][1]:g}"


def _towards(start: Point, end: Point, distance: float) -> Point:
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    share = min(distance / length, 0.5)
    return round(start[0] + dx * share, 2), round(start[1] + dy * share, 2)


def _svg_arrow(arrow: Arrow) -> str:
    points = ROUTES.get((arrow.start, arrow.target)) or _straight(arrow.start, arrow.target)
    weight = "end" if TABLE[arrow.target].is_final else "move"
    names = " ".join(source.value for source in arrow.sources)
    title = f"{', '.join(source.name for source in arrow.sources)} → {arrow.target.name}"
    colour = COLOURS[arrow.target]
    return (
        f'<path class="edge {weight}" data-from="{names}" data-to="{arrow.target}" stroke="{colour}" '
        f'marker-end="url(#head-{colour[1:]})" d="{_rounded(points)}"><title>{escape(title)}</title></path>'
    )


def _svg_frame(frame: Frame) -> str:
    return (
        f'<rect class="frame" x="{frame.left:g}" y="{frame.top:g}" width="{frame.right - frame.left:g}" '
        f'height="{frame.bottom - frame.top:g}" rx="14"/>'
        f'<text class="label" x="{frame.left + 14:g}" y="{frame.top + 18:g}">{escape(frame.label)}</text>'
    )


def _svg_node(status: Status, rule: Rule) -> str:
    left, top, _, _ = _box(status.value)
    x, y = POSITIONS[status]
    size = min(13.0, round((_NODE_WIDTH - 14) / (0.74 * len(status.name)), 1))
    rescue = f"rescued by {rule.rescued_by}" if rule.rescued_by else "final"
    return (
        f'<g data-status="{status}"><title>{escape(f"{status.name}: {rule.meaning}")}</title>'
        f'<rect x="{left:g}" y="{top:g}" width="{_NODE_WIDTH}" height="{_NODE_HEIGHT}" rx="9" '
        f'fill="{COLOURS[status]}"/>'
        f'<text class="name" x="{x:g}" y="{y - 2:g}" font-size="{size:g}">{status.name}</text>'
        f'<text class="rescue" x="{x:g}" y="{y + 13:g}">{escape(rescue)}</text></g>'
    )


# Each rule is scoped: pages that inline the picture have a .title and a .label of their own.
_STYLE = "".join(
    f".holdfast-diagram {rule}"
    for rule in (
        "text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}",
        ".name{fill:#fff;font-weight:700;text-anchor:middle}",
        ".rescue{fill:#fff;font-size:9.5px;text-anchor:middle}",
        ".frame{fill:#64748b;fill-opacity:.07;stroke:#94a3b8;stroke-width:1.2}",
        ".label{fill:#475569;font-size:11.5px;font-style:italic}",
        ".edge{fill:none;stroke-width:2}",
        ".end{stroke-width:1.4;stroke-opacity:.6}",
        ".note{fill:#334155;font-size:12.5px}",
        ".title{fill:#0f172a;font-size:22px;font-weight:700}",
    )
)


def _svg_legend(y: float) -> Iterator[str]:
    entries = [(_KIND_COLOURS[kind], kind.value) for kind in Kind if kind is not Kind.FINAL]
    entries += [(colour, f"final: {status}") for status, colour in _END_COLOURS.items()]
    entries += [(_KIND_COLOURS[Kind.FINAL], "final: other")]
    for index, (colour, word) in enumerate(entries):
        x = 56 + 150 * index
        yield f'<rect x="{x}" y="{y - 11:g}" width="22" height="14" rx="4" fill="{colour}"/>'
        yield f'<text class="note" x="{x + 30}" y="{y:g}">{escape(word)}</text>'


def _svg() -> str:
    summary = " ".join(
        f"{status.name}: {', '.join(target.name for target in _ordered(rule.next)) or 'final'}."
        for status, rule in TABLE.items()
    )
    heads = "".join(
        f'<marker id="head-{colour[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>'
        for colour in dict.fromkeys(COLOURS.values())
    )
    left, _, _, _ = _box(INITIAL.value)
    start_y = POSITIONS[INITIAL][1]
    start_colour = COLOURS[INITIAL]
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="holdfast-diagram" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        'aria-labelledby="holdfast-title holdfast-desc">',
        '<title id="holdfast-title">The life of an invocation</title>',
        f'<desc id="holdfast-desc">Each status with those that may follow it. {escape(summary)}</desc>',
        f"<style>{_STYLE}</style>",
        f"<defs>{heads}</defs>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="16" fill="#f8fafc"/>',
        '<text class="title" x="56" y="46">The life of an invocation</text>',
        '<text class="note" x="56" y="70">An arrow from the border of a frame leaves every status in it. '
        "Thin arrows end the invocation. Nothing stays for ever: each status names its rescuer.</text>",
        *map(_svg_frame, FRAMES.values()),
        *map(_svg_arrow, _arrows()),
        f'<circle cx="36" cy="{start_y:g}" r="7" fill="{start_colour}"/>',
        f'<path class="edge move" stroke="{start_colour}" marker-end="url(#head-{start_colour[1:]})" '
        f'd="M43 {start_y:g}L{left:g} {start_y:g}"><title>start → {INITIAL.name}</title></path>',
        *(_svg_node(status, rule) for status, rule in TABLE.items()),
        *_svg_legend(_HEIGHT - 40),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
