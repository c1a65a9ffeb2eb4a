// The page of one run: the controls are built once, and what is read from the ledger is drawn again after each change.

import { LineChart, spendRate, timeline } from "./charts.js";
import { dollars, duration, h, hourly, moment, score, short, table } from "./dom.js";
import { follow, read, withToken } from "./server.js";

const REDRAW_MS = 2000;
const STATE_MS = 1000;
const OLD_MS = 5000;  // figures older than this are marked
const PAUSE = 50;  // Reading takes at most a 50th of the time of one core: a long run's page is read less often. The server tells its processor time.
const EVENTS_KEPT = 400;
const NODES_SHOWN = 20;
const LIVE = new Set(["asked", "starting", "ready", "draining", "stopping", "kept"]);
const SECTIONS = {
  "h-images": "Images", "h-curves": "Curves", "h-nodes": "Nodes", "h-events": "Events", "h-logs": "Logs",
  "h-costs": "Where the dollars went", "h-plan": "The plan beside what happened", "h-more": "Where the numbers come from",
};
const HEALTH = {
  kl: "KL to the reference", reference_distance: "Distance to the reference", clip_share: "Clip share",
  gradient_norm: "Gradient norm", ratio_max: "Largest importance ratio", staleness: "Staleness",
  zero_variance_share: "Groups without variance", velocity_change: "Change of velocity",
};
const AXES = {
  dollars: { name: "dollars", of: (point) => point.micro_usd / 1e6, format: (x) => "$" + Number(x.toPrecision(3)) },
  hours: { name: "hours", of: (point) => point.hours, format: (x) => String(Number(x.toPrecision(3))) },
  iterations: { name: "iterations", of: (point) => point.iteration, format: (x) => String(Number(x.toPrecision(4))) },
};

// An exponential mean: each value takes the share `weight` of the mean before it. Gaps stay gaps.
function smoothed(ys, weight) {
  let mean = null;
  return ys.map((y) => (y == null ? null : (mean = mean == null ? y : weight * mean + (1 - weight) * y)));
}

export function showRun(main, name, onState) {
  new RunPage(main, name, onState).start();
}

class RunPage {
  constructor(main, name, onState) {
    Object.assign(this, { main, name, onState, page: null, axis: "dollars", smoothing: 0, timer: null, charts: {}, events: [], seen: [], readAt: 0 });
  }

  start() {
    this.load();
    this.onResize = () => { clearTimeout(this.resizing); this.resizing = setTimeout(() => this.page && this.drawCharts(), 150); };
    window.addEventListener("resize", this.onResize);
  }

  async load() {
    this.timer = null;
    const begun = performance.now();
    try {
      const page = await read("api/runs/" + encodeURIComponent(this.name));
      this.pause = Math.max(REDRAW_MS, PAUSE * page.cpu_ms);
      this.readAt = begun;
      const isFirst = this.page === null;
      this.page = page;
      if (isFirst) this.build();
      this.draw();
      this.onState("live");
      if (!this.isKept && this.isLive()) this.keepState();
      if (isFirst) follow(`api/runs/${encodeURIComponent(this.name)}/changes`, () => this.seen, (news) => this.onNews(news), this.onState);
      this.due = performance.now() + 5 * this.pause;
      if (!page.view.is_over) this.timer ??= setTimeout(() => this.load(), 5 * this.pause);
    } catch (error) {
      this.onState(error.message);
      if (this.page === null) this.main.replaceChildren(h("h1", {}, this.name), h("p", { role: "alert" }, error.message));
      if (error.status === 403) return;  // another token: no reading will succeed
      if (error.status === 0 || error.status === 503) this.timer ??= setTimeout(() => this.load(), REDRAW_MS);
    }
  }

