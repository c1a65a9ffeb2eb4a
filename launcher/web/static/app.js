// Start the page: show the list or a run, by the part of the address after #.

import { showList } from "./list.js";
import { showRun } from "./run.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
let end = () => {};

function onState(text) {
  if (link.textContent === text) return;
  link.textContent = text;
  link.className = text === "live" ? "live" : "trouble";
}

function route() {
  const name = location.hash.match(/^#\/run\/(.+)$/)?.[1];
  if (location.hash === "#main") return;
  end();
  window.scrollTo(0, 0);
  document.title = name ? decodeURIComponent(name) + " – spotrl" : "spotrl";
  end = name ? showRun(main, decodeURIComponent(name), onState) : showList(main, onState);
}

window.addEventListener("hashchange", () => { route(); if (location.hash !== "#main") main.focus(); });
route();
