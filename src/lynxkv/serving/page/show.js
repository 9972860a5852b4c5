// How values look, and how elements are made.

/** An element with attributes and children; text is always text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** `0.043 s`, `2.31 s`, `75 s`; a dash where there is none. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  const digits = value < 0.1 ? 3 : value < 10 ? 2 : value < 100 ? 1 : 0;
  return `${value.toFixed(digits)} s`;
}

/** `9.4 MB`; a dash where there is none. */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** `1,024`. */
export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

/** `14:03:27`, from unix seconds, on the reader's clock. */
export function clock(value) {
  return new Date(value * 1000).toLocaleTimeString("en-GB");
}
