// The keyboard: `/` search, `j` and `k` rows, Enter opens, `x` selects, `?` help. A button with `data-key` is pressed by
// that key: of the current row if it has one, else of the page.
import { element } from "./actions.js";

const HELP = [["/", "search"], ["j k", "next and previous row"], ["Enter", "open the row"], ["x", "select the row"], ["?", "these keys"]];
const GO = { o: "/", i: "/invocations", t: "/tasks", q: "/queues", s: "/schedules", r: "/runners" };
let before = "";

export function keys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (press(event.key)) event.preventDefault();
    before = event.key;
  });
}

function press(key) {
  if (before === "g" && GO[key]) return go(GO[key]);
  const row = document.querySelector("[data-row].is-current");
  if (key === "/") return focus(document.querySelector("[data-search]"));
  if (key === "?") return help();
  if (key === "j" || key === "k") return move(row, key === "j" ? 1 : -1);
  if (key === "Enter" && row && document.activeElement === row) return click(row.querySelector("a"));
  if (key === "x") return click(row?.querySelector("input[type=checkbox]"));
  if (!/^[a-z]$/.test(key)) return false;
  return click(row?.querySelector(`[data-key="${key}"]`) || document.querySelector(`main [data-key="${key}"]`));
}

function go(path) {
  return click(linkTo(path));
}

const linkTo = (path) => document.querySelector(`nav a[href="${CSS.escape(document.body.dataset.root)}${path}"]`);

function focus(target) {
  target?.focus();
  target?.select?.();
  return Boolean(target);
}

function click(target) {
  target?.click();
  return Boolean(target);
}

function move(row, by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return false;
  const next = rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(row) + by))] || rows[0];
  row?.classList.remove("is-current");
  next.classList.add("is-current");
  next.tabIndex = -1;
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
  return true;
}

function help() {
  const own = [...document.querySelectorAll("main button[data-key]")].map((each) => [each.dataset.key, each.textContent.trim()]);
  const pages = Object.entries(GO).map(([key, path]) => [`g ${key}`, linkTo(path)?.textContent.trim()]).filter(([, name]) => name);
  const seen = new Map([...HELP, ...own, ...pages]);
  const rows = [...seen].map(([key, what]) => element("tr", {}, element("td", {}, element("kbd", {}, key)), element("td", {}, what)));
  const dialog = element("dialog", { "aria-label": "Keys" }, element("h2", {}, "Keys"), element("table", {}, element("tbody", {}, ...rows)), element("form", { method: "dialog", className: "row" }, element("button", { className: "main" }, "Close")));
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
  return true;
}