  // Read the figures at the top, which is cheap, about every second. The whole page follows at its own pace.
  async keepState() {
    this.isKept = true;
    let pause = STATE_MS;
    const begun = performance.now();
    try {
      const { view, cpu_ms } = await read(`api/runs/${encodeURIComponent(this.name)}/state`);
      pause = Math.max(STATE_MS, PAUSE * cpu_ms);
      const ends = view.is_over && !this.page.view.is_over;
      this.page.view = view;
      this.readAt = begun;
      this.drawHead();
      if (ends) this.load();
    } catch (error) {
      this.onState(error.message);
      if (error.status === 403) return;
    }
    this.isKept = this.isLive();
    if (this.isKept) setTimeout(() => this.keepState(), pause);
  }

  isLive() {
    const { view } = this.page;
    return !view.is_over || view.nodes.some((node) => LIVE.has(node.status));
  }

  drawAge() {
    const age = performance.now() - this.readAt;
    const isOver = this.page.view.is_over;
    this.age.textContent = isOver ? "" : age < OLD_MS ? `figures ${Math.round(age / 1000)} s old` : `these figures are ${duration(age)} old`;
    this.age.classList.toggle("alarm", !isOver && age >= OLD_MS);
    this.age.dataset.readAt = this.readAt;
  }

  onNews(news) {
    this.seen = news.ids;
    this.addEvents(news.events);
    const isChange = news.events.some((line) => line.source === "run");  // started, stopping, ended: rare, and shown at once
    const due = performance.now() + (isChange ? 0 : this.pause);
    if (this.timer !== null && this.due <= due) return;
    clearTimeout(this.timer);
    this.due = due;
    this.timer = setTimeout(() => this.load(), isChange ? 0 : this.pause);
  }

