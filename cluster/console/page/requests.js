// The last requests, each as a bar of its stages from its arrival on.

import { parts } from "./charts.js";
import { byId, h, keyed, say, set } from "./dom.js";
import { ago, count, known, seconds } from "./format.js";
import { showWhy } from "./why.js";

export const STAGES = [
  ["queue", "in the router"],
  ["retry", "lost with a worker that failed"],
  ["wait", "waits on the worker"],
  ["prefill", "prefill"],
  ["transfer", "hand-over that is waited for"],
  ["other", "on the way"],
  ["decode", "decode"],
];
const WORDS = Object.fromEntries(STAGES);
const SHOWN = 14;

function make(request) {
  const bar = parts("stages");
  const first = h("i", { class: "first" });
  const row = h("button", { type: "button", class: "request", onclick: () => showWhy(row.request) },
    h("span", { class: "icon", "aria-hidden": "true" }), h("span", { class: "id" }), h("span", { class: "bar" }, bar, first),
    h("span", { class: "number" }), h("span", { class: "muted way" }));
  Object.assign(row, { bar, first });
  return row;
}

export function showRequests({ requests }) {
  const legend = byId("stages");
  if (!legend.children.length) {
    legend.append(...STAGES.map(([name, words]) => h("span", {}, h("i", { class: `part part-${name}` }), words)), h("span", {}, h("i", { class: "first" }), "first token"));
  }
  const rows = chosen(requests.rows);
  const longest = nice(Math.max(...rows.map((row) => row.seconds), 1e-3));
  const ended = requests.rows.filter((row) => !row.runs && known(row.ttft)).map((row) => row.ttft).sort((a, b) => a - b);
  say(byId("requests-note"), requests.rows.length
    ? `bars to ${seconds(longest)}${ended.length ? `; TTFT of the last ${ended.length}: median ${seconds(quantile(ended, 0.5))}, P95 ${seconds(quantile(ended, 0.95))}` : ""}`
    : "none is remembered");
  const list = byId("request-list");
  keyed(list, rows, (request) => `${request.router}\n${request.id}`, make, (row, request) => {
    row.request = request;
    const good = request.runs || request.outcome === "finished";
    set(row, "data-level", request.failures.length && good ? "warn" : good ? "ok" : request.outcome === "cancelled" ? "idle" : "bad");
    say(row.children[0], request.runs ? "▸" : request.outcome === "finished" ? (request.failures.length ? "!" : "✓") : request.outcome === "cancelled" ? "○" : "✕");
    say(row.children[1], request.id);
    const spans = request.stages.map(([name, value]) => ({ name, value, label: `${WORDS[name]}: ${seconds(value)}` }));
    row.bar.update(spans, longest, spans.map((span) => span.label).join(", "));
    set(row.first, "hidden", !known(request.ttft));
    if (known(request.ttft)) row.first.style.left = `${(100 * request.ttft) / longest}%`;
    say(row.children[3], seconds(request.seconds));
    say(row.children[4], way(request));
    set(row, "title", described(request));
  });
}

function chosen(rows) {
  const running = rows.filter((row) => row.runs).slice(0, SHOWN / 2);
  return [...running, ...rows.filter((row) => !row.runs).slice(0, SHOWN - running.length)];
}

function way(request) {
  if (request.failures.length || !(request.runs || request.outcome === "finished")) return request.runs ? "placed again" : request.outcome;
  if (!request.decode) return request.outcome;
  return request.prefill ? `${request.prefill} → ${request.decode}` : request.runs ? `… ${request.decode}` : `${request.decode} alone`;
}

function described(request) {
  const lines = [`${request.id}: ${request.runs ? `runs (${request.outcome})` : `${request.outcome} ${ago(request.ago)}`}`,
    `${count(request.prompt)} prompt tokens, ${count(request.cached)} of them cached, ${count(request.generated)} generated`,
    `TTFT ${seconds(request.ttft)}, TPOT ${seconds(request.tpot)}`, ...request.stages.map(([name, value]) => `  ${WORDS[name]}: ${seconds(value)}`),
    ...request.failures.map((failure) => `${failure.worker}: ${failure.error}`), "Open: why it ran where it ran"];
  return lines.join("\n");
}

export function quantile(sorted, part) {
  return sorted[Math.min(Math.floor(part * sorted.length), sorted.length - 1)];
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((step) => step * power).find((step) => step >= value);
}
