// How many requests of each class met their targets.

import { parts } from "./charts.js";
import { byId, h, keyed, say, set } from "./dom.js";
import { count, known, percent, seconds } from "./format.js";

const KINDS = [
  ["met", "met"],
  ["missed_ttft", "late first token"],
  ["missed_tpot", "slow tokens"],
  ["missed_both", "late and slow"],
  ["failed", "failed"],
];
const FEW = 10;

function make() {
  const bar = parts("targets");
  const row = h("div", { class: "target" },
    h("div", { class: "target-head" }, h("span", { class: "icon", "aria-hidden": "true" }), h("b", {}), h("span", { class: "muted" }), h("span", { class: "big" })),
    bar, h("div", { class: "target-foot muted" }));
  row.bar = bar;
  return row;
}

function level(target) {
  const { window, minute, objective } = target;
  if (window.ended < FEW || !known(window.attainment)) return "idle";
  if (minute.ended >= FEW && minute.attainment < 0.9) return "bad";
  return window.attainment < objective ? "warn" : "ok";
}

const ICONS = { ok: "✓", idle: "○", warn: "!", bad: "✕" };

export function showTargets(targets) {
  const list = byId("target-list");
  const rows = targets.length ? targets : [null];
  keyed(list, rows, (target) => (target ? `t${target.name}` : "none"),
    (target) => (target ? make() : h("p", { class: "muted" }, "No class of service is configured, and no request has ended yet.")),
    (row, target) => {
      if (!target) return;
      const its = level(target);
      const [head, , foot] = row.children;
      set(row, "data-level", its);
      say(head.children[0], ICONS[its]);
      say(head.children[1], target.name || "without a class");
      say(head.children[2], wanted(target));
      say(head.children[3], percent(target.window.attainment, 1));
      const list = KINDS.map(([name, words]) => ({ name, value: target.window[name], label: `${words}: ${count(target.window[name])}` }));
      row.bar.update(list, target.window.ended, list.map((part) => part.label).join(", "));
      say(foot, footer(target));
    });
}

function wanted(target) {
  const limits = [];
  if (target.ttft_seconds) limits.push(`TTFT ≤ ${seconds(target.ttft_seconds)}`);
  if (target.tpot_seconds) limits.push(`TPOT ≤ ${seconds(target.tpot_seconds)}`);
  return limits.join(", ") || "no targets: answered at all";
}

function footer({ window, minute }) {
  if (!window.ended) return "no request ended in five minutes";
  const missed = KINDS.slice(1).filter(([name]) => window[name]).map(([name, words]) => `${words} ${count(window[name])}`);
  const last = minute.ended ? `; last minute ${percent(minute.attainment, 1)} of ${count(minute.ended)}` : "";
  return `of ${count(window.ended)} ended${missed.length ? `: ${missed.join(", ")}` : ""}${last}`;
}
