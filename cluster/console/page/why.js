// Why one request ran where it ran: its router's explanation, in a dialog.

import { byId, h, replace, say } from "./dom.js";
import { count, seconds } from "./format.js";
import { ask } from "./stream.js";

const MAX_ROWS = 12;
export const REASONS = {
  pair: "prefill and decode apart",
  unified: "one worker for both",
  alone: "decode prefills: little is left to compute, it holds more, or prefill is busy",
  no_prefill_workers: "nobody prefills just now: decode does it",
};

export async function showWhy(request) {
  const dialog = byId("why");
  say(byId("why-title"), `Why ${request.id} ran where it ran`);
  replace(byId("why-body"), h("p", { class: "muted" }, "Asking its router…"));
  dialog.showModal();
  try {
    const found = await ask(`why/${encodeURIComponent(request.router)}/${encodeURIComponent(request.id)}`);
    replace(byId("why-body"), ...explained(found));
  } catch (error) {
    replace(byId("why-body"), h("p", {}, error.message));
  }
}

byId("why-close").addEventListener("click", () => byId("why").close());

/** The first `words` columns hold words, the others numbers. */
function table(caption, words, names, rows) {
  const kind = (at) => ({ class: at < words ? null : "number" });
  return h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...names.map((name, at) => h("th", kind(at), name)))),
    h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell, at) => h("td", kind(at), String(cell)))))));
}

function explained(found) {
  const usage = found.usage;
  const parts = [h("p", {}, `${found.outcome}: ${count(usage.prompt_tokens)} prompt tokens, ${count(usage.cached_tokens ?? 0)} of them cached, ${count(usage.completion_tokens ?? 0)} generated. `
    + `TTFT ${seconds(found.ttft_seconds)}, TPOT ${seconds(found.tpot_seconds)}, ${seconds(found.seconds)} in all.`)];
  if (!found.whys.length) parts.push(h("p", {}, "It was never placed."));
  found.whys.forEach((why, at) => {
    parts.push(h("h3", {}, `Placement ${at + 1} of ${found.whys.length}: ${chosen(why)}`), h("p", { class: "muted" }, notes(why)), candidates(why));
    if (why.pairs?.length) parts.push(pairs(why));
    for (const failure of found.failures.filter((one) => one.placement === at))
      parts.push(h("p", { class: "failed" }, `✕ ${failure.worker_id}: ${failure.error}: ${failure.message}`));
  });
  return parts;
}

const way = (pair) => (pair.prefill ? `${pair.prefill} → ${pair.decode}` : `${pair.decode} alone`);
const chosen = (why) => (why.chosen ? way(why.chosen) : "nowhere");

function notes(why) {
  const words = [REASONS[why.reason] ?? why.reason];
  if (why.num_near_equals > 1) words.push(`drawn among ${why.num_near_equals} near-equals`);
  if (why.slo) words.push(why.slo === "met" ? "expected to meet its targets" : "its targets may be missed");
  return words.filter(Boolean).join("; ");
}

function candidates(why) {
  const rows = [...why.candidates].sort((a, b) => Boolean(a.refused) - Boolean(b.refused) || a.wait_seconds + a.prefill_seconds - b.wait_seconds - b.prefill_seconds);
  const shown = rows.slice(0, MAX_ROWS).map((one) => [one.worker_id, one.role, count(one.cached_tokens), one.refused ? one.refused : seconds(one.wait_seconds), one.refused ? "" : seconds(one.prefill_seconds), one.refused || one.role !== "decode" ? "" : seconds(one.tpot_seconds)]);
  return table(`Workers compared${rows.length > MAX_ROWS ? ` (${MAX_ROWS} of ${rows.length})` : ""}`, 2, ["worker", "as", "cached tokens", "wait", "prefill", "TPOT joined"], shown);
}

function pairs(why) {
  const rows = [...why.pairs].sort((a, b) => a.price_seconds - b.price_seconds).slice(0, MAX_ROWS);
  const taken = (pair) => (why.chosen && way(pair) === chosen(why) ? "✓ " : "");
  const misses = rows.some((pair) => pair.num_missed);
  return table("Ways priced", 1, ["way", "price", "TTFT", "transfer", "TPOT", "stall of others", ...(misses ? ["others miss"] : [])],
    rows.map((pair) => [taken(pair) + way(pair), seconds(pair.price_seconds), seconds(pair.ttft_seconds), seconds(pair.transfer_seconds), seconds(pair.tpot_seconds), seconds(pair.stall_seconds), ...(misses ? [(pair.num_missed ?? 0).toFixed(2)] : [])]));
}
