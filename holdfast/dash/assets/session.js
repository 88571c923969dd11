// The key of this page. It is no cookie, as browsers send those of 127.0.0.1 to the servers of all its ports.

const NAME = "holdfast-page", ANSWER_MS = 500;
let key = "";

export async function enter() {
  const code = new URLSearchParams(location.search).get("code");
  let refused = null;
  key = sessionStorage.getItem(NAME) || "";
  if (code) {
    history.replaceState(null, "", location.pathname + location.hash);
    const answer = await fetch("enter", { method: "POST", body: JSON.stringify({ code }) });
    const said = await answer.json();
    if (answer.ok) key = said.key;
    else refused = new Error(said.error);
  }
  key ||= await askOtherTabs();
  if (refused && !key) throw refused;
  sessionStorage.setItem(NAME, key);
  new BroadcastChannel(NAME).onmessage = ({ data, target }) => data || target.postMessage(key);
}

function askOtherTabs() {  // of this very origin, port included: nobody else hears it
  const channel = new BroadcastChannel(NAME);
  return new Promise((found) => {
    channel.onmessage = ({ data }) => found(data);
    channel.postMessage("");
    setTimeout(found, ANSWER_MS, "");
  }).finally(() => channel.close());
}

export function fetchWithKey(path, options = {}) {
  return fetch(path, { ...options, headers: { ...options.headers, "X-Holdfast-Page": key } });
}
