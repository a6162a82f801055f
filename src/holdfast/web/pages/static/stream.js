// A stream, live: new items are appended to <pre data-stream="/invocations/ID/streams/NAME?start=7">.
const MOST = 2000; // lines that are kept

const sources = new Map(); // of the places that are followed

export function streams() {
  follow();
  document.addEventListener("holdfast:replaced", follow);
}

function follow() {
  for (const [place, source] of sources) {
    if (!place.isConnected) { source.close(); sources.delete(place); }
  }
  for (const place of document.querySelectorAll("pre[data-stream]")) if (!sources.has(place)) sources.set(place, open(place));
}

function open(place) {
  const source = new EventSource(`${document.body.dataset.root}/api/v1${place.dataset.stream}`);
  const add = (text) => {
    const is_at_end = place.scrollTop + place.clientHeight >= place.scrollHeight - 8;
    place.append(`${text}\n`);
    while (place.childNodes.length > MOST) place.firstChild.remove();
    if (is_at_end) place.scrollTop = place.scrollHeight;
  };
  source.onmessage = (event) => add(said(event.data));
  source.addEventListener("bytes", (event) => add(`base64: ${event.data}`));
  for (const kind of ["restart", "closed"]) source.addEventListener(kind, () => add(`[${kind}]`));
  for (const kind of ["end", "problem"]) source.addEventListener(kind, () => source.close());
  place.scrollTop = place.scrollHeight;
  return source;
}

function said(data) {
  try {
    const value = JSON.parse(data);
    return typeof value === "string" ? value : JSON.stringify(value);
  } catch {
    return data;
  }
}
