// Elements from values. Whatever comes from a cluster is text: it becomes text nodes and attributes, never HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else set(element, name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

/** Sets an attribute where it differs; null and false remove it. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}

/** Sets the text where it differs, so that a selection in it stays. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Keeps a parent's children in step with a list: an element for each key lives as long as the key does, and with it the
 * focus. `make(item)` makes an element, `update(element, item)` fills it; the order is that of the list. */
export function keyed(parent, items, keyOf, make, update) {
  const known = (parent.keyedChildren ??= new Map());
  const keep = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (keep.has(key)) continue;
    keep.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = make(item)));
    update(element, item);
    if (element === place) place = place.nextSibling;
    else parent.insertBefore(element, place);
  }
  for (const [key, element] of known) {
    if (keep.has(key)) continue;
    element.remove();
    known.delete(key);
  }
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}
