// Six figures of the traffic, each with its line over time.

import { sparkline } from "./charts.js";
import { byId, h, keyed, say, set } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";

const TILES = [
  { name: "arrivals", title: "Requests a second", show: (t) => rate(t.arrivals), more: (t) => `${rate(t.ended)} ended` },
  { name: "generated", title: "Tokens a second", show: (t) => rate(t.generated), more: (t) => `prompts ${rate(t.prompt_tokens)}, computed ${rate(t.computed_tokens)}` },
  { name: "hit_rate", title: "Cache hit rate", show: (t) => percent(t.hit_rate), more: () => "of prompt tokens, last minute", top: 1 },
  { name: "ttft", title: "Mean TTFT", show: (t) => seconds(t.ttft), more: () => "last minute" },
  { name: "queued", title: "Waiting in routers", show: (t) => count(t.queued), more: (t) => (t.queued ? `${count(t.queued_tokens)} tokens, the oldest ${seconds(t.oldest_queued_seconds)}` : "nobody waits"), top: 4 },
  { name: "in_flight", title: "In flight", show: (t) => count(t.in_flight), more: () => "on workers", top: 4 },
];

function make(tile) {
  const chart = sparkline();
  const box = h("div", { class: "tile" }, h("h3", {}, tile.title), h("div", { class: "figure" }), h("div", { class: "muted" }), chart);
  box.chart = chart;
  return box;
}

export function showTraffic({ traffic }, ring) {
  const points = ring?.points ?? [];
  keyed(byId("tiles"), TILES, (tile) => tile.name, make, (box, tile) => {
    const shown = tile.show(traffic);
    say(box.children[1], shown);
    say(box.children[2], tile.more(traffic));
    set(box, "data-empty", shown === "–");
    box.chart.update(points.map((point) => [point.at, point[tile.name]]), `${tile.title}: ${shown} now`, tile.top);
  });
}
