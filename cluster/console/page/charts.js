// Small charts: a line over time, a bar of parts, a meter.

import { h, s, set } from "./dom.js";
import { known } from "./format.js";

const WIDTH = 160;
const HEIGHT = 36;

/** A line with gaps where nothing is known. `update(points, label, top)`: points are [seconds, value]. */
export function sparkline() {
  const area = s("path", { class: "area" });
  const line = s("path", { class: "line" });
  const last = s("circle", { class: "last", r: 2.5 });
  const svg = s("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, area, line);
  const box = h("div", { class: "sparkbox" }, svg);
  box.update = (points, label, top = 0) => {
    set(svg, "aria-label", label);
    const values = points.filter(([, value]) => known(value));
    const from = points.length ? points[0][0] : 0;
    const span = Math.max(points.length ? points[points.length - 1][0] - from : 1, 1);
    const high = Math.max(top, ...values.map(([, value]) => value), 1e-9);
    const x = (at) => ((at - from) / span) * (WIDTH - 4) + 2;
    const y = (value) => HEIGHT - 3 - (value / high) * (HEIGHT - 8);
    let path = "";
    let below = "";
    let begin = null;
    let end = null;
    const close = () => {
      if (begin !== null) below += `L${x(end).toFixed(1)} ${HEIGHT}L${x(begin).toFixed(1)} ${HEIGHT}Z`;
      begin = null;
    };
    for (const [at, value] of points) {
      if (!known(value)) {
        close();
        continue;
      }
      const step = `${begin === null ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      path += step;
      below += step;
      if (begin === null) begin = at;
      end = at;
    }
    close();
    set(line, "d", path || null);
    set(area, "d", below || null);
    set(last, "hidden", true);
  };
  return box;
}

/** Parts beside each other; `update([{name, value, label}], total)`. The classes are `part part-NAME`. */
export function parts(className = "") {
  const bar = h("div", { class: `parts ${className}`, role: "img" });
  bar.update = (list, total, label) => {
    set(bar, "aria-label", label);
    while (bar.children.length > list.length) bar.lastChild.remove();
    while (bar.children.length < list.length) bar.append(h("span"));
    list.forEach((part, at) => {
      const element = bar.children[at];
      set(element, "class", `part part-${part.name}`);
      set(element, "title", part.label);
      element.style.width = `${total > 0 ? (100 * part.value) / total : 0}%`;
    });
  };
  return bar;
}

/** How full something is, with the bar that it must not pass; `more` is what could be given back. */
export function meter() {
  const fill = h("span", { class: "fill" });
  const behind = h("span", { class: "behind" });
  const mark = h("span", { class: "mark-at" });
  const element = h("div", { class: "meter", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 }, behind, fill, mark);
  element.update = (value, at, level, label, more = 0) => {
    const shown = known(value) ? Math.min(Math.max(value, 0), 1) : 0;
    fill.style.width = `${100 * shown}%`;
    behind.style.width = `${100 * Math.min(shown + more, 1)}%`;
    set(mark, "hidden", at === null);
    if (at !== null) mark.style.left = `${100 * at}%`;
    set(element, "data-level", level);
    set(element, "aria-valuenow", Math.round(100 * shown));
    set(element, "aria-label", label);
  };
  return element;
}
