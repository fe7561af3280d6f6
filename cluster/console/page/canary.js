// A second revision beside what serves: both over the same time, and what is shown of the difference.

import { byId, h, keyed, replace, say, set } from "./dom.js";
import { ago, count, known, missing, percent, seconds } from "./format.js";

const LEVELS = { starting: "idle", live: "ok", good: "ok", promoting: "ok", promoted: "ok", rolled_back: "bad", aborted: "idle" };
const VERDICTS = { "no worse": ["ok", "✓"], worse: ["bad", "✕"], undecided: ["idle", "○"], "too few requests": ["idle", "○"] };
const HEADS = ["revision", "requests", "failed", "in target", "TTFT 50 · 90 · 99 %", "TPOT 50 · 90 · 99 %", "tokens", "cached"];

const head = (...names) => h("thead", {}, h("tr", {}, ...names.map((name, at) => h("th", { class: at ? "number" : null }, name))));
const cells = (number) => h("tr", {}, ...Array.from({ length: number }, (_, at) => h("td", { class: at ? "number" : null })));
const times = (its) => Object.values(its).map(seconds).join(" · ");

export function showCanary({ canary }) {
  const section = byId("canary");
  set(section, "hidden", !canary);
  set(byId("canary-link"), "hidden", !canary);
  if (!canary) return;
  const body = byId("canary-body");
  if (!body.sides) {
    body.about = h("p", {});
    body.why = h("p", { class: "muted" });
    body.sides = h("tbody", {});
    body.tests = h("tbody", {});
    body.few = h("p", { class: "muted" });
    body.events = h("ul", { class: "lines" });
    replace(body, body.about, body.why,
      h("table", { class: "planned" }, h("caption", {}, "Both over the same time"), head(...HEADS), body.sides),
      body.judged = h("table", { class: "planned" }, h("caption", {}, "Worse beyond chance?"),
        head("comparison", "canary", "beside", "difference at least", "at most", "allowed", ""), body.tests),
      body.few, h("details", {}, h("summary", {}, "What happened"), body.events));
  }
  set(section, "data-level", LEVELS[canary.phase] ?? "unknown");
  say(byId("canary-note"), `${canary.revision} beside ${canary.base}: ${canary.phase.replace("_", " ")}`);
  say(body.about, about(canary));
  say(body.why, canary.reason);
  keyed(body.sides, canary.sides, (side) => side.name, () => cells(HEADS.length), showSide);
  keyed(body.tests, canary.tests, (test) => test.name, () => cells(7), showTest);
  set(body.judged, "hidden", !canary.tests.length);
  say(body.few, canary.tests.length ? "" : `Nothing is judged below ${count(canary.min_requests)} requests of each.`);
  keyed(body.events, canary.events, (event) => `${event.number} ${event.after} ${event.reason}`, () => h("li", {}), (item, event) =>
    say(item, `${ago(event.ago)}: ${event.revision} ${event.before || "–"} → ${event.after.replace("_", " ")}: ${event.reason}`));
}

function about(canary) {
  const good = known(canary.shared_seconds) ? `, with a share for ${seconds(canary.shared_seconds)} of the ${seconds(canary.good_after_seconds)} that it takes to be good` : "";
  return `${canary.percent} % of the conversations${good}. Looked at ${canary.looks === 1 ? "once" : `${count(canary.looks)} times`}, at ${percent(canary.confidence)} over all of them; `
    + `${count(canary.failures)} of its workers failed, ${count(canary.max_failures)} end it.`;
}

function showSide(row, side) {
  const hits = side.prompt_tokens ? side.cached_tokens / side.prompt_tokens : null;
  const words = [side.name, count(side.requests), percent(side.failed_part, 1), percent(side.attainment, 1), times(side.ttft), times(side.tpot), count(side.generated_tokens), percent(hits)];
  words.forEach((word, at) => say(row.children[at], word));
}

function showTest(row, test) {
  const timed = test.name.startsWith("T");
  const value = (its) => (timed ? seconds(its) : percent(its, 1));
  const change = (its) => (known(its) ? (timed ? `${its.toFixed(2)} ×` : `${(100 * its).toFixed(1)} points`) : missing);
  const [level, icon] = VERDICTS[test.verdict] ?? ["unknown", "?"];
  set(row, "data-level", level === "bad" ? "warn" : level);
  const words = [test.name, value(test.canary), value(test.base), change(test.low), change(test.high), change(test.limit), `${icon} ${test.verdict}`];
  words.forEach((word, at) => say(row.children[at], word));
}
