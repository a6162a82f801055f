// Keep relative times true. The exact time is in the title of each.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function ago(seconds) {
  const size = Math.abs(seconds);
  for (const [unit, name] of UNITS) {
    if (size >= unit) {
      const text = `${Math.floor(size / unit)} ${name}`;
      return seconds >= 0 ? `${text} ago` : `in ${text}`;
    }
  }
  return "now";
}

export function times() {
  const page = Number(document.body.dataset.now);
  const offset = page - Date.now() / 1000; // the store's clock counts
  const tick = () => {
    if (document.hidden) return;
    const now = Date.now() / 1000 + offset;
    for (const each of document.querySelectorAll("time[data-at]")) {
      const text = ago(now - Number(each.dataset.at));
      if (each.textContent !== text) each.textContent = text;
    }
  };
  setInterval(tick, 5000);
}
