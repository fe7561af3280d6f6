// The page: one stream of scenes, each shown part by part.

import { showCanary } from "./canary.js";
import { showDecisions } from "./decisions.js";
import { byId, h, keyed, replace, say, set } from "./dom.js";
import { showFlows } from "./flows.js";
import { ago, clock, count } from "./format.js";
import { showPlan } from "./plan.js";
import { showPools } from "./pools.js";
import { showRequests } from "./requests.js";
import { NeedsKey, followAlways, keep } from "./stream.js";
import { showTargets } from "./targets.js";
import { showTraffic } from "./traffic.js";
import { showWorkers } from "./workers.js";

const ICONS = { ok: "✓", idle: "○", unknown: "?", warn: "!", bad: "✕" };
const WORDS = { ok: "All is well", idle: "Idle", unknown: "Unknown", warn: "Look", bad: "Act" };
const STALE_SECONDS = 4;

const state = { scene: null, history: { recent: null, day: null }, range: "recent", flows: null, paused: false, heardAt: 0, lost: "" };

function show() {
  const scene = state.scene;
  if (!scene) return;
  showWho(scene);
  showVerdict(scene.verdict);
  showTraffic(scene, state.history[state.range]);
  showTargets(scene.targets, scene.traffic);
  showPools(scene, state.history[state.range]);
  showFlows(scene.flows, state.flows);
  showRequests(scene);
  showDecisions(scene);
  showPlan(scene);
  showCanary(scene);
  showWorkers(scene.workers);
  showSources(scene);
}

function showWho({ cluster, verdict }) {
  say(byId("cluster"), cluster.name);
  say(byId("model"), cluster.model);
  const title = `${ICONS[verdict.level] ?? "?"} ${cluster.name} · Headrace`;
  if (document.title !== title) document.title = title;
  say(byId("recorded"), cluster.recorded);
  set(byId("recorded"), "hidden", !cluster.recorded);
}

function showVerdict(verdict) {
  set(byId("verdict"), "data-level", verdict.level);
  say(byId("verdict-icon"), ICONS[verdict.level] ?? "?");
  set(byId("verdict-icon"), "title", WORDS[verdict.level]);
  say(byId("verdict-title"), verdict.title);
  const lines = verdict.lines.filter((line) => line.text !== verdict.title);
  keyed(
    byId("verdict-lines"),
    lines,
    (line) => line.where + line.text.replace(/[\d.,]+/g, "#"),
    () => h("li", {}, h("span", { class: "icon", "aria-hidden": "true" }), h("a", {})),
    (item, line) => {
      set(item, "data-level", line.level);
      say(item.firstChild, ICONS[line.level] ?? "?");
      say(item.lastChild, line.text);
      set(item.lastChild, "href", `#${line.where || "pools"}`);
    },
  );
}

function showSources({ sources, routers, failures }) {
  const redis =
    sources.redis_seconds === null
      ? `Redis has not answered yet. ${sources.redis_why}`
      : sources.redis_why
        ? `Redis last answered ${ago(sources.redis_seconds)}. ${sources.redis_why}`
        : "Redis answers.";
  replace(
    byId("source-list"),
    h("p", {}, h("b", {}, redis)),
    h("p", {}, sources.controller ? `Controller: ${sources.controller}.` : "A controller leads."),
    h("table", {},
      h("caption", {}, "Routers"),
      h("thead", {}, h("tr", {}, ...["router", "address", "in flight", "queued", "requests so far", ""].map((name, at) => h("th", { class: at > 1 && at < 5 ? "number" : null }, name)))),
      h("tbody", {}, ...routers.map((router) =>
        h("tr", {}, h("td", {}, router.id), h("td", {}, router.address), h("td", { class: "number" }, count(router.in_flight)),
          h("td", { class: "number" }, count(router.queued)), h("td", { class: "number" }, count(router.arrivals)), h("td", {}, router.silence))))),
    failures.length
      ? h("table", {}, h("caption", {}, "Workers that are wanted and not there"),
          h("tbody", {}, ...failures.map((failure) => h("tr", {}, h("td", {}, failure.worker), h("td", {}, failure.reason)))))
      : null,
  );
}

