// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const missing = "–";
export const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return missing;
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(value >= 1e5 ? 0 : 1)}k`;
  return whole.format(value);
}

export function rate(value) {
  if (!known(value)) return missing;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

/** In the plan's own currency, which nobody names. */
export function money(value) {
  return known(value) ? whole.format(value) : missing;
}

/** Never rounded up to 100 or down to 0. */
export function percent(part, digits = 0) {
  if (!known(part)) return missing;
  if (part >= 1 || part <= 0) return `${whole.format(100 * part)} %`;
  const step = 10 ** -digits;
  return `${Math.min(Math.max(100 * part, step), 100 - step).toFixed(digits)} %`;
}

export function seconds(value) {
  if (!known(value)) return missing;
  if (value === 0) return "0 s";
  if (value < 0.9995e-3) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${whole.format(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function ago(value) {
  return known(value) ? `${value < 1 ? "now" : `${seconds(Math.floor(value)).replace(".00", "").replace(".0", "")} ago`}` : missing;
}

export function clock(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}