  build() {
    const section = (id, title, ...children) => h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...children);
    this.head = h("div", {});
    this.age = h("small", { class: "age" });
    setInterval(() => this.drawAge(), 500);
    this.dialog = this.buildDialog();
    this.axes = h("fieldset", { class: "axes" }, h("legend", {}, "Curves over"), Object.keys(AXES).map((axis) =>
      h("label", {}, h("input", { type: "radio", name: "axis", value: axis, checked: axis === this.axis, onchange: () => { this.axis = axis; this.drawCharts(); } }), axis)),
      h("label", {}, "Smoothing ", h("input", { type: "range", id: "smoothing", min: 0, max: 0.95, step: 0.05, value: 0, oninput: (event) => { this.smoothing = Number(event.target.value); this.drawCharts(); } })));
    this.curves = h("div", { class: "charts" });
    this.still = h("p", { class: "note" });
    this.rate = new LineChart("Spend rate", { y: hourly });
    this.line = h("div", { class: "timeline" });
    this.idle = h("div", {});
    this.sheets = this.buildSheets();
    this.large = this.buildLarge();
    this.list = h("ol", { class: "events", tabindex: "0", "aria-label": "Events, newest first" });
    this.filter = h("input", { type: "search", id: "events-filter", oninput: () => this.drawEvents() });
    this.logs = this.buildLogs();
    this.costs = h("div", { class: "pair" });
    this.plan = h("div", {});
    this.fleets = h("div", {});
    if (this.page.fleets) this.fleets.innerHTML = "<h3>The plans it was chosen from</h3>" + this.page.fleets;  // escaped by the server
    this.more = h("div", {});
    const contents = h("nav", { class: "contents", "aria-label": "On this page" }, Object.entries(SECTIONS).map(([id, title]) => h("a", { href: "#" + id }, title)));
    this.main.replaceChildren(this.head, this.dialog, this.large, contents,
      section("h-images", SECTIONS["h-images"], this.sheets.place),
      section("h-curves", SECTIONS["h-curves"], this.axes, this.curves, this.still),
      section("h-nodes", SECTIONS["h-nodes"], h("ul", { class: "key" }, h("li", { class: "demand" }, "on demand"), h("li", { class: "spot" }, "spot"), h("li", { class: "taken" }, "preemption")), this.line, this.rate.figure, this.idle),
      section("h-events", SECTIONS["h-events"], h("p", {}, h("label", { for: "events-filter" }, "Source, kind or text contains "), this.filter), this.list),
      section("h-logs", SECTIONS["h-logs"], this.logs.place),
      section("h-costs", SECTIONS["h-costs"], this.costs),
      section("h-plan", SECTIONS["h-plan"], this.plan, this.fleets),
      section("h-more", SECTIONS["h-more"], this.more));
    this.events = this.page.events;
    this.seen = this.page.ids;  // of the list: a page that is read again is newer, and its events are not added
  }

  draw() {
    this.drawHead();
    this.drawCharts();
    this.drawSheets();
    this.drawEvents();
    this.drawTables();
  }

  drawHead() {
    if (String(getSelection()) && this.head.contains(getSelection().anchorNode)) return;  // a command is being copied
    const { view, page } = { view: this.page.view, page: this.page };
    const running = view.nodes.filter((node) => LIVE.has(node.status)).length;
    const kept = view.nodes.filter((node) => node.goes_in_ms != null);
    const saved = page.saved.find((one) => one.saved_micro_usd != null);
    const facts = [
      ["Spent", (view.lacks_controller ? "at most " : "") + dollars(view.spent_micro_usd), view.max_total_micro_usd == null ? "no limit" : "of " + dollars(view.max_total_micro_usd)],
      ["Now", hourly(view.micro_usd_per_hour), running === 1 ? "1 node" : `${running} nodes`],
      [view.score == null && view.reward != null ? "reward in training" : view.metric, score(view.score ?? view.reward),
        (view.score == null ? "" : "mean of the last three evaluations; ") + (view.target == null ? "no target" : "target " + view.target)],
      ...(view.learning ? [["Learning", "nothing", view.learning]] : []),
      ["Iteration", `${view.iteration}/${view.iterations}`, view.eta_seconds == null ? "" : duration(view.eta_seconds * 1000) + " left at most"],
      ...(view.trainer ? [["Trainer", short(this.name, view.trainer), `took the role ${duration(view.trainer_ms)} ago`]] : []),
      ["Time", duration(view.elapsed_ms), view.clock_factor === 1 ? "" : `clock x${view.clock_factor}, ${duration(view.wall_seconds * 1000)} by the wall`],
      ["Preemptions", String(view.preemptions), dollars(page.preemptions.reduce((sum, line) => sum + line.micro_usd, 0)) + " lost"],
      ["Saved", saved ? dollars(saved.saved_micro_usd) : "–", saved ? "against " + saved.against : ""],
    ];
    const stop = view.is_over ? null : h("button", { type: "button", class: "stop", onclick: () => this.dialog.showModal() }, "Drain and stop…");
    const errors = view.trouble ? h("p", { role: "alert", class: "alarm" }, `In trouble: ${view.trouble}; nothing is bought, limits and stops still work`) : "";
    const trouble = view.lacks_controller ? h("p", { role: "alert", class: "alarm" }, "No controller manages this run; start one: ", h("code", { class: "command" }, `spotrl resume ${this.name}`)) : null;
    const again = view.status !== "stopped" || view.is_removed || trouble ? null
      : h("p", {}, view.resume_with ? "Go on with more money: " : "Go on with it: ", h("code", { class: "command" }, view.resume_with || `spotrl resume ${this.name}`));
    const focused = document.activeElement?.classList.contains("stop");
    this.head.replaceChildren(
      h("div", { class: "title" }, h("h1", {}, this.name), h("span", { class: "state " + view.status + (view.reason === "iterations" && view.target != null ? " missed" : "") }, view.status + (view.reason ? ": " + view.reason : "")), this.age, stop ?? ""),
      h("p", { class: "verdict" }, page.headline, " ", page.drift), trouble ?? "", errors, again ?? "",
      ...kept.map((node) => h("p", { role: "status" }, `${short(this.name, node.name)} failed, and is kept for ${duration(node.goes_in_ms)} more: `, h("code", { class: "command" }, `spotrl ssh ${this.name} ${short(this.name, node.name)}`))),
      h("progress", { max: view.status === "finished" && view.iteration || view.iterations, value: view.iteration, "aria-label": `iteration ${view.iteration} of ${view.iterations}` }),
      this.inside(view),
      view.point_text ? h("p", { class: "point" }, view.point_text) : "",
      h("dl", { class: "facts" }, facts.map(([term, value, note]) => h("div", {}, h("dt", {}, term), h("dd", {}, value, h("small", {}, note))))),
      h("p", { class: "note" }, `Money is ${page.money_note}. ${page.clock_note} ${page.bucket_notes.join(" ")}`));
    if (focused) this.head.querySelector(".stop")?.focus();
    this.drawAge();
    if (view.is_over && this.dialog.open) this.dialog.close();
  }

  // How far the present iteration is, judged by the time of the last ones.
  inside(view) {
    if (view.is_over || view.lacks_controller || view.usual_iteration_ms == null) return "";
    const text = `This iteration: ${duration(view.iteration_ms)} of about ${duration(view.usual_iteration_ms)}`;
    return h("p", { class: "inside" }, h("progress", { max: view.usual_iteration_ms || 1, value: view.iteration_ms, "aria-label": text }), h("small", {}, text));
  }

  buildDialog() {
    const answer = h("p", { role: "status" });
    const stop = async () => {
      answer.textContent = "Asking the controller to stop it.";
      try {
        const path = `api/runs/${encodeURIComponent(this.name)}/stop`;
        const done = await read(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ confirm: this.name }) });
        answer.textContent = done.left.length ? "Stopping; still there: " + done.left.join(", ") : "Stopped.";
        setTimeout(() => dialog.close(), 1500);
      } catch (error) {
        answer.textContent = error.message;
      }
    };
    const dialog = h("dialog", { "aria-labelledby": "stop-title" },
      h("h2", { id: "stop-title" }, `Stop ${this.name}?`),
      h("p", {}, "Its nodes commit their work and are released. Checkpoints are kept, and the run can be resumed."),
      answer,
      h("p", { class: "buttons" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Let it run"),
        h("button", { type: "button", class: "stop", id: "stop-yes", onclick: stop }, "Stop it")));
    return dialog;
  }

  // Return the chart of a curve. All charts of the page are in place before one is drawn, because that sets their width.
  chart(key, title) {
    if (!this.charts[key]) {
      this.charts[key] = new LineChart(title);
      this.curves.append(this.charts[key].figure);
    }
    return this.charts[key];
  }

  drawCharts() {
    const { page } = this;
    const axis = AXES[this.axis];
    const { curve, iterations } = page;
    const ofIterations = (name, ys) => over(iterations, this.smoothing
      ? [{ name: `${name}, smoothed by ${this.smoothing.toFixed(2)}`, ys: smoothed(ys, this.smoothing) }, { name: "each iteration", ys, kind: "dots" }]
      : [{ name, ys }]);
    const over = (points, series) => ({
 xs: points.map(axis.of), xName: axis.name, xFormat: axis.format, series });
    const health = Object.entries(HEALTH).filter(([key]) => iterations.some((row) => row.health[key] != null));
    const moves = ([key]) => new Set(iterations.map((row) => row.health[key])).size > 1;
    const drawn = [
      [this.chart("score", "Held-out " + page.target.metric), { ...over(curve, [
        { name: "mean of the last three", ys: curve.map((point) => point.smoothed) },
        { name: "each evaluation", ys: curve.map((point) => point.score), kind: "dots" },
      ]), target: page.target.value }],
      [this.chart("reward", "Reward of the trained batch"), ofIterations("reward", iterations.map((row) => row.reward))],
      ...health.filter(moves).map(([key, title]) => [this.chart(key, title),
        ofIterations(title.toLowerCase(), iterations.map((row) => row.health[key] ?? null))]),
      ...(iterations.some((row) => row.shares) ? [[this.chart("shares", "Trainer's time with the queue, % of an iteration"), over(iterations, [
        { name: "waits for the queue", ys: iterations.map((row) => row.shares ? 100 * row.shares.waiting : null) },
        { name: "helps with rollouts", ys: iterations.map((row) => row.shares ? 100 * row.shares.helping : null) },
      ])]] : []),
      [this.chart("seconds", "Wall seconds of an iteration"), ofIterations("seconds", iterations.map((row) => row.seconds))],
    ];
    drawn.forEach(([chart, data]) => chart.draw(data));
    this.still.textContent = health.filter((one) => !moves(one)).map(([key, title]) => `${title}: ${iterations[0].health[key]} in every iteration.`).join(" ");
    this.rate.draw(spendRate(page));
    timeline(this.line, page);
  }

  // Two evaluations side by side: the first and the newest, until a slider is moved.
  buildSheets() {
    const none = h("p", {}, "No evaluation has kept an image sheet yet.");
    const panes = [this.buildPane("before", "sheet-before", "sheet-before-label"), this.buildPane("now", "sheet", "sheet-label")];
    const box = h("div", { hidden: true, class: "sheets" }, panes.map((pane) => pane.place));
    return { place: h("div", {}, none, box), panes, none, box };
  }

  buildPane(title, id, labelId) {
    const pane = { pinned: false, isLast: title === "now" };
    pane.slider = h("input", { type: "range", id, min: 0, max: 0, value: 0, oninput: () => { pane.pinned = !pane.isLast || Number(pane.slider.value) < Number(pane.slider.max); this.showSheet(pane); } });
    pane.label = h("p", { id: labelId, "aria-live": "polite" });
    pane.image = h("img", { alt: "" });
    pane.image.addEventListener("error", () => { if (pane.image.getAttribute("src")) { pane.label.textContent += ": this sheet is in no store any more"; pane.enlarge.hidden = true; } });
    pane.enlarge = h("button", { type: "button", class: "enlarge", "aria-label": `Enlarge the images of ${title}`, onclick: () => this.showLarge(pane.image) }, pane.image);
    pane.place = h("div", {}, h("p", {}, h("label", { for: id }, title === "now" ? "Now " : "Before "), pane.slider), pane.label, pane.enlarge);
    return pane;
  }

  buildLarge() {
    const image = h("img", { alt: "" });
    const dialog = h("dialog", { class: "large", "aria-label": "Enlarged images", onclick: () => dialog.close() }, image,
      h("p", { class: "buttons" }, h("button", { type: "button" }, "Close")));
    return dialog;
  }

  showLarge(image) {
    const large = this.large.querySelector("img");
    large.src = image.src;
    large.alt = image.alt;
    this.large.showModal();
  }

  drawSheets() {
    const { panes, none, box } = this.sheets;
    const count = this.page.sheets.length;
    none.hidden = count > 0;
    box.hidden = count === 0;
    panes[0].place.hidden = count < 2;
    for (const pane of panes) {
      pane.slider.max = Math.max(0, count - 1);
      if (!pane.pinned) pane.slider.value = pane.isLast ? pane.slider.max : 0;
      if (count) this.showSheet(pane);
    }
  }

  showSheet({ slider, label, image, enlarge }) {
    const sheet = this.page.sheets[Number(slider.value)];
    const path = withToken(`api/runs/${encodeURIComponent(this.name)}/sheets/${sheet.iteration}`);
    const text = `iteration ${sheet.iteration}, ${this.page.target.metric} ${score(sheet.score)}, ${sheet.prompts} prompts`;
    slider.setAttribute("aria-valuetext", text);
    if (image.getAttribute("src") === path) return;
    label.textContent = text;
    enlarge.hidden = false;
    image.alt = `Images of the held-out prompts at ${text}`;
    image.src = path;
  }

  addEvents(events) {
    this.events = [...this.events, ...events].slice(-EVENTS_KEPT);
    this.drawEvents();
  }

  drawEvents() {
    const word = this.filter.value.trim().toLowerCase();
    const shown = this.events.filter((line) => `${line.source} ${line.kind} ${line.text}`.toLowerCase().includes(word)).reverse();
    this.list.replaceChildren(...shown.map((line) => h("li", {}, h("time", {}, duration(line.elapsed_ms)),
      h("b", {}, short(this.name, line.source)), h("span", { class: "kind " + line.kind }, line.kind), h("span", {}, line.text))),
    ...(shown.length ? [] : [h("li", {}, "No event matches.")]));
  }

  buildLogs() {
    const text = h("pre", { tabindex: "0", "aria-label": "End of the log" }, "Choose a log, or read it again.");
    const choice = h("select", { id: "log", onchange: () => show() });
    const show = async () => {
      try {
        const log = await read(`api/runs/${encodeURIComponent(this.name)}/logs?file=${encodeURIComponent(choice.value)}`);
        choice.replaceChildren(...log.files.map((file) => h("option", { value: file, selected: file === log.file }, file)));
        text.textContent = log.text || "The log is empty.";
        text.scrollTop = text.scrollHeight;
      } catch (error) {
        text.textContent = error.message;
      }
    };
    show();
    const again = h("button", { type: "button", onclick: show }, "Read again");
    return { place: h("div", {}, h("p", {}, h("label", { for: "log" }, "Log "), choice, " ", again), text) };
  }

  drawTables() {
    const { page } = this;
    const split = (caption, amounts) => table(caption, [{ name: caption[3].toUpperCase() + caption.slice(4) }, { name: "Dollars", number: true }, { name: "Share", number: true }],
      Object.entries(amounts).filter(([, amount]) => amount).sort((a, b) => b[1] - a[1])
        .map(([key, amount]) => [short(this.name, key).replaceAll("_", " "), dollars(amount), ((100 * amount) / page.costs.total).toFixed(1) + "%"]));
    this.costs.replaceChildren(split("By phase", page.costs.by_phase), split("By role", page.costs.by_role), split("By market", page.costs.by_market), split("By node", page.costs.by_node));
    const dearest = page.nodes.filter((node) => node.micro_usd).sort((a, b) => b.micro_usd - a.micro_usd).slice(0, NODES_SHOWN);
    this.idle.replaceChildren(table("Idle shares, dearest nodes first", [{ name: "Node" }, { name: "Market" }, { name: "Hours", number: true }, { name: "Dollars", number: true }, { name: "Idle", number: true }],
      dearest.map((node) => [short(this.name, node.node), node.market.replaceAll("_", " "), node.hours.toFixed(2), dollars(node.micro_usd), (100 * (node.phase_micro_usd.idle ?? 0) / node.micro_usd).toFixed(0) + "%"])));
    this.plan.replaceChildren(table("Slots", [{ name: "Slot" }, { name: "Planned" }, { name: "Price", number: true }, { name: "Nodes", number: true }, { name: "Preempted", number: true }, { name: "Hours", number: true }, { name: "Dollars", number: true }, { name: "Zones" }],
      page.plan.map((slot) => [slot.slot, `${slot.planned.market.replaceAll("_", " ")} ${slot.planned.instance_type} in ${slot.planned.zone}`, hourly(slot.planned.micro_usd_per_hour), slot.nodes, slot.preemptions, slot.hours.toFixed(2), dollars(slot.micro_usd), slot.zones.join(", ")])));
    this.more.replaceChildren(
      table("Prices", [{ name: "Source" }, { name: "Observed" }, { name: "Nodes", number: true }], page.prices.map((price) => [price.source, moment(price.observed_at) || "unknown", price.nodes])),
      this.origin(page.provenance),
      h("details", {}, h("summary", {}, "Job file"), h("pre", { tabindex: "0", "aria-label": "Job file" }, page.job)));
  }

  origin({ commands, alike, versions, started_at, ended_at }) {
    const commit = (name, hash) => (hash ? [`Commit of ${name}`, hash] : null);
    const rows = [
      ...commands.flatMap((one, number) => [
        [`${number ? "Resumed" : "Launched"} ${moment(one.at)}`, one.command || "by a program"],
        commit("spotrl", one.code_commit), commit("the job's folder", one.workdir_commit)]),
      ["By the wall clock", `${moment(started_at)} to ${ended_at ? moment(ended_at) : "now"}`],
      ...Object.entries(alike).map(([hardware, nodes]) => ["Hardware of " + nodes.map((node) => short(this.name, node)).join(", "), hardware]),
      ["Libraries", Object.entries(versions).map(([name, version]) => `${name} ${version}`).join(", ") || "–"],
    ];
    return table("Origin", [{ name: "What" }, { name: "Value" }], rows.filter((row) => row !== null));
  }
}
