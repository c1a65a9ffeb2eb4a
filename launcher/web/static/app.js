// Make the page live: the list, or the run that the address names.

const main = document.getElementById("main");
const link = document.getElementById("link");
const name = new URLSearchParams(location.search).get("run");

function onState(text) {
  if (link.textContent === text) return;
  link.textContent = text;
  link.className = text === "live" ? "live" : "trouble";
}

if (name) import("./run.js").then(({ showRun }) => showRun(main, name, onState));
else import("./list.js").then(({ keepList }) => keepList(onState));
