// What router and autoscaler decided, and why.

import { parts } from "./charts.js";
import { byId, h, keyed, replace, say, set } from "./dom.js";
import { count, percent } from "./format.js";
import { REASONS } from "./why.js";

let bar = null;

export function showDecisions(scene) {
  showReasons(scene.requests.rows);
  showScaling(scene.scaling);
}

function showReasons(rows) {
  const totals = new Map();
  for (const row of rows) {
    const reason = row.reasons[row.reasons.length - 1];
    if (reason) totals.set(reason, (totals.get(reason) ?? 0) + 1);
  }
  const box = byId("reasons");
  const all = [...totals.values()].reduce((sum, number) => sum + number, 0);
  if (!bar) box.append((bar = parts("reasons")), h("ul", { class: "plain" }), h("p", { class: "muted" }));
  const order = [...totals].sort((a, b) => b[1] - a[1]);
  bar.update(order.map(([name, value]) => ({ name: REASONS[name] ? name : "other", value, label: `${REASONS[name] ?? name}: ${value}` })), all, "placements by reason");
  keyed(bar.nextSibling, order, ([name]) => name, () => h("li", {}, h("i", {}), h("b", {}), h("span", {})), (item, [name, number]) => {
    set(item.firstChild, "class", `part part-${REASONS[name] ? name : "other"}`);
    say(item.children[1], percent(number / all));
    say(item.children[2], ` ${REASONS[name] ?? name}`);
  });
  const again = rows.filter((row) => row.failures.length).length;
  say(box.lastChild, all ? `of the last ${count(all)} placements; ${again ? `${count(again)} requests were placed again after a failure` : "none was placed again"}. Open a request to see what was compared.` : "No placement is remembered.");
}

function showScaling(scaling) {
  say(byId("scaling-note"), "");
  replace(byId("scaling"), h("p", { class: "muted" }, scaling ? "" : "No autoscaler has decided anything here: pools have the size that the configuration, or an operator, gave them."));
}
