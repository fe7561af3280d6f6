// What router and autoscaler decided, and why.

import { parts } from "./charts.js";
import { byId, h, keyed, say, set } from "./dom.js";
import { ago, count, percent, rate } from "./format.js";
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
  const box = byId("scaling");
  if (!box.children.length) box.append(h("p", {}), h("div", { class: "decided" }));
  const [now, list] = box.children;
  if (!scaling) {
    say(byId("scaling-note"), "");
    say(now, "No autoscaler has decided anything here: pools have the size that the configuration, or an operator, gave them.");
    keyed(list, [], (one) => one.number, make, update);
    return;
  }
  say(byId("scaling-note"), `autoscaling: ${scaling.mode}`);
  say(now, wants(scaling));
  keyed(list, scaling.decisions, (one) => String(one.number), make, update);
}

function wants(scaling) {
  const needs = Object.entries(scaling.needs).map(([role, number]) => `${number} ${role}`).join(", ");
  const pools = scaling.pools.map((pool) => `${pool.name} ${pool.desired}${pool.advised !== pool.desired ? ` (advised ${pool.advised})` : ""} of ${pool.least} to ${pool.most}`).join("; ");
  const budget = scaling.budget_gpus === null ? "" : `; ${scaling.gpus} of ${scaling.budget_gpus} GPUs`;
  const hopeless = scaling.unreachable ? ` No size meets the targets: ${scaling.unreachable}.` : "";
  return `Needs ${needs || "nothing"}: ${scaling.reason}.${hopeless} ${pools}${budget}. At most ${rate(scaling.forecast.peak)} requests a second are expected.`;
}

function make() {
  return h("details", { class: "decision" },
    h("summary", {}, h("span", { class: "muted when" }), h("b", {}), h("span", {}), h("span", { class: "muted" })),
    h("div", {}, h("p", {}), h("p", { class: "muted" }), h("ul", { class: "plain" })));
}

function update(element, one) {
  const [when, kind, changes, outcome] = element.firstChild.children;
  say(when, ago(one.ago));
  say(kind, one.kind);
  say(changes, one.changes || "nothing changes");
  say(outcome, one.outcome);
  const [reason, notes, alternatives] = element.lastChild.children;
  say(reason, one.reason);
  say(notes, one.notes.join("; "));
  keyed(alternatives, one.alternatives, (its) => its.what, () => h("li", {}),
    (item, its) => say(item, `${its.what}: ${its.gpus} GPUs, ${its.attainment === null ? "queues would grow" : `${percent(its.attainment, 1)} of targets`}: ${its.why_not}`));
}
