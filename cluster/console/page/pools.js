// Pools: who is there, what is scarce, and a cell for every worker.

import { meter, sparkline } from "./charts.js";
import { byId, h, keyed, say, set } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { filterBy } from "./workers.js";

const SCARCE = [
  ["kv", "KV held"],
  ["seats", "Places"],
  ["backlog", "Prompts wait"],
];

function make() {
  const meters = SCARCE.map(([name, title]) => {
    const bar = meter();
    const row = h("div", { class: "scarce" }, h("span", {}, title), bar, h("span", { class: "number" }));
    row.bar = bar;
    row.name = name;
    return row;
  });
  const chart = sparkline();
  const card = h("article", { class: "card pool" },
    h("header", {}, h("span", { class: "icon", "aria-hidden": "true" }), h("h3", {}), h("span", { class: "muted" }), h("span", { class: "big" })),
    h("p", { class: "short" }), h("div", {}, ...meters), h("div", { class: "cells", "aria-hidden": "true" }), chart, h("p", { class: "muted" }));
  Object.assign(card, { meters, chart });
  return card;
}

export function showPools(scene, ring) {
  const { pools, workers } = scene;
  const members = new Map(pools.map((pool) => [pool.name, []]));
  const column = Object.fromEntries(workers.columns.map((name, at) => [name, at]));
  for (const row of workers.rows) members.get(row[column.pool])?.push(row);
  const short = pools.filter((pool) => pool.short);
  say(byId("pools-note"), short.length ? `short: ${short.map((pool) => pool.name).join(", ")}` : pools.length ? "none is short" : "none is known yet");
  keyed(byId("pool-list"), pools, (pool) => pool.name, make, (card, pool) => {
    const [head, why, , cells, chart, foot] = card.children;
    const level = pool.short || pool.ready < (pool.desired ?? 0) ? (pool.ready ? "warn" : "bad") : "ok";
    set(card, "data-level", level);
    say(head.children[0], { ok: "✓", warn: "!", bad: "✕" }[level]);
    say(head.children[1], pool.name);
    say(head.children[2], described(pool));
    say(head.children[3], pool.desired === null ? `${pool.ready}` : `${pool.ready} / ${pool.desired}`);
    set(head.children[3], "title", "ready / wanted");
    say(why, trouble(pool));
    for (const row of card.meters) {
      const part = pool.pressures[row.name];
      const scarcest = pool.pressed_by === row.name && part > 0;
      set(row, "data-scarcest", scarcest);
      const cached = row.name === "kv" && pool.blocks.total ? pool.blocks.cached / pool.blocks.total : 0;
      row.bar.update(part, 0.9, part >= 0.9 ? "warn" : "ok", pool.words[row.name], cached);
      say(row.lastChild, row.name === "backlog" ? seconds(pool.backlog_seconds) : percent(part));
      set(row, "title", pool.words[row.name]);
    }
    showCells(cells, members.get(pool.name), column);
    chart.update((ring?.points ?? []).map((point) => [point.at, point.pools[pool.name]?.[3]]), `pressure of ${pool.name}: ${percent(pool.pressure)} now`, 1);
    say(foot, footer(pool));
  });
}

function described(pool) {
  const roles = Object.entries(pool.roles).map(([role, number]) => (number === pool.ready ? role : `${number} ${role}`));
  const layouts = Object.keys(pool.layouts).join(", ");
  return [roles.join(" + "), layouts].filter(Boolean).join(" · ");
}

function trouble(pool) {
  const words = [];
  const others = Object.entries(pool.phases).filter(([phase]) => phase !== "ready").map(([phase, number]) => `${number} ${phase}`);
  if (others.length) words.push(others.join(", "));
  if (pool.silent) words.push(`${pool.silent} silent`);
  if (pool.short) words.push(`short: ${pool.words[pool.pressed_by]}`);
  return words.join(" · ");
}

function footer(pool) {
  const parts = [`${count(pool.running)} running`, `${count(pool.waiting)} waiting`, `${percent(pool.blocks.total ? pool.blocks.cached / pool.blocks.total : 0)} of KV cached`];
  if (pool.preemptions) parts.push(`${count(pool.preemptions)} preemptions`);
  if (pool.heard < pool.ready || pool.oldest_seconds > 5) parts.push(`${pool.heard} of ${pool.ready} heard, up to ${seconds(pool.oldest_seconds)} old`);
  return parts.join(" · ");
}

/** A cell's level is its KV; its shape says what else it is. */
function showCells(box, rows, column) {
  set(box, "data-many", rows.length > 64);
  keyed(box, rows, (row) => row[column.id], (row) => {
    const cell = h("i", { class: "cell", onclick: () => filterBy(row[column.id]) }, h("b", {}));
    return cell;
  }, (cell, row) => {
    const kv = row[column.kv];
    const trouble = row[column.trouble];
    set(cell, "data-phase", trouble && row[column.phase] === "ready" ? "trouble" : row[column.phase]);
    set(cell, "title", `${row[column.id]} · ${row[column.role]} · ${row[column.phase]}${kv === null ? "" : ` · KV ${percent(kv)}, ${row[column.running]} running, ${row[column.waiting]} waiting`}${trouble ? `\n${trouble}` : ""}`);
    cell.firstChild.style.height = `${100 * (kv ?? 0)}%`;
    set(cell, "data-full", kv >= 0.9);
  });
}
