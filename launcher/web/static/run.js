// The page of one run: the controls are built once, and what is read from the ledger is drawn again after each change.

import { LineChart, spendRate, timeline } from "./charts.js";
import { dollars, duration, h, hourly, moment, score, short, table } from "./dom.js";
import { follow, read, withToken } from "./server.js";

const REDRAW_MS = 2000;
const PAUSE = 50;  // A page takes at most a 50th of the time to read: a long run's page is read less often.
const EVENTS_KEPT = 400;
const NODES_SHOWN = 20;
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

export function showRun(main, name, onState) {
  new RunPage(main, name, onState).start();
}

class RunPage {
  constructor(main, name, onState) {
    Object.assign(this, { main, name, onState, page: null, axis: "dollars", timer: null, charts: {}, events: [], seen: [] });
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
      this.pause = Math.max(REDRAW_MS, PAUSE * (performance.now() - begun));
      const isFirst = this.page === null;
      this.page = page;
      if (isFirst) this.build();
      this.draw();
      this.onState("live");
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
    this.dialog = this.buildDialog();
    this.axes = h("fieldset", { class: "axes" }, h("legend", {}, "Curves over"), Object.keys(AXES).map((axis) =>
      h("label", {}, h("input", { type: "radio", name: "axis", value: axis, checked: axis === this.axis, onchange: () => { this.axis = axis; this.drawCharts(); } }), axis)));
    this.curves = h("div", { class: "charts" });
    this.still = h("p", { class: "note" });
    this.rate = new LineChart("Spend rate", { y: hourly });
    this.line = h("div", { class: "timeline" });
    this.idle = h("div", {});
    this.sheets = this.buildSheets();
    this.list = h("ol", { class: "events", tabindex: "0", "aria-label": "Events, newest first" });
    this.filter = h("input", { type: "search", id: "events-filter", oninput: () => this.drawEvents() });
    this.logs = this.buildLogs();
    this.costs = h("div", { class: "pair" });
    this.plan = h("div", {});
    this.more = h("div", {});
    this.main.replaceChildren(this.head, this.dialog,
      section("h-curves", "Curves", this.axes, this.curves, this.still),
      section("h-nodes", "Nodes", h("ul", { class: "key" }, h("li", { class: "demand" }, "on demand"), h("li", { class: "spot" }, "spot"), h("li", { class: "taken" }, "preemption")), this.line, this.rate.figure, this.idle),
      section("h-images", "Images", this.sheets.place),
      section("h-events", "Events", h("p", {}, h("label", { for: "events-filter" }, "Source, kind or text contains "), this.filter), this.list),
      section("h-logs", "Logs", this.logs.place),
      section("h-costs", "Where the dollars went", this.costs),
      section("h-plan", "The plan beside what happened", this.plan),
      section("h-more", "Where the numbers come from", this.more));
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
    const { view, page } = { view: this.page.view, page: this.page };
    const running = page.nodes.filter((node) => node.running).length;
    const saved = page.saved.find((one) => one.saved_micro_usd != null);
    const facts = [
      ["Spent", dollars(view.spent_micro_usd), view.max_total_micro_usd == null ? "no limit" : "of " + dollars(view.max_total_micro_usd)],
      ["Now", hourly(view.micro_usd_per_hour), running === 1 ? "1 node" : `${running} nodes`],
      [view.score == null && view.reward != null ? "reward in training" : view.metric, score(view.score ?? view.reward), view.target == null ? "no target" : "target " + view.target],
      ...(view.learning ? [["Learning", "nothing", view.learning]] : []),
      ["Iteration", `${view.iteration}/${view.iterations}`, view.eta_seconds == null ? "" : duration(view.eta_seconds * 1000) + " left at most"],
      ...(view.trainer ? [["Trainer", short(this.name, view.trainer), `took the role ${duration(view.trainer_ms)} ago`]] : []),
      ["Time", duration(view.elapsed_ms), view.clock_factor === 1 ? "" : `clock x${view.clock_factor}, ${duration(view.wall_seconds * 1000)} by the wall`],
      ["Preemptions", String(page.preemptions.length), dollars(page.preemptions.reduce((sum, line) => sum + line.micro_usd, 0)) + " lost"],
      ["Saved", saved ? dollars(saved.saved_micro_usd) : "–", saved ? "against " + saved.against : ""],
    ];
    const stop = view.is_over ? null : h("button", { type: "button", class: "stop", onclick: () => this.dialog.showModal() }, "Drain and stop…");
    const errors = view.trouble ? h("p", { role: "alert", class: "alarm" }, `In trouble: ${view.trouble}; nothing is bought, limits and stops still work`) : "";
    const trouble = view.lacks_controller ? h("p", { role: "alert", class: "alarm" }, "No controller manages this run; start one: ", h("code", { class: "command" }, `spotrl resume ${this.name}`)) : null;
    const again = view.status !== "stopped" || view.is_removed || trouble ? null
      : h("p", {}, view.resume_with ? "Go on with more money: " : "Go on with it: ", h("code", { class: "command" }, view.resume_with || `spotrl resume ${this.name}`));
    const focused = document.activeElement?.classList.contains("stop");
    this.head.replaceChildren(
      h("div", { class: "title" }, h("h1", {}, this.name), h("span", { class: "state " + view.status }, view.status + (view.reason ? ": " + view.reason : "")), stop ?? ""),
      h("p", { class: "verdict" }, page.headline, " ", page.drift), trouble ?? "", errors, again ?? "",
      h("progress", { max: view.iterations, value: view.iteration, "aria-label": `iteration ${view.iteration} of ${view.iterations}` }),
      this.inside(view),
      h("dl", { class: "facts" }, facts.map(([term, value, note]) => h("div", {}, h("dt", {}, term), h("dd", {}, value, h("small", {}, note))))),
      h("p", { class: "note" }, `Money is ${page.money_note}. ${page.clock_note}`));
    if (focused) this.head.querySelector(".stop")?.focus();
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
    const over = (points, series) => ({ xs: points.map(axis.of), xName: axis.name, xFormat: axis.format, series });
    const health = Object.entries(HEALTH).filter(([key]) => iterations.some((row) => row.health[key] != null));
    const moves = ([key]) => new Set(iterations.map((row) => row.health[key])).size > 1;
    const drawn = [
      [this.chart("score", "Held-out " + page.target.metric), { ...over(curve, [
        { name: "mean of the last three", ys: curve.map((point) => point.smoothed) },
        { name: "each evaluation", ys: curve.map((point) => point.score), kind: "dots" },
      ]), target: page.target.value }],
      [this.chart("reward", "Reward of the trained batch"), over(iterations, [{ name: "reward", ys: iterations.map((row) => row.reward) }])],
      ...health.filter(moves).map(([key, title]) => [this.chart(key, title),
        over(iterations, [{ name: title.toLowerCase(), ys: iterations.map((row) => row.health[key] ?? null) }])]),
      ...(iterations.some((row) => row.shares) ? [[this.chart("shares", "Trainer's time with the queue, % of an iteration"), over(iterations, [
        { name: "waits for the queue", ys: iterations.map((row) => row.shares ? 100 * row.shares.waiting : null) },
        { name: "helps with rollouts", ys: iterations.map((row) => row.shares ? 100 * row.shares.helping : null) },
      ])]] : []),
      [this.chart("seconds", "Wall seconds of an iteration"), over(iterations, [{ name: "seconds", ys: iterations.map((row) => row.seconds) }])],
    ];
    drawn.forEach(([chart, data]) => chart.draw(data));
    this.still.textContent = health.filter((one) => !moves(one)).map(([key, title]) => `${title}: ${iterations[0].health[key]} in every iteration.`).join(" ");
    this.rate.draw(spendRate(page));
    timeline(this.line, page);
  }

