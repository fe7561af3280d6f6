// All workers in a table of which only the rows in sight exist.

import { byId, h, keyed, say, set } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const ROW = 28;
const COLUMNS = [
  ["id", "worker", "name"],
  ["pool", "pool"],
  ["role", "role"],
  ["phase", "phase"],
  ["kv", "KV held", "number", (value) => percent(value)],
  ["running", "running", "number", count],
  ["waiting", "waiting", "number", count],
  ["waiting_tokens", "tokens wait", "number", count],
  ["handoffs_in", "handed in", "number", count],
  ["handoffs_out", "handed out", "number", count],
  ["age", "heard", "number", (value) => (value === null ? "–" : value < 2 ? "now" : `${seconds(value)} ago`)],
  ["trouble", "trouble", "wide"],
];
const natural = new Intl.Collator("en", { numeric: true });

const state = { rows: [], columns: {}, shown: [], sort: "id", down: false, body: null, view: null };

function build() {
  const table = byId("worker-table");
  const head = h("div", { class: "tr th", role: "row" },
    ...COLUMNS.map(([name, title, kind]) =>
      h("div", { role: "columnheader", class: kind ?? null, "data-name": name }, h("button", { type: "button", onclick: () => sortBy(name) }, title))));
  state.body = h("div", { class: "rows", role: "rowgroup" });
  state.view = h("div", { class: "viewport" }, state.body);
  state.view.addEventListener("scroll", () => requestAnimationFrame(draw));
  table.append(head, state.view);
  byId("filter").addEventListener("input", arrange);
  table.addEventListener("keydown", (event) => {
    const step = { ArrowDown: ROW, ArrowUp: -ROW, PageDown: 12 * ROW, PageUp: -12 * ROW }[event.key];
    if (!step || event.target !== table) return;
    event.preventDefault();
    state.view.scrollTop += step;
  });
}

function sortBy(name) {
  state.down = state.sort === name ? !state.down : ["kv", "running", "waiting", "waiting_tokens", "handoffs_in", "handoffs_out", "age", "trouble"].includes(name);
  state.sort = name;
  arrange();
}

/** Shows the workers whose row holds the text. */
export function filterBy(text) {
  byId("filter").value = text;
  arrange();
  byId("workers").scrollIntoView();
}

export function showWorkers({ columns, rows, left_out: leftOut }) {
  if (!state.body) build();
  state.columns = Object.fromEntries(columns.map((name, at) => [name, at]));
  state.rows = rows;
  state.leftOut = leftOut;
  arrange();
}

function arrange() {
  const { columns, sort, down } = state;
  const wanted = byId("filter").value.trim().toLowerCase();
  const texts = ["id", "pool", "role", "phase", "trouble"].map((name) => columns[name]);
  state.shown = wanted ? state.rows.filter((row) => texts.some((at) => String(row[at] ?? "").toLowerCase().includes(wanted))) : [...state.rows];
  const at = columns[sort];
  const sign = down ? -1 : 1;
  state.shown.sort((a, b) => {
    const [x, y] = [a[at], b[at]];
    const order = typeof x === "string" || typeof y === "string" ? natural.compare(x ?? "", y ?? "") : (x ?? -1) - (y ?? -1);
    return sign * order || natural.compare(a[columns.id], b[columns.id]);
  });
  for (const header of document.querySelectorAll("#worker-table [role=columnheader]"))
    set(header, "aria-sort", header.dataset.name === sort ? (down ? "descending" : "ascending") : null);
  const number = state.shown.length === state.rows.length ? count(state.rows.length) : `${count(state.shown.length)} of ${count(state.rows.length)}`;
  say(byId("workers-note"), `${number}${state.leftOut ? `; ${count(state.leftOut)} healthy ones are left out` : ""}`);
  set(byId("worker-table"), "aria-rowcount", state.shown.length + 1);
  state.body.style.height = `${state.shown.length * ROW}px`;
  draw();
}

function draw() {
  const { view, body, shown, columns } = state;
  // Of a list that became shorter the view stands beyond the end, until the rows that held it open are gone.
  const top = Math.min(view.scrollTop, Math.max(shown.length * ROW - view.clientHeight, 0));
  const from = Math.max(Math.floor(top / ROW) - 4, 0);
  const seen = shown.slice(from, from + Math.ceil(view.clientHeight / ROW) + 8);
  const numbered = seen.map((row, at) => ({ row, at: from + at }));
  keyed(body, numbered, ({ row }) => row[columns.id],
    () => h("div", { class: "tr", role: "row" }, ...COLUMNS.map(([, , kind]) => h("div", { role: "cell", class: kind ?? null }))),
    (element, { row, at }) => {
      element.style.transform = `translateY(${at * ROW}px)`;
      set(element, "aria-rowindex", at + 2);
      set(element, "data-phase", row[columns.trouble] && row[columns.phase] === "ready" ? "trouble" : row[columns.phase]);
      COLUMNS.forEach(([name, , , format], column) => {
        const value = row[columns[name]];
        const text = name === "id" ? `${value}.${row[columns.generation]}` : format ? format(value) : (value ?? "");
        say(element.children[column], String(text));
        if (name === "trouble" || name === "id") set(element.children[column], "title", String(text));
      });
    });
}
