// Narrow tables: each cell gets the head of its column as a label, with which the sheet stacks the cells of a row.
export function tables() {
  document.querySelectorAll("table").forEach(label);
  document.addEventListener("holdfast:replaced", (event) => event.target.querySelectorAll("table").forEach(label));
}

function label(table) {
  const heads = [...table.querySelectorAll("thead th")].map((each) => (each.querySelector(".hidden") || each.matches(".plain") ? "" : each.textContent));
  if (!heads.length) return;
  table.classList.add("stacks");
  for (const row of table.tBodies[0]?.rows ?? []) {
    let column = 0;
    for (const cell of row.cells) {
      const says = cell.textContent.trim() || cell.querySelector("input, svg, progress");
      cell.classList.toggle("is-blank", !says);
      const text = cell.textContent.trim();
      cell.classList.toggle("is-zero", text === "0" || text === "0s");
      const tells = cell.firstElementChild?.matches(".status") && !/^[\d,]+$/.test(text); // by itself
      if (column && says && heads[column] && !tells) cell.dataset.label = heads[column];
      column += cell.colSpan;
    }
  }
}