/** What is old must look old: the age is the page's own clock's. */
function showFreshness() {
  const silent = (performance.now() - state.heardAt) / 1000;
  const recorded = Boolean(state.scene?.cluster.recorded);
  const stale = !state.scene || (silent > STALE_SECONDS && !recorded);
  document.body.classList.toggle("stale", stale && Boolean(state.scene));
  const label = byId("freshness");
  set(label, "data-level", stale ? "bad" : state.paused ? "warn" : "ok");
  if (recorded) say(label, `as of ${clock(state.scene.at)}`);
  else if (!state.scene) say(label, state.lost || "connecting");
  else if (stale) say(label, `no news since ${ago(silent)}${state.lost ? `: ${state.lost}` : ""}`);
  else say(label, state.paused ? "paused" : `live · ${clock(state.scene.at)}`);
}

function hear(kind, value) {
  state.heardAt = performance.now();
  state.lost = "";
  if (kind === "history") {
    state.history = value;
    return;
  }
  if (!value.cluster) return;
  remember(value.point);
  if (state.paused) return;
  state.scene = value;
  show();
  showFreshness();
}

/** The server keeps the history; while the page is open it goes on by itself. */
function remember(point) {
  for (const ring of Object.values(state.history)) {
    if (!ring || !point) continue;
    const last = ring.points[ring.points.length - 1];
    if (last && point.at - last.at < ring.step_seconds - 0.5) continue;
    ring.points.push(point);
    if (ring.points.length > 300) ring.points.shift();
  }
}

function pause() {
  state.paused = !state.paused;
  set(byId("pause"), "aria-pressed", String(state.paused));
  say(byId("pause"), state.paused ? "Go on" : "Pause");
  showFreshness();
}

/** As a file that `headrace console --recorded` shows again. */
async function save() {
  const recording = { scene: state.scene, history: state.history };
  const url = URL.createObjectURL(new Blob([JSON.stringify(recording)], { type: "application/json" }));
  const link = h("a", { href: url, download: `console-${state.scene.cluster.name}-${Math.round(state.scene.at)}.json` });
  link.click();
  URL.revokeObjectURL(url);
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
}

function otherTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  theme(now === "dark" ? "light" : "dark");
  localStorage.setItem("headrace-theme", document.documentElement.dataset.theme);
}

function switches(name, choose) {
  for (const button of document.querySelectorAll(`[data-${name}]`)) {
    button.addEventListener("click", () => {
      for (const other of document.querySelectorAll(`[data-${name}]`)) set(other, "aria-pressed", String(other === button));
      choose(button.dataset[name]);
      show();
    });
  }
}

function keyboard(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea")) return;
  if (event.key === "p") pause();
  else if (event.key === "t") otherTheme();
  else if (event.key === "/") {
    event.preventDefault();
    byId("filter").focus();
  }
}

async function run() {
  theme(localStorage.getItem("headrace-theme"));
  byId("pause").addEventListener("click", pause);
  byId("save").addEventListener("click", () => state.scene && save());
  byId("theme").addEventListener("click", otherTheme);
  document.addEventListener("keydown", keyboard);
  switches("range", (name) => (state.range = name));
  switches("flows", (name) => (state.flows = name));
  setInterval(showFreshness, 1000);
  for (;;) {
    try {
      await followAlways("stream", hear, (reason) => {
        state.lost = reason;
        if (!state.scene) say(byId("verdict-title"), `Not connected: ${reason}`);
        showFreshness();
      });
    } catch (error) {
      if (!(error instanceof NeedsKey)) throw error;
      await askForKey(error.message);
    }
  }
}

function askForKey(why) {
  say(byId("key-why"), why);
  const dialog = byId("key");
  if (!dialog.open) dialog.showModal();
  byId("key-input").focus();
  return new Promise((resolve) => {
    byId("key-form").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        keep(byId("key-input").value);
        byId("key-input").value = "";
        dialog.close();
        resolve();
      },
      { once: true },
    );
  });
}

run();
