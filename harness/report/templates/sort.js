"use strict";
// Long tables sort by a press on a column's name and filter by words; without a script they stay
// as they are, with no dead controls.
const FILTERED_FROM = 8;

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value ?? cell.textContent.trim();
}

function compare(x, y) {
  if (x === "" || y === "") return null;
  const byNumber = Number(x) - Number(y);
  return Number.isNaN(byNumber) ? x.localeCompare(y) : byNumber;
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => {
        const x = key(a, column), y = key(b, column);
        const step = compare(x, y);
        if (step === null) return (x === "") - (y === "");  // what is missing comes last
        return up ? step : -step;
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  });
}

function filterable(table) {
  const rows = [...table.tBodies[0].rows];
  if (rows.length < FILTERED_FROM) return;
  const bar = document.createElement("div"), label = document.createElement("label");
  const input = document.createElement("input"), told = document.createElement("output");
  bar.className = "filter";
  input.type = "search";
  input.placeholder = "words that a row must have";
  label.append("Filter ", input);
  bar.append(label, told);
  table.closest(".scroll").before(bar);
  const texts = rows.map((row) =>
    [...row.cells].map((cell) => cell.textContent.trim()).join(" ").toLowerCase());
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      shown += !row.hidden;
    });
    told.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
  };
  input.addEventListener("input", show);
  show();
}

for (const table of document.querySelectorAll("table[data-sortable]")) {
  sortable(table);
  filterable(table);
}

// What is folded is printed too.
const opened = [];
addEventListener("beforeprint", () => {
  for (const fold of document.querySelectorAll("details:not([open])")) {
    fold.open = true;
    opened.push(fold);
  }
});
addEventListener("afterprint", () => { while (opened.length) opened.pop().open = false; });
