// Actions: a button names a route of the API. A dialog shows what it will touch and its command-line twin, asks for a
// reason, and sends it.
//
//   <button data-action="/invocations/ID/cancel" data-title="Cancel" data-twin="holdfast cancel ID"
//           data-body='{"…": …}' data-fields='[{"name": "priority", "label": "Priority", "kind": "number", "value": 3}]'>
//
// Kinds of fields: text, number, json, checkbox, select (with "choices"); an empty `optional` field is not sent. With
// an `option` a field is written into the twin: "--limit"; "" for an argument, which stands before what is in `then`.
// `data-no-preview` is for routes without one;
// `data-go` is the page to open afterwards, with {name} for members of the answer.
const root = () => document.body.dataset.root;

export function actions() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    if (button) { event.preventDefault(); open(button); }
    const copied = event.target.closest("button[data-copy]");
    if (copied) { event.preventDefault(); copy(copied); }
  });
}

export async function send(path, body, method = "POST") {
  const headers = { "content-type": "application/json" };
  const csrf = document.querySelector("meta[name=csrf]")?.content;
  if (csrf) headers["x-holdfast-csrf"] = csrf;
  const answer = await fetch(`${root()}/api/v1${path}`, { method, headers, body: JSON.stringify(body), credentials: "same-origin" });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.detail || found.title || `the server answered ${answer.status}`);
  return found;
}

export function toast(text) {
  const note = element("p", { className: "toast", role: "status" }, text);
  document.body.append(note);
  setTimeout(() => note.remove(), 6000);
}

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "className") made.className = value;
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function open(button) {
  const data = button.dataset;
  const fixed = JSON.parse(data.body || "{}");
  const fields = JSON.parse(data.fields || "[]").map(field);
  const preview = element("div", { className: "preview", "aria-live": "polite" }, "…");
  const twin = element("code", {}, data.twin || "");
  const reason = element("input", { name: "reason", id: "action-reason", autocomplete: "off", maxlength: 500 });
  const problem = element("p", { className: "problem", role: "alert" });
  const go = element("button", { type: "submit", className: data.danger !== undefined ? "danger" : "main" }, data.title);
  const form = element("form", { method: "dialog" },
    element("h2", { id: "action-title" }, data.title),
    ...fields.flatMap((each) => each.parts),
    ...(data.noPreview === undefined ? [preview] : []),
    element("label", { for: "action-reason" }, "Reason, for the audit record"), reason, problem,
    ...(data.twin ? [element("p", { className: "muted" }, "The same on the command line: ", twin)] : []),
    element("div", { className: "row" }, element("button", { type: "button", "data-close": true }, "Back"), go));
  const dialog = element("dialog", { "aria-labelledby": "action-title" }, form);
  document.body.append(dialog);
  dialog.addEventListener("close", () => { dialog.remove(); button.focus(); });
  form.querySelector("[data-close]").addEventListener("click", () => dialog.close());

  const body = () => {
    const whole = structuredClone(fixed);
    for (const each of fields) for (const [name, value] of Object.entries(each.read())) put(whole, name, value);
    return { ...whole, reason: reason.value };
  };
  const say = () => {
    try { twin.textContent = [data.twin, ...words(fields, body())].join(" "); } catch { /* until it is JSON */ }
  };
  let asked = 0;
  const look = async () => {
    if (data.noPreview !== undefined) return;
    const mine = ++asked;
    const missing = fields.filter((each) => each.missing()).map((each) => each.label);
    if (missing.length) return preview.replaceChildren(`To be filled in: ${missing.join(", ")}`);
    try {
      const found = await send(data.action, { ...body(), preview: true }, data.method);
      if (mine !== asked) return;
      problem.textContent = "";
      go.disabled = false;
      Object.assign(fixed, found.bind); // what was previewed is what is done
      show(preview, found);
    } catch (error) {
      if (mine === asked) { preview.replaceChildren(); problem.textContent = error.message; }
    }
  };
  let delay = null;
  form.addEventListener("change", (event) => { if (event.target !== reason) look(); });
  form.addEventListener("input", (event) => {
    say();
    if (event.target === reason) return;
    clearTimeout(delay);
    delay = setTimeout(look, 300);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    try {
      const found = await all(data, body(), preview);
      dialog.close();
      toast(found.summary || `${data.title}: done`);
      if (data.go) location.assign(root() + data.go.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(found[name])));
      else document.dispatchEvent(new CustomEvent("holdfast:changed"));
    } catch (error) {
      problem.textContent = error.message;
      go.disabled = false;
    }
  });
  go.disabled = data.noPreview === undefined; // until it is known what would be touched
  dialog.showModal();
  (fields[0]?.input || reason).focus();
  say();
  look();
}

