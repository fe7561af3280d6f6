// What was planned beside what is.

import { byId, h, keyed, replace, say, set } from "./dom.js";
import { count, known, missing, money, percent, rate, seconds } from "./format.js";

const UNITS = { rate, count, percent: (value) => percent(value, 1), seconds, money };

export function showPlan({ plan }) {
  const body = byId("plan-body");
  if (!plan || plan.error) {
    say(byId("plan-note"), "");
    delete body.table;
    replace(body, h("p", { class: "muted" }, plan ? plan.error : "No plan is given: console.plan names a file of `headrace plan --json`."));
    return;
  }
  if (!body.table) {
    body.table = h("tbody", {});
    replace(body, h("p", { class: "muted" }), h("table", { class: "planned" },
      h("thead", {}, h("tr", {}, h("th", {}), h("th", { class: "number" }, "planned"), h("th", { class: "number" }, "now"), h("th", { class: "number" }, "of plan"), h("th", {}))), body.table));
  }
  say(byId("plan-note"), plan.off ? `${plan.off} ${plan.off === 1 ? "figure is" : "figures are"} off the plan` : "nothing is off the plan");
  say(body.firstChild, `${plan.about}${plan.holds_in_simulation === false ? "; it did not hold in simulation" : ""}`);
  keyed(body.table, plan.rows, (row) => row.part + row.what,
    () => h("tr", {}, h("td", {}), h("td", { class: "number" }), h("td", { class: "number" }), h("td", { class: "number" }), h("td", {}, h("span", { class: "icon" }))),
    (element, row) => {
      const show = UNITS[row.unit] ?? count;
      const [what, planned, now, part, mark] = element.children;
      say(what, row.what);
      say(planned, show(row.planned));
      say(now, show(row.now));
      say(part, known(row.planned) && known(row.now) && row.planned > 0 ? percent(row.now / row.planned) : missing);
      set(element, "data-level", row.off ? "warn" : row.off === false ? "ok" : null);
      say(mark.firstChild, row.off ? "!" : row.off === false ? "✓" : "");
      set(mark.firstChild, "title", row.off ? "worse, or more, than planned" : row.off === false ? "as planned, or better" : null);
    });
}