  buildSheets() {
    const slider = h("input", { type: "range", id: "sheet", min: 0, max: 0, value: 0, oninput: () => { this.pinned = Number(slider.value) < Number(slider.max); this.showSheet(); } });
    const label = h("p", { id: "sheet-label", "aria-live": "polite" });
    const image = h("img", { alt: "" });
    image.addEventListener("error", () => { if (image.getAttribute("src")) { label.textContent += ": this sheet is in no store any more"; image.hidden = true; } });
    const none = h("p", {}, "No evaluation has kept an image sheet yet.");
    const box = h("div", { hidden: true }, h("p", {}, h("label", { for: "sheet" }, "Evaluation "), slider), label, image);
    return { place: h("div", {}, none, box), slider, label, image, none, box };
  }

  drawSheets() {
    const { slider, none, box } = this.sheets;
    const count = this.page.sheets.length;
    none.hidden = count > 0;
    box.hidden = count === 0;
    slider.max = Math.max(0, count - 1);
    if (!this.pinned) slider.value = slider.max;
    if (count) this.showSheet();
  }

  showSheet() {
    const { slider, label, image } = this.sheets;
    const sheet = this.page.sheets[Number(slider.value)];
    const path = withToken(`api/runs/${encodeURIComponent(this.name)}/sheets/${sheet.iteration}`);
    const text = `iteration ${sheet.iteration}, ${this.page.target.metric} ${score(sheet.score)}, ${sheet.prompts} prompts`;
    slider.setAttribute("aria-valuetext", text);
    if (image.getAttribute("src") === path) return;
    label.textContent = text;
    image.hidden = false;
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
