// The list of runs. The server draws its rows; this keeps them fresh, filters, and asks for more.

import { h } from "./dom.js";
import { follow, read } from "./server.js";

const STEP = 200;
const ALARM_MS = 10000;  // between two readings of the list without a change

export function keepList(onState) {
  const place = document.getElementById("runs");
  const filter = document.getElementById("filter");
  let ids = place.dataset.ids.split(",").map(Number);
  let count = 0;
  let timer = null;

  function take(html) {
    const picked = new Set([...place.querySelectorAll("input:checked")].map((box) => box.value));
    const focused = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") ?? document.activeElement.getAttribute("aria-label") ?? document.activeElement.id : null;
    place.innerHTML = html;  // escaped by the server
    for (const box of place.querySelectorAll("input")) box.checked = picked.has(box.value);
    if (focused) [...place.querySelectorAll("a, button, input")].find((one) => [one.getAttribute("href"), one.getAttribute("aria-label"), one.id].includes(focused))?.focus();
    watchMore();
  }

  function watchMore() {
    document.getElementById("more")?.addEventListener("click", () => { count = place.querySelectorAll("tbody tr").length + STEP; load(); });
  }

  async function load() {
    clearTimeout(timer);
    timer = null;
    try {
      const found = await read(`api/list?contains=${encodeURIComponent(filter.value)}&count=${count || ""}`);
      ids = found.ids;
      take(found.html);
      onState("live");
    } catch (error) {
      onState(error.message);
      if (error.status === 403) document.getElementById("main").replaceChildren(h("h1", {}, "Refused"), h("p", { role: "alert" }, error.message));
      else timer ??= setTimeout(load, 2000);
    }
  }

  // A controller that dies writes nothing, so no change tells of it.
  setInterval(() => { if (!document.hidden) timer ??= setTimeout(load, 0); }, ALARM_MS);
  filter.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(load, 100); });
  watchMore();
  if (filter.value || !place.querySelector("[role=status]")) load();  // the ledger was locked when the page was made
  follow("api/changes", () => ids, (news) => { ids = news.ids; timer ??= setTimeout(load, 1000); }, onState);
}
