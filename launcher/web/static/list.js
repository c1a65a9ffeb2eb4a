// The list of runs: newest first, with a filter by name and status.

import { dollars, h, score, table, utc } from "./dom.js";
import { follow, read } from "./server.js";

const HEADS = [
  { name: "Run" }, { name: "Status" }, { name: "Iteration", number: true }, { name: "Score", number: true },
  { name: "Target", number: true }, { name: "Spent", number: true }, { name: "Money" }, { name: "Started" },
];

export function showList(main, onState) {
  const filter = h("input", { type: "search", id: "filter", autocomplete: "off", oninput: () => draw() });
  const place = h("div", {});
  const count = h("p", { role: "status" });
  main.replaceChildren(h("h1", {}, "Runs"),
    h("p", {}, h("label", { for: "filter" }, "Name or status contains "), filter), count, place);
  let rows = [];
  let ids = [0, 0, 0];
  let timer = null;
  let unfollow = null;
  let ended = false;

  function draw() {
    const word = filter.value.trim().toLowerCase();
    const shown = rows.filter((row) => `${row.name} ${row.status} ${row.infra}`.toLowerCase().includes(word));
    const spent = shown.reduce((sum, row) => sum + row.micro_usd, 0);
    count.textContent = rows.length
      ? `${shown.length} of ${rows.length} runs, ${dollars(spent)} in all`
      : "No run yet. `spotrl launch JOB` starts one.";
    place.replaceChildren(...(shown.length ? [table("Runs, newest first", HEADS, shown.map(cells))] : []));
  }

  function cells(row) {
    return [
      h("a", { href: "#/run/" + encodeURIComponent(row.name) }, row.name),
      h("span", { class: "state " + row.status, title: row.reason || null }, row.status + (row.is_removed ? ", files removed" : "")),
      `${row.iteration}/${row.iterations}`,
      row.score == null ? "–" : `${score(row.score)} ${row.metric}`,
      row.target == null ? "–" : String(row.target),
      dollars(row.micro_usd),
      row.money_basis,
      utc(row.created_ms),
    ];
  }

  async function load() {
    timer = null;
    try {
      const found = await read("api/runs");
      if (ended) return;
      rows = found.runs;
      ids = found.ids;
      draw();
      onState("live");
      unfollow ??= follow("api/changes", () => ids, onNews, onState);
    } catch (error) {
      onState(error.message);
      if (error.status === 403) throw error;
      timer ??= setTimeout(load, 2000);
    }
  }

  function onNews(news) {
    ids = news.ids;
    timer ??= setTimeout(load, 1000);
  }

  load().catch(() => main.replaceChildren(h("h1", {}, "Refused"), h("p", {}, "The token is missing or wrong. Open the address that `spotrl ui` printed.")));
  return () => { ended = true; unfollow?.(); clearTimeout(timer); };
}
