// Hand-offs of the last minute as ribbons from who prefilled to who decodes.

import { byId, h, keyed, replace, s, say, set } from "./dom.js";
import { count } from "./format.js";

const WIDTH = 560;
const NODE = 9;
const GAP = 6;
const EDGE = 10; // above and below, for the word beside a thin one
const MAX_NODES = 14;
const SIDE = 150;

/** `chosen`: "workers" or "pools"; null: workers, unless most hand-offs are between more pairs than are listed. */
export function showFlows(flows, chosen) {
  const all = flows.pools.filter(([from]) => from !== "").reduce((sum, [, , number]) => sum + number, 0);
  const between = chosen ?? (flows.left_out > all / 2 ? "pools" : "workers");
  for (const button of document.querySelectorAll("[data-flows]")) set(button, "aria-pressed", String(button.dataset.flows === between));
  const listed = between === "pools" ? flows.pools : flows.pairs;
  const handed = listed.filter(([from]) => from !== "");
  const alone = flows.pools.filter(([from]) => from === "").reduce((sum, [, , number]) => sum + number, 0);
  const total = flows.pools.reduce((sum, [, , number]) => sum + number, 0);
  say(byId("flow-note"), total ? `${count(total - alone)} of ${count(total)} prompts in the last ${Math.round(flows.seconds) || 1} s` : "none in the last minute");
  const few = between === "workers" && flows.left_out ? `The ${flows.pairs.length} busiest pairs are drawn, ${count(flows.left_out)} prompts went between others. ` : "";
  say(byId("flow-alone"), few + (alone ? `${count(alone)} prompts were computed where they were decoded.` : ""));
  draw(byId("flow-chart"), merged(handed));
  const body = byId("flow-table").tBodies[0];
  keyed(body, listed, ([from, to]) => `${from}\n${to}`, () => h("tr", {}, h("td", {}), h("td", {}), h("td", { class: "number" })), (row, [from, to, number]) => {
    say(row.children[0], from || "(computed there)");
    say(row.children[1], to);
    say(row.children[2], count(number));
  });
}

/** The busiest nodes of each side; the rest of a side is one node. */
function merged(pairs) {
  const name = (side) => {
    const totals = new Map();
    for (const pair of pairs) totals.set(pair[side], (totals.get(pair[side]) ?? 0) + pair[2]);
    const order = [...totals].sort((a, b) => b[1] - a[1]).map(([id]) => id);
    if (order.length <= MAX_NODES) return (id) => id;
    const kept = new Set(order.slice(0, MAX_NODES - 1));
    return (id) => (kept.has(id) ? id : `${order.length - kept.size} others`);
  };
  const [from, to] = [name(0), name(1)];
  const sums = new Map();
  for (const [source, target, number] of pairs) {
    const key = JSON.stringify([from(source), to(target)]);
    sums.set(key, (sums.get(key) ?? 0) + number);
  }
  return [...sums].map(([key, number]) => [...JSON.parse(key), number]);
}

const natural = new Intl.Collator("en", { numeric: true });

function column(pairs, side, height) {
  const totals = new Map();
  for (const pair of pairs) totals.set(pair[side], (totals.get(pair[side]) ?? 0) + pair[2]);
  const names = [...totals.keys()].sort(natural.compare);
  const sum = [...totals.values()].reduce((all, number) => all + number, 0);
  const room = height - GAP * (names.length - 1) - 2 * EDGE;
  const nodes = new Map();
  let y = EDGE;
  for (const name of names) {
    const tall = Math.max((room * totals.get(name)) / sum, 2);
    nodes.set(name, { y, height: tall, total: totals.get(name), used: 0 });
    y += tall + GAP;
  }
  return { nodes, scale: room / sum };
}

function draw(box, pairs) {
  if (!pairs.length) {
    replace(box, h("p", { class: "empty muted" }, "No prompt was handed over in the last minute."));
    return;
  }
  const many = Math.max(new Set(pairs.map((pair) => pair[0])).size, new Set(pairs.map((pair) => pair[1])).size);
  const height = Math.min(Math.max(48 * many, 130), 380);
  const [left, right] = [column(pairs, 0, height), column(pairs, 1, height)];
  const total = pairs.reduce((sum, pair) => sum + pair[2], 0);
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "flows", role: "img", "aria-label": `${count(total)} prompts handed over between ${left.nodes.size} and ${right.nodes.size} workers or pools` });
  const ordered = [...pairs].sort((a, b) => natural.compare(a[0], b[0]) || natural.compare(a[1], b[1]));
  const [x1, x2] = [SIDE + NODE, WIDTH - SIDE - NODE];
  for (const [from, to, number] of ordered) {
    const [source, target] = [left.nodes.get(from), right.nodes.get(to)];
    const [thick, thin] = [(source.height * number) / source.total, (target.height * number) / target.total];
    const [y1, y2] = [source.y + source.used, target.y + target.used];
    source.used += thick;
    target.used += thin;
    const middle = (x1 + x2) / 2;
    const path = `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}V${y2 + thin}C${middle} ${y2 + thin} ${middle} ${y1 + thick} ${x1} ${y1 + thick}Z`;
    svg.append(s("path", { d: path, class: "ribbon" }, s("title", {}, `${from} → ${to}: ${count(number)} prompts`)));
  }
  for (const [side, nodes] of [["left", left.nodes], ["right", right.nodes]]) {
    for (const [name, node] of nodes) {
      const x = side === "left" ? SIDE : WIDTH - SIDE - NODE;
      svg.append(s("rect", { x, y: node.y, width: NODE, height: node.height, rx: 2, class: `node ${side}` }));
      const text = s("text", { x: side === "left" ? SIDE - 8 : WIDTH - SIDE + 8, y: node.y + node.height / 2, "text-anchor": side === "left" ? "end" : "start", "dominant-baseline": "central" });
      text.append(s("tspan", {}, name.length > 17 ? `${name.slice(0, 16)}…` : name), s("tspan", { class: "muted", dx: 6 }, count(node.total)));
      svg.append(text);
    }
  }
  set(svg, "data-many", many > 8);
  replace(box, svg);
}
