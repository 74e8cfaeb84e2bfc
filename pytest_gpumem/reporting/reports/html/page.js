// The report's page: filter and sort the table, open a test's panel, and draw its charts when it opens.
"use strict";
(() => {
  const table = document.querySelector("table.tests");
  const tests = table ? [...table.tBodies].filter((body) => body.dataset.outcome) : [];
  const panels = new Map([...document.querySelectorAll("noscript[data-of]")].map((panel) => [panel.dataset.of, panel]));
  // For each drawn chart, whether it was drawn for a narrow screen.
  const drawn = new Map();

  // Filter.

  const search = document.getElementById("search");
  const boxes = [...document.querySelectorAll("input[name=outcome]")];
  const named = new Map(tests.map((body) => [body, body.querySelector("th").textContent.toLowerCase()]));

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcomes = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
    let shown = 0;
    for (const body of tests) {
      const fits = words.every((word) => named.get(body).includes(word));
      body.hidden = !fits || (outcomes.size > 0 && !outcomes.has(body.dataset.outcome));
      shown += !body.hidden;
    }
    document.getElementById("nothing").hidden = shown > 0;
    const all = `${tests.length} test${tests.length === 1 ? "" : "s"}`;
    document.getElementById("shown").textContent = shown === tests.length ? all : `${shown} of ${all}`;
  }

  function showAll() {
    search.value = "";
    for (const box of boxes) box.checked = false;
    filter();
  }

  // Sort.

  const order = new Intl.Collator("en", { numeric: true });

  function keyOf(body, column) {
    const cell = body.rows[0].cells[column];
    if (cell.dataset.sort !== undefined) return Number(cell.dataset.sort);
    return cell.classList.contains("number") ? null : named.get(body) && cell.textContent.trim();
  }

  function sort(button) {
    const header = button.closest("th");
    // Sort figures from the largest, and names from the first letter.
    const first = header.matches(".number, .outcome") ? "descending" : "ascending";
    const other = first === "descending" ? "ascending" : "descending";
    const direction = header.getAttribute("aria-sort") === first ? other : first;
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", direction);
    const sign = direction === "descending" ? -1 : 1;
    const keys = new Map(tests.map((body) => [body, keyOf(body, Number(button.dataset.sorts))]));
    tests.sort((left, right) => {
      const [leftKey, rightKey] = [keys.get(left), keys.get(right)];
      if (leftKey === null || rightKey === null) return (leftKey === null) - (rightKey === null);
      return sign * (typeof leftKey === "number" ? leftKey - rightKey : order.compare(leftKey, rightKey));
    });
    table.append(...tests, document.getElementById("nothing"));
  }

  // Open.

  function open(body, opened) {
    const button = body.querySelector("th button");
    button.setAttribute("aria-expanded", String(opened));
    if (body.rows.length === 1 && opened) {
      const row = body.insertRow();
      row.className = "opened";
      const cell = row.insertCell();
      cell.colSpan = body.rows[0].cells.length;
      cell.className = "panel";
      cell.id = `panel-of-${body.id}`;
      button.setAttribute("aria-controls", cell.id);
      // The markup comes from this page, which shows it as it is if scripts are off.
      cell.innerHTML = panels.get(body.id).textContent;
    }
    if (body.rows.length > 1) body.rows[1].hidden = !opened;
    if (opened) drawWithin(body);
  }

  function openLinked() {
    const target = document.getElementById(location.hash.slice(1));
    if (!target) return;
    if (tests.includes(target)) {
      if (target.hidden) showAll();
      open(target, true);
    } else if (target.matches("details")) {
      target.open = true;
    }
    target.scrollIntoView();
  }

  // Draw.

  function plotly() {
    if (!window.Plotly) {
      const script = document.createElement("script");
      script.textContent = document.getElementById("plotly").textContent;
      document.head.append(script);
    }
    return window.Plotly;
  }

  function drawWithin(element) {
    for (const figure of element.querySelectorAll("figure.chart")) {
      const plot = figure.querySelector(".plot");
      if (drawn.get(figure) === isNarrow(figure)) plotly().Plots.resize(plot);
      else draw(figure, plot);
    }
  }

  const isNarrow = (figure) => figure.clientWidth < 600;

  function draw(figure, plot) {
    // A closed panel has no width, so its charts are drawn when it opens.
    drawn.delete(figure);
    if (!figure.clientWidth) return;
    drawn.set(figure, isNarrow(figure));
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const { data, layout } = CHARTS[chart.kind](chart, themeOf(plot), drawn.get(figure));
    const config = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };
    plotly().react(plot, data, layout, config);
  }

  function themeOf(element) {
    const style = getComputedStyle(element);
    return (name) => style.getPropertyValue(`--${name}`).trim();
  }

  function isMarked(row) {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(row, true);
  }

  // Listen.

  if (table) {
    search.addEventListener("input", filter);
    for (const box of boxes) box.addEventListener("change", filter);
    document.querySelector("form.filters").addEventListener("submit", (event) => event.preventDefault());
    document.getElementById("reset").addEventListener("click", () => { showAll(); search.focus(); });
    table.tHead.addEventListener("click", ({ target }) => target.closest("button") && sort(target.closest("button")));
    table.addEventListener("click", ({ target }) => {
      const body = target.closest("tbody[data-outcome]");
      // A click anywhere in a test's line opens it, unless the click selected text. A click on the button always opens it.
      if (!body || !body.rows[0].contains(target) || (!target.closest("button") && isMarked(body.rows[0]))) return;
      const opened = body.querySelector("th button").getAttribute("aria-expanded") !== "true";
      open(body, opened);
      history.replaceState(null, "", opened ? `#${body.id}` : location.pathname + location.search);
    });
    // Browsers restore the fields from an earlier visit.
    if (search.value || boxes.some((box) => box.checked)) filter();
  }
  document.addEventListener("click", async ({ target }) => {
    if (!target.matches("button.copy")) return;
    const message = target.parentElement.querySelector("[role=status]");
    try {
      await navigator.clipboard.writeText(target.dataset.text);
      message.textContent = "copied";
    } catch {
      message.textContent = "not copied: this browser does not allow it";
    }
  });
  for (const details of document.querySelectorAll("details.matrix")) {
    details.addEventListener("toggle", () => details.open && drawWithin(details));
    if (details.open) drawWithin(details);
  }
  addEventListener("hashchange", openLinked);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const figure of [...drawn.keys()]) draw(figure, figure.querySelector(".plot"));
  });
  addEventListener("resize", () => {
    const resized = [...drawn].filter(([figure, narrow]) => figure.clientWidth && isNarrow(figure) !== narrow);
    for (const [figure] of resized) draw(figure, figure.querySelector(".plot"));
  });
  const only = tests.find((body) => "opened" in body.dataset);
  if (location.hash) openLinked();
  else if (only) open(only, true);
})();
