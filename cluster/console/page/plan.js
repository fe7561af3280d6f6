// What was planned beside what is.

import { byId, h, replace } from "./dom.js";

export function showPlan(scene) {
  if (scene.plan) return;
  if (!byId("plan-body").children.length) replace(byId("plan-body"), h("p", { class: "muted" }, "No plan is given."));
}
