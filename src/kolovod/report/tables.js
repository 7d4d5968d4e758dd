// Tables that are sorted by the column whose head is pressed: numbers from the largest.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const cells = [...body.rows].map((row) => row.cells[column]);
    const isNumber = cells.some((cell) => cell.dataset.value !== undefined);
    if (!isNumber && cells.every((cell) => !cell.textContent)) return; // a picture
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falls = head.getAttribute("aria-sort") !== "descending" && (isNumber || head.hasAttribute("aria-sort"));
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const key = (row) => row.cells[column];
      const compared = (a, b) => isNumber
        ? Number(key(a).dataset.value) - Number(key(b).dataset.value)
        : key(a).textContent.localeCompare(key(b).textContent);
      const rows = [...body.rows].sort((a, b) => (falls ? -compared(a, b) : compared(a, b)));
      body.append(...rows);
    });
  });
}
