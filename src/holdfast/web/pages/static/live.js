// Live updates: the server names topics that have changed; the page fetches itself and replaces its regions.
//
// A region is an element with an id and `data-live`. A region waits while the pointer is over a control in it, a
// field in it has the focus, or the keyboard was used in it in the last seconds. The regions before it wait too: they
// would move it. What the user has just done is shown at once. Nothing is fetched while the tab is hidden. Where regions
// have come or gone, as the errors of a call that has failed, the whole page is replaced, once no region has to wait;
// but not where something may be half written in a form.
const PAUSE = 1000; // at least, between two updates
const CLICKABLE = "a, button, input, select, textarea, summary, label, [data-row]";

const root = () => document.body.dataset.root;
let wanted = false;
let running = false;
let last = 0;
let pointer = null;
let source = null;
let forced = false;
let typed = 0;
const AGAIN = 10000; // after a refusal
const TYPING = 5000; // how long the keyboard counts as in use

export function live() {
  const topics = document.body.dataset.topics;
  if (!topics || !window.EventSource) return;
  document.addEventListener("pointermove", (event) => { pointer = event.target; });
  document.addEventListener("pointerleave", () => { pointer = null; });
  document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start(topics)));
  document.addEventListener("keydown", () => { typed = Date.now(); });
  document.addEventListener("holdfast:changed", () => { wanted = forced = true; update(); });
  setInterval(update, 500);
  if (!document.hidden) start(topics);
}

function start(topics) {
  if (source) return;
  source = new EventSource(`${root()}/api/v1/live?topics=${encodeURIComponent(topics)}`);
  source.addEventListener("changed", () => { wanted = true; update(); });
  source.addEventListener("problem", () => say("the store does not answer"));
  source.onopen = () => say("live");
  source.onerror = () => {
    say("reconnecting");
    if (source?.readyState !== EventSource.CLOSED) return; // the browser does it; but not after an answer such as 429
    source = null;
    setTimeout(() => { if (!document.hidden) start(topics); }, AGAIN);
  };
  if (last) { wanted = true; update(); } // what happened while the tab was hidden
  last = last || Date.now();
}

function stop() {
  source?.close();
  source = null;
  say("paused");
}

function say(text) {
  const state = document.querySelector(".live-state");
  if (state) state.textContent = text;
}

async function update() {
  if (!wanted || running || document.hidden || Date.now() - last < PAUSE || document.querySelector("dialog[open]")) return;
  const all = forced;
  if (!all && busy().length && busy().length === regions().length) return; // all would wait
  running = true;
  wanted = forced = false;
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, credentials: "same-origin" });
    if (answer.redirected && new URL(answer.url).pathname !== location.pathname) return location.reload(); // logged out
    if (!answer.ok) return say(`the server answered ${answer.status}`);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const waiting = all ? [] : busy();
    document.title = fresh.title;
    if (idsOf(fresh) !== idsOf(document) && !document.querySelector("main form")) {
      if (waiting.length) wanted = true;
      else return replace(document.querySelector("main"), fresh.querySelector("main"));
    }
    for (const region of regions()) {
      const other = fresh.getElementById(region.id);
      if (!other || other.outerHTML === region.dataset.shown) continue;
      if (waiting.includes(region)) { wanted = true; continue; }
      replace(region, other);
    }
    say("live");
  } catch {
    say("not reached");
    wanted = true;
  } finally {
    last = Date.now();
    running = false;
  }
}

const regions = (of = document) => [...of.querySelectorAll("[data-live][id]")];
const idsOf = (of) => regions(of).map((each) => each.id).join(" ");

function busy() {
  const about = pointer?.isConnected ? pointer.closest?.(CLICKABLE) : null;
  const active = document.activeElement?.closest("main *");
  const focus = active?.matches("input, select, textarea") || Date.now() - typed < TYPING ? active : null;
  const near = [about?.closest("main") ? about : null, focus].filter(Boolean);
  const selected = [...document.querySelectorAll("main input[type=checkbox]:checked")];
  return regions().filter(
    (region) =>
      near.some((each) => region.contains(each) || region.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING) ||
      selected.some((each) => region.contains(each)),
  );
}

function replace(region, other) {
  const open = new Set([...region.querySelectorAll("details[open]")].map((each) => each.dataset.key || each.querySelector("summary")?.textContent));
  const focused = region.contains(document.activeElement) ? placeOf(region, document.activeElement) : null;
  const shown = region.matches("[data-live]") ? other.outerHTML : "";
  region.className = other.className;
  region.hidden = other.hidden;
  region.replaceChildren(...other.childNodes);
  if (shown) region.dataset.shown = shown;
  for (const each of region.querySelectorAll("details")) {
    if (open.has(each.dataset.key || each.querySelector("summary")?.textContent)) each.open = true;
  }
  if (focused) (region.querySelectorAll(focused.kind)[focused.number] || region).focus({ preventScroll: true });
  region.dispatchEvent(new CustomEvent("holdfast:replaced", { bubbles: true }));
}

// The focus goes to what is in the same place: the third button stays the third button.
function placeOf(region, focused) {
  const kind = focused.matches("[data-row]") ? "[data-row]" : focused.localName;
  return { kind, number: [...region.querySelectorAll(kind)].indexOf(focused) };
}
