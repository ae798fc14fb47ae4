"use strict";
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const order = (a, b) => {
      const x = key(a), y = key(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const byNumber = Number(x) - Number(y);
      const step = Number.isNaN(byNumber) ? x.localeCompare(y) : byNumber;
      return up ? step : -step;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }));
}
