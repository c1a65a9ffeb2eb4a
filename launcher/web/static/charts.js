// Line charts and the timeline of nodes, as SVG with the width that the page has. Arrow keys move along a chart's points.

import { dollars, duration, h, hourly, short } from "./dom.js";

const MARGIN = { left: 52, right: 12, top: 10, bottom: 34 };
const HEIGHT = 230;
const SLOTS_DRAWN = 7;  // lines that can be told apart beside the sum

export function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const plain = (value, digits = 3) => Number(value.toPrecision(Math.min(digits, 12))).toString();

// A chart in a figure of its own: `draw` may be called again with other data, and keeps the focus and the chosen point.
export class LineChart {
  constructor(title, formats = {}) {
    this.title = title;
    this.formats = formats;
    this.at = null;
    this.note = h("p", { class: "reading", "aria-live": "polite" });
    this.place = h("div", { class: "plot" });
    this.key = h("ul", { class: "key" });
    this.figure = h("figure", { class: "chart", tabindex: "0", "aria-label": title, onkeydown: (event) => this.step(event) },
      h("figcaption", {}, title), this.key, this.place, this.note);
  }

  // data: { xs, xName, xFormat, series: [{ name, ys, kind }], target }
  draw(data) {
    this.data = data;
    const points = data.series.flatMap((one) => one.ys).filter((y) => y != null);
    const width = Math.max(240, this.place.clientWidth || 600);
    const svg = h("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", "aria-label": this.summary(data) });
    this.key.replaceChildren(...(data.series.length > 1 || data.target != null ? [
      ...data.series.map((one, index) => h("li", { class: "s" + index }, one.name)),
      ...(data.target != null ? [h("li", { class: "target" }, "target " + plain(data.target))] : []),
    ] : []));
    this.place.replaceChildren(svg);
    if (!points.length) {
      svg.append(h("text", { x: 8, y: 24, class: "empty" }, "Nothing yet."));
      return;
    }
    if (data.target != null) points.push(data.target);
    let [low, high] = [Math.min(...points), Math.max(...points)];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    const [first, last] = [data.fromZero ? 0 : Math.min(...data.xs), Math.max(...data.xs)];
    const right = width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    this.x = (value) => MARGIN.left + (last > first ? (value - first) / (last - first) : 0.5) * (right - MARGIN.left);
    this.y = (value) => bottom - ((value - low) / (high - low)) * (bottom - MARGIN.top);
    const digits = Math.max(3, 2 + Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / (high - low))));
    for (const value of ticks(low, high, 4)) {
      svg.append(h("line", { x1: MARGIN.left, x2: right, y1: this.y(value), y2: this.y(value), class: "grid" }),
        h("text", { x: MARGIN.left - 6, y: this.y(value) + 4, "text-anchor": "end" }, (this.formats.y ?? ((y) => plain(y, digits)))(value)));
    }
    for (const value of ticks(first, last, width < 420 ? 3 : 6)) {
      svg.append(h("text", { x: this.x(value), y: bottom + 15, "text-anchor": "middle" }, data.xFormat(value)));
    }
    svg.append(h("text", { x: (MARGIN.left + right) / 2, y: HEIGHT - 4, "text-anchor": "middle", class: "axis" }, data.xName));
    if (data.target != null) {
      svg.append(h("line", { x1: MARGIN.left, x2: right, y1: this.y(data.target), y2: this.y(data.target), class: "target" }));
    }
    data.series.forEach((one, index) => svg.append(...this.line(one, index)));
    this.cursor = h("line", { y1: MARGIN.top, y2: bottom, class: "cursor", visibility: "hidden" });
    svg.append(this.cursor);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const where = ((event.clientX - box.left) / box.width) * width;
      const near = data.xs.reduce((best, x, index) => Math.abs(this.x(x) - where) < Math.abs(this.x(data.xs[best]) - where) ? index : best, 0);
      this.show(near);
    });
    if (this.at != null) this.show(Math.min(this.at, data.xs.length - 1));
  }

  line(one, index) {
    const places = this.data.xs.map((x, number) => one.ys[number] == null ? null : [this.x(x), this.y(one.ys[number])]).filter(Boolean);
    if (one.kind === "dots") return places.map(([x, y]) => h("circle", { cx: x, cy: y, r: 2.5, class: "dot s" + index }));
    const step = one.kind === "steps";
    const path = places.map(([x, y], number) => number === 0 ? `M${x} ${y}` : step ? `H${x}V${y}` : `L${x} ${y}`).join("");
    return places.length === 1
      ? [h("circle", { cx: places[0][0], cy: places[0][1], r: 3, class: "dot s" + index })]
      : [h("path", { d: path, class: "line s" + index })];
  }

  show(index) {
    const { data } = this;
    this.at = index;
    const values = data.series.filter((one) => one.ys[index] != null).map((one) => `${one.name} ${(this.formats.y ?? plain)(one.ys[index])}`);
    this.note.textContent = `${data.xName} ${data.xFormat(data.xs[index])}: ${values.join(", ")}`;
    this.cursor.setAttribute("x1", this.x(data.xs[index]));
    this.cursor.setAttribute("x2", this.x(data.xs[index]));
    this.cursor.setAttribute("visibility", "visible");
  }

  step(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (!(event.key in moves) || !this.data?.xs.length || !this.cursor) return;
    event.preventDefault();
    const from = this.at ?? (event.key === "ArrowRight" ? -1 : this.data.xs.length);
    this.show(Math.min(this.data.xs.length - 1, Math.max(0, from + moves[event.key])));
  }

  summary(data) {
    const ends = data.series.map((one) => {
      const ys = one.ys.filter((y) => y != null);
      return ys.length ? `${one.name} from ${plain(ys[0])} to ${plain(ys[ys.length - 1])}` : `${one.name}: nothing yet`;
    });
    return `${this.title} against ${data.xName}: ${ends.join("; ")}`;
  }
}

