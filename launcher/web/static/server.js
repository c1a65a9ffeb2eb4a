// Talk to the server: JSON, and a stream of changes that comes back by itself. The token is in the page's own address.

const token = new URLSearchParams(location.search).get("token") ?? "";

export const withToken = (path) => path + (path.includes("?") ? "&" : "?") + "token=" + encodeURIComponent(token);

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export async function read(path, options = {}) {
  const headers = { Authorization: "Bearer " + token, ...(options.headers ?? {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    throw new Refused(0, "The server does not answer. Is `spotrl ui` still running?");
  }
  const value = await answer.json().catch(() => ({ error: "The server answered something that is no JSON." }));
  if (!answer.ok) throw new Refused(answer.status, value.error ?? "HTTP " + answer.status);
  return value;
}

// Return why a stream was refused: an EventSource does not tell. The answer is left as soon as its head is read.
async function refusal(address) {
  const left = new AbortController();
  try {
    const answer = await fetch(address, { signal: left.signal });
    return answer.ok ? "not connected; trying again" : (await answer.json()).error;
  } catch {
    return "not connected; trying again";
  } finally {
    left.abort();
  }
}

// Follow changes from `path` until the page is left. `ids`: returns the ids of what the page shows.
export function follow(path, ids, onNews, onState) {
  const open = () => {
    const address = withToken(path + "?after=" + ids().join(","));
    const source = new EventSource(address);
    source.onopen = () => onState("live");
    source.onmessage = (message) => { onState("live"); onNews(JSON.parse(message.data)); };
    source.addEventListener("trouble", (message) => onState(JSON.parse(message.data).error));
    source.onerror = async () => {  // the address carries the ids, so a new source is opened with the newest of them
      source.close();
      onState("not connected; trying again");
      onState(await refusal(address));
      setTimeout(open, 1000);
    };
  };
  open();
}