// What the twin needs of the fields, and the reason. Members of an object, such as kwargs.customer, are one word.
function words(fields, body) {
  const named = new Map(fields.filter((each) => each.option !== undefined).map((each) => [each.name.split(".")[0], each]));
  const found = [];
  for (const [name, each] of named) {
    const value = body[name];
    if (value === undefined || value === false) continue;
    if (each.option) found.push(each.option);
    if (value !== true) found.push(quoted(each.asJson || typeof value === "object" ? JSON.stringify(value) : String(value)));
    if (each.then) found.push(quoted(each.then));
  }
  return body.reason ? [...found, "--reason", quoted(body.reason)] : found;
}

export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

// A name with dots leads to a member of a member: kwargs.customer.
function put(whole, name, value) {
  const [first, ...rest] = name.split(".");
  if (!rest.length) whole[first] = value;
  else put((whole[first] ??= {}), rest.join("."), value);
}

// An action on many answers with what the next request has `more`, until all is done.
async function all(data, body, preview) {
  let found = await send(data.action, body, data.method);
  for (let done = found.count; found.more; done += found.count) {
    preview.textContent = `${done.toLocaleString("en")} so far …`;
    found = await send(data.action, { ...body, ...found.more }, data.method);
    found.summary = `${(done + found.count).toLocaleString("en")} in all; the last ones: ${found.summary}`;
  }
  return found;
}

function show(place, found) {
  const items = (found.items || []).map((each) => element("li", {}, each));
  const more = (found.count || 0) - items.length;
  if (items.length && more > 0) items.push(element("li", { className: "muted" }, `and ${more} more`));
  place.replaceChildren(element("p", {}, found.summary || ""), ...(items.length ? [element("ul", {}, ...items)] : []));
}

function field(given) {
  const id = `action-${given.name}`;
  const value = given.value ?? "";
  let input;
  if (given.kind === "json") input = element("textarea", { id, spellcheck: "false" }, typeof value === "string" ? value : JSON.stringify(value, null, 2));
  else if (given.kind === "select") input = element("select", { id }, ...given.choices.map((each) => element("option", { value: each, selected: each === value }, each)));
  else if (given.kind === "checkbox") input = element("input", { id, type: "checkbox", checked: value === true });
  else input = element("input", { id, type: given.kind === "number" ? "number" : "text", step: "any", value, autocomplete: "off" });
  const read = () => {
    if (given.kind === "checkbox") return { [given.name]: input.checked };
    if (input.value === "" && (given.kind !== "text" || given.optional)) return {};
    if (given.kind === "number") return { [given.name]: Number(input.value) };
    if (given.kind === "json") {
      try { return { [given.name]: JSON.parse(input.value) }; } catch (error) { throw new Error(`${given.label}: ${error.message}`); }
    }
    return { [given.name]: input.value };
  };
  const parts = [element("label", { for: id }, given.label), input];
  if (given.help) parts.push(element("p", { className: "muted" }, given.help));
  const missing = () => !given.optional && given.kind !== "checkbox" && input.value === "" && given.value === "";
  const asJson = given.kind === "json" || given.as_json;
  return { input, read, parts, missing, label: given.label, name: given.name, option: given.option, then: given.then, asJson };
}

async function copy(button) {
  const from = button.dataset.copy ? button.dataset.copy : document.getElementById(button.dataset.copyFrom)?.textContent;
  try {
    await navigator.clipboard.writeText(from || "");
    toast("Copied");
  } catch {
    toast("The browser does not allow copying here");
  }
}