// One row for each slot, one bar for each paid stretch, a cross for each preemption.
export function timeline(place, page) {
  const run = page.run.name;
  const slots = [...new Set(page.nodes.map((node) => node.slot))];
  const width = Math.max(240, place.clientWidth || 600);
  const left = width < 420 ? 72 : 110;
  const row = 26;
  const height = slots.length * row + 40;
  const span = Math.max(1, page.end_ms - page.start_ms);
  const x = (ms) => left + ((ms - page.start_ms) / span) * (width - left - 10);
  const label = `${page.nodes.length} nodes in ${slots.length} slots over ${duration(span)}, ${page.preemptions.length} preemptions`;
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  slots.forEach((slot, index) => {
    const y = index * row + 6;
    svg.append(h("text", { x: left - 8, y: y + 14, "text-anchor": "end" }, slot));
    for (const node of page.nodes.filter((one) => one.slot === slot)) {
      for (const charge of node.charges) {
        const title = `${short(run, node.node)}, ${node.market} ${node.instance_type} in ${node.zone}, ${hourly(charge.micro_usd_per_hour)}, ${dollars(charge.micro_usd)}`;
        svg.append(h("rect", { x: x(charge.start_ms), y, width: Math.max(1.5, x(charge.end_ms) - x(charge.start_ms)), height: 18, class: "stretch " + node.market },
          h("title", {}, title)));
      }
    }
    for (const line of page.preemptions.filter((one) => one.slot === slot)) {
      const at = x(line.at_ms);
      svg.append(h("path", { d: `M${at - 5} ${y + 4}L${at + 5} ${y + 14}M${at + 5} ${y + 4}L${at - 5} ${y + 14}`, class: "cross" },
        h("title", {}, `${short(run, line.node)} preempted ${line.notice ? "with" : "without"} notice`)));
    }
  });
  const bottom = slots.length * row + 6;
  for (const hours of ticks(0, span / 3600000, width < 420 ? 3 : 8)) {
    svg.append(h("text", { x: x(page.start_ms + hours * 3600000), y: bottom + 14, "text-anchor": "middle" }, plain(hours)));
  }
  svg.append(h("text", { x: (left + width) / 2, y: bottom + 30, "text-anchor": "middle", class: "axis" }, "hours on the run's clock"));
  place.replaceChildren(svg);
}

// Dollars an hour of all nodes together, and of each slot, as steps. A successor in a slot goes on with its line.
export function spendRate(page) {
  const slots = [...new Set(page.nodes.map((node) => node.slot))];
  const own = slots.length > SLOTS_DRAWN ? slots.slice(0, SLOTS_DRAWN - 1) : slots;
  const names = ["all nodes", ...own, ...(own.length < slots.length ? ["other slots"] : [])];
  const edges = new Map();
  const add = (ms, index, rate) => {
    const edge = edges.get(ms) ?? names.map(() => 0);
    edge[0] += rate;
    edge[index] += rate;
    edges.set(ms, edge);
  };
  for (const node of page.nodes) {
    const index = own.includes(node.slot) ? own.indexOf(node.slot) + 1 : names.length - 1;
    for (const charge of node.charges) {
      add(charge.start_ms, index, charge.micro_usd_per_hour);
      add(charge.end_ms, index, -charge.micro_usd_per_hour);
    }
  }
  const times = [...edges.keys()].sort((a, b) => a - b);
  const sums = names.map(() => 0);
  const rates = times.map((ms) => edges.get(ms).map((rate, index) => (sums[index] += rate)));
  return {
    xs: times.map((ms) => (ms - page.start_ms) / 3600000), xName: "hours", xFormat: plain, fromZero: true,
    series: names.map((name, index) => ({ name, ys: rates.map((row) => row[index]), kind: "steps" })),
  };
}
