// The list of invocations: completion of the search, the brush over the chart, and the selection.
import { element, quoted } from "./actions.js";

const root = () => document.body.dataset.root;

export function search() {
  const input = document.querySelector("input[data-search][role=combobox]");
  if (input) complete(input, document.getElementById(input.getAttribute("aria-controls")));
  document.addEventListener("pointerdown", (event) => {
    const chart = event.target.closest?.("svg[data-brush]");
    if (chart && event.button === 0) brush(chart, event);
  });
  const bar = document.querySelector("[data-selection]");
  if (bar) select(bar);
}

function complete(input, list) {
  let asked = 0;
  let found = null;
  let current = -1;
  const hide = () => {
    list.hidden = true;
    input.setAttribute("aria-expanded", "false");
    input.removeAttribute("aria-activedescendant");
    current = -1;
  };
  const mark = (index) => {
    current = index;
    [...list.children].forEach((each, number) => each.setAttribute("aria-selected", String(number === current)));
    const chosen = list.children[current];
    if (chosen) {
      input.setAttribute("aria-activedescendant", chosen.id);
      chosen.scrollIntoView({ block: "nearest" });
    }
  };
  const take = (item) => {
    const rest = input.value.slice(found.end);
    const text = item.endsWith(":") || rest.startsWith(" ") ? item : `${item} `;
    input.value = input.value.slice(0, found.start) + text + rest;
    const place = found.start + text.length;
    input.setSelectionRange(place, place);
    input.focus();
    look();
  };
  const look = async () => {
    const mine = ++asked;
    const query = new URLSearchParams({ q: input.value, at: String(input.selectionStart ?? input.value.length) });
    const answer = await fetch(`${root()}/api/v1/invocations/complete?${query}`, { credentials: "same-origin" }).catch(() => null);
    if (mine !== asked || !answer?.ok) return;
    found = await answer.json();
    const written = input.value.slice(found.start, found.end);
    const items = found.items.filter((each) => each !== written);
    if (!items.length || document.activeElement !== input) return hide();
    list.replaceChildren(...items.map((each, number) => {
      const option = element("li", { role: "option", id: `completion-${number}`, "aria-selected": "false" }, each);
      option.addEventListener("pointerdown", (event) => { event.preventDefault(); take(each); });
      return option;
    }));
    list.hidden = false;
    input.setAttribute("aria-expanded", "true");
    current = -1;
  };
  let delay = null;
  input.addEventListener("input", () => { clearTimeout(delay); delay = setTimeout(look, 120); });
  input.addEventListener("focus", look);
  input.addEventListener("blur", () => { asked += 1; hide(); });
  input.addEventListener("keydown", (event) => {
    if (list.hidden) return;
    const last = list.children.length - 1;
    if (event.key === "ArrowDown") mark(current >= last ? 0 : current + 1);
    else if (event.key === "ArrowUp") mark(current <= 0 ? last : current - 1);
    else if (event.key === "Escape") { event.stopPropagation(); hide(); }
    else if ((event.key === "Enter" || event.key === "Tab") && current >= 0) take(list.children[current].textContent);
    else return;
    event.preventDefault();
  });
}

// Drag from one column to another: the search gets the time of both. A click is a link to one column.
function brush(chart, event) {
  const columns = [...chart.querySelectorAll("a[data-since]")];
  const at = (x) => columns.findIndex((each) => { const box = each.getBoundingClientRect(); return x >= box.left && x <= box.right; });
  const first = at(event.clientX);
  if (first < 0) return;
  let last = first;
  const mark = () => columns.forEach((each, number) => each.classList.toggle("is-brushed", number >= Math.min(first, last) && number <= Math.max(first, last)));
  const move = (moved) => {
    const place = at(moved.clientX);
    if (place >= 0) last = place;
    mark();
  };
  const stop = (stopped) => {
    document.removeEventListener("pointermove", move);
    if (first !== last) {
      chart.addEventListener("click", (click) => click.preventDefault(), { once: true, capture: true });
      narrow(columns[Math.min(first, last)].dataset.since, columns[Math.max(first, last)].dataset.until);
    }
    if (stopped.type === "pointercancel") columns.forEach((each) => each.classList.remove("is-brushed"));
  };
  document.addEventListener("pointermove", move);
  document.addEventListener("pointerup", stop, { once: true });
  document.addEventListener("pointercancel", stop, { once: true });
  chart.addEventListener("dragstart", (drag) => drag.preventDefault(), { once: true });
}

function narrow(since, until) {
  const input = document.querySelector("input[data-search]");
  const rest = input.value.replace(/(^|\s)(since|until):("[^"]*"|\S*)/g, " ").trim();
  const query = new URLSearchParams({ q: `${rest} since:${since} until:${until}`.trim() });
  location.assign(`${root()}/invocations?${query}`);
}

function select(bar) {
  const page = bar.querySelector("[data-select-page]");
  const more = bar.querySelector("[data-select-all]");
  const said = bar.querySelector("[data-selected]");
  const buttons = [...bar.querySelectorAll("button[data-action]")];
  const boxes = () => [...document.querySelectorAll("input[data-select]")];
  let all = null; // the number of all that match, if they are meant
  const show = () => {
    const chosen = boxes().filter((each) => each.checked);
    const body = all === null ? { ids: chosen.map((each) => each.value) } : { query: bar.dataset.query };
    for (const each of buttons) {
      each.dataset.body = JSON.stringify(body);
      each.dataset.twin = `holdfast ${each.dataset.action.split("bulk-")[1]} ${all === null ? body.ids.join(" ") : `--search ${quoted(body.query)}`}`;
      each.disabled = all === null && chosen.length === 0;
    }
    said.textContent = all === null ? (chosen.length ? `${chosen.length} selected` : "Select") : `all ${all} that match`;
    page.checked = all !== null || (chosen.length > 0 && chosen.length === boxes().length);
    page.indeterminate = !page.checked && chosen.length > 0;
    more.hidden = all !== null || !page.checked || !bar.dataset.query;
  };
  document.addEventListener("change", (event) => {
    if (event.target === page) boxes().forEach((each) => { each.checked = page.checked; });
    if (event.target === page || event.target.matches("input[data-select]")) { all = null; show(); }
  });
  more.addEventListener("click", async () => {
    const answer = await fetch(`${root()}/api/v1/invocations/count?${new URLSearchParams({ q: bar.dataset.query })}`, { credentials: "same-origin" });
    if (answer.ok) { all = (await answer.json()).text; show(); }
  });
  document.addEventListener("holdfast:replaced", show);
  document.addEventListener("holdfast:changed", () => { all = null; boxes().forEach((each) => { each.checked = false; }); show(); });
  show();
}
