// Line breaks in recipes, and filters for long tables: a text, and a choice for each column that names a model, a recipe and the like.
// Without this script the tables are plain.
(() => {
  const MOST_ROWS = 8;
  const CHOICES = ["cpu", "model", "recipe", "cache", "format", "text", "tokens", "heads", "budget", "facts", "paper",
    "task", "coded", "area"];

  const make = (name, attributes) => Object.assign(document.createElement(name), attributes);

  function addFilters(table) {
    const rows = [...table.tBodies[0].rows].map((row) => ({
      row,
      text: row.textContent.toLowerCase(),
      cells: [...row.cells].map((cell) => cell.textContent.trim()),
    }));
    if (rows.length <= MOST_ROWS) return;
    const box = make("div", { className: "filters" });
    const said = make("span", { className: "filters-said" });
    said.setAttribute("aria-live", "polite");
    const words = make("input", { type: "search", placeholder: "Filter rows" });
    words.setAttribute("aria-label", "Filter rows");
    box.append(words);
    const choices = [];
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const name = head.textContent.trim();
      const values = [...new Set(rows.map(({ cells }) => cells[column]))];
      if (!CHOICES.includes(name.toLowerCase()) || values.length < 2 || values.length === rows.length) return;
      const choice = make("select", {});
      choice.setAttribute("aria-label", name);
      choice.append(make("option", { value: "", textContent: `${name}: all` }));
      for (const value of values) choice.append(make("option", { value, textContent: value }));
      choices.push([choice, column]);
      box.append(choice);
    });

    function show() {
      const wanted = words.value.toLowerCase().split(/\s+/);
      let shown = 0;
      for (const { row, text, cells } of rows) {
        const fits = wanted.every((word) => text.includes(word)) &&
          choices.every(([choice, column]) => !choice.value || cells[column] === choice.value);
        row.hidden = !fits;
        shown += fits;
      }
      // A column that shows one value only gives its room to the others.
      for (const [choice, column] of choices) {
        for (const row of table.rows) row.cells[column].hidden = choice.value !== "";
      }
      said.textContent = shown < rows.length ? `${shown} of ${rows.length} rows` : `${rows.length} rows`;
    }
    box.addEventListener("input", show);
    box.append(said);
    show();
    (table.closest(".md-typeset__scrollwrap") || table).before(box);
  }

  // A long recipe may break after , + : and /, so that the numbers beside it stay in view.
  function addBreaks(table) {
    for (const code of table.querySelectorAll("code")) {
      if (code.textContent.length <= 12) code.classList.add("short");
      const parts = code.textContent.split(/(?<=[,+:/])/);
      code.replaceChildren(...parts.flatMap((part, i) => (i ? [make("wbr", {}), part] : [part])));
    }
  }

  const start = () => document.querySelectorAll(".md-typeset table:not([class])").forEach((table) => {
    addBreaks(table);
    if (table.tHead && table.tBodies.length) addFilters(table);
  });
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
