// Build elements, and format numbers. Text from a run is only ever set as text, so markup in it is shown, not run. (The list's rows come escaped from the server.)

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "title", "polyline"]);

export function h(tag, attributes = {}, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null).map((child) => child instanceof Node ? child : String(child)));
  return element;
}

export function dollars(micro) {
  const sign = micro < 0 ? "-" : "";
  const value = Math.abs(micro) / 1e6;
  const places = value > 0 && value < 0.01 ? 4 : 2;
  return sign + "$" + value.toLocaleString("en-US", { minimumFractionDigits: places, maximumFractionDigits: places });
}

export const hourly = (micro) => dollars(micro) + "/h";

export function duration(ms) {
  const units = [["d", 86400000], ["h", 3600000], ["m", 60000], ["s", 1000]];
  const parts = [];
  let rest = Math.max(0, Math.round(ms));
  for (const [unit, size] of units) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count || parts.length) parts.push(count + unit);
  }
  return parts.slice(0, 2).filter((part) => !part.startsWith("0")).join(" ") || "0s";
}

export const score = (value) => (value == null ? "–" : value.toFixed(3));

// An ISO time as `2027-01-15 08:00 UTC`; a date, or another text, as it is.
export const moment = (iso) => (iso[10] === "T" ? `${iso.slice(0, 16).replace("T", " ")} UTC` : iso);

export const short = (run, node) => (node.startsWith(run + "-") ? node.slice(run.length + 1) : node);

export function table(caption, heads, rows) {
  const cell = (value, index) => h("td", { class: heads[index].number ? "number" : null, "data-head": heads[index].name }, value);
  return h("div", { class: "wide", role: "region", "aria-label": caption, tabindex: "0" },
    h("table", { class: heads.length > 3 ? "many" : null },
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head.number ? "number" : null }, head.name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}
