"""The picture says what the table says: every edge once, every status in its place, the same bytes each time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from holdfast.model import diagram
from holdfast.model.diagram import COLOURS, FRAMES, POSITIONS, ROUTES, Kind, kind_of, render
from holdfast.model.status import FINAL, INITIAL, OWNED, TABLE, Status

S = Status
EDGES = {(source, target) for source, rule in TABLE.items() for target in rule.next}
SVG = "{http://www.w3.org/2000/svg}"


def svg() -> ET.Element:
    return ET.fromstring(render("svg"))


def drawn_edges() -> list[tuple[Status, Status]]:
    paths = [path for path in svg().iter(f"{SVG}path") if "data-from" in path.attrib]
    return [(S(source), S(path.attrib["data-to"])) for path in paths for source in path.attrib["data-from"].split()]


@pytest.mark.parametrize("name", ["svg", "mermaid", "text"])
def test_same_bytes_whatever_the_hash_seed(name: str) -> None:
    code = f"import sys; from holdfast.model.diagram import render; sys.stdout.buffer.write(render({name!r}).encode())"
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert runs == {render(name).encode()}  # type: ignore[arg-type]


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="svg, mermaid or text"):
        render("png")  # type: ignore[arg-type]


# --- Kinds and colours ------------------------------------------------------------------------------------------------


def test_every_status_has_the_kind_that_its_rule_implies() -> None:
    by_kind = {kind: {status for status, rule in TABLE.items() if kind_of(rule) is kind} for kind in Kind}
    assert by_kind == {
        Kind.AVAILABLE: {S.REGISTERED, S.REROUTED, S.RETRY},
        Kind.OWNED: OWNED,
        Kind.WAITING: {S.CONCURRENCY_CONTROLLED, S.SUSPENDED, S.PARKED},
        Kind.RECOVERY: {S.PENDING_RECOVERY, S.RUNNING_RECOVERY, S.KILLED},
        Kind.FINAL: FINAL,
    }


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("status", Status)
def test_white_text_is_readable_on_every_colour(status: Status) -> None:
    assert re.fullmatch(r"#[0-9a-f]{6}", COLOURS[status])
    assert 1.05 / (luminance(COLOURS[status]) + 0.05) >= 4.5


def test_a_good_and_a_bad_end_differ_in_colour_from_everything() -> None:
    for status in (S.SUCCESS, S.FAILED):
        assert [other for other in Status if COLOURS[other] == COLOURS[status]] == [status]


# --- Text and Mermaid -------------------------------------------------------------------------------------------------


def test_text_tells_next_owner_rule_and_rescuer_of_every_status() -> None:
    first, *blocks = render("text").rstrip("\n").split("\n\n")
    assert first == f"(start) → {INITIAL.name}"
    assert [block.split()[0] for block in blocks] == [status.name for status in TABLE]
    for block, (status, rule) in zip(blocks, TABLE.items(), strict=True):
        assert max(map(len, block.splitlines())) <= 80
        joined = re.sub(r"\n {13,}", " ", block)  # wrapped lines are indented further than labels
        head, following, owner, rescuer = joined.splitlines()
        assert rule.meaning in head
        assert set(re.findall(r"[A-Z_]{2,}", following)) == {target.name for target in rule.next}
        assert ("only the owner may leave it" in owner) is rule.requires_ownership
        assert ("entering takes ownership" in owner) is rule.acquires_ownership
        assert ("entering gives ownership up" in owner) is rule.releases_ownership
        assert ("a non-owner may enter it" in owner) is rule.overrides_ownership
        assert rescuer.split(maxsplit=1)[1] == (rule.rescued_by or "(none needed)"), status


def test_mermaid_has_every_edge_once_a_start_and_the_ends() -> None:
    lines = render("mermaid").splitlines()
    assert lines[0] == "stateDiagram-v2"
    arrows = [tuple(line.split(" --> ")) for line in map(str.strip, lines) if " --> " in line]
    expected = {(source.name, target.name) for source, target in EDGES}
    expected |= {("[*]", INITIAL.name)} | {(status.name, "[*]") for status in FINAL}
    assert len(arrows) == len(set(arrows))
    assert set(arrows) == expected


def test_mermaid_colours_every_status_once() -> None:
    text = render("mermaid")
    fills = dict(re.findall(r"classDef (\w+) fill:(#\w+)", text))
    classes = re.findall(r"^    class ([\w,]+) (\w+)$", text, re.MULTILINE)
    coloured = [(S[name], fills[style]) for names, style in classes for name in names.split(",")]
    assert len(coloured) == len(Status)
    assert dict(coloured) == dict(COLOURS)


# --- SVG --------------------------------------------------------------------------------------------------------------


def test_every_status_has_a_coordinate() -> None:
    assert set(POSITIONS) == set(Status)


def test_svg_draws_every_edge_of_the_table_exactly_once() -> None:
    drawn = drawn_edges()
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == EDGES


def test_svg_draws_every_status_with_its_colour_and_rescuer() -> None:
    groups = {group.attrib["data-status"]: group for group in svg().iter(f"{SVG}g")}
    assert list(groups) == [status.value for status in TABLE]
    for status, rule in TABLE.items():
        group = groups[status.value]
        texts = [text.text for text in group.iter(f"{SVG}text")]
        assert texts == [status.name, f"rescued by {rule.rescued_by}" if rule.rescued_by else "final"]
        assert [rect.attrib["fill"] for rect in group.iter(f"{SVG}rect")] == [COLOURS[status]]


def test_svg_explains_itself_and_needs_nothing_from_outside() -> None:
    root, text = svg(), render("svg")
    labelled = {root.find(f"{SVG}{tag}").attrib["id"] for tag in ("title", "desc")}  # type: ignore[union-attr]
    assert set(root.attrib["aria-labelledby"].split()) == labelled
    assert root.attrib["role"] == "img"
    assert "REGISTERED: CONCURRENCY_CONTROLLED" in (root.findtext(f"{SVG}desc") or "")
    background = root.find(f"{SVG}rect")
    assert background is not None
    assert (background.attrib["width"], background.attrib["height"]) == (root.attrib["width"], root.attrib["height"])
    assert re.findall(r"https?://\S+", text) == ['http://www.w3.org/2000/svg"']
    assert "<script" not in text
    legend = {element.text for element in root.iter(f"{SVG}text")}
    assert {"available", "owned", "waiting", "recovery", "final: success", "final: failed"} <= legend
    heads = {marker.attrib["id"] for marker in root.iter(f"{SVG}marker")}
    assert set(re.findall(r"url\(#([\w-]+)\)", text)) <= heads


def inside(point: tuple[float, float], box: tuple[float, float, float, float], margin: float = 0) -> bool:
    left, top, right, bottom = box
    return left - margin < point[0] < right + margin and top - margin < point[1] < bottom + margin


def on_border(point: tuple[float, float], box: tuple[float, float, float, float]) -> bool:
    return inside(point, box, margin=0.01) and not inside(point, box, margin=-0.01)


def test_every_frame_holds_its_members_and_nobody_else() -> None:
    for frame in FRAMES.values():
        assert {status for status in Status if inside(POSITIONS[status], frame[2:])} == frame.members


def test_every_arrow_is_laid_out_and_every_layout_is_used() -> None:
    assert {(arrow.start, arrow.target) for arrow in diagram._arrows()} == set(ROUTES)


@pytest.mark.parametrize(("start", "target"), ROUTES, ids=lambda value: str(value))
def test_an_arrow_touches_its_two_ends_and_crosses_no_status(start: str, target: Status) -> None:
    route = ROUTES[start, target]
    assert on_border(route[0], diagram._box(start))
    assert on_border(route[-1], diagram._box(target.value))
    for (ax, ay), (bx, by) in pairwise(route):
        steps = [(ax + (bx - ax) * i / 200, ay + (by - ay) * i / 200) for i in range(201)]
        for status in Status:
            assert not any(inside(point, diagram._box(status.value)) for point in steps), status


def test_an_edge_that_nobody_laid_out_is_still_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = TABLE[S.RETRY]
    monkeypatch.setattr(diagram, "TABLE", {**TABLE, S.RETRY: rule._replace(next=rule.next | {S.PARKED})})
    assert set(drawn_edges()) == EDGES | {(S.RETRY, S.PARKED)}


def test_a_frame_whose_members_differ_falls_back_to_their_own_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = TABLE[S.RETRY]
    monkeypatch.setattr(diagram, "TABLE", {**TABLE, S.RETRY: rule._replace(next=rule.next - {S.CANCELLED})})
    assert sorted(drawn_edges()) == sorted(EDGES - {(S.RETRY, S.CANCELLED)})
