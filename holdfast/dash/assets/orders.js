// Orders of people: each is confirmed after the controller has said what it will do.

import { showDialog } from "./rank.js";
import { ask, block, job } from "./store.js";
import { announce, capital, h } from "./words.js";

export async function order(verb, node = "") {
  let effect;
  try {
    effect = (await ask("order", { verb, node, preview: true })).next;
  } catch (error) {
    showDialog(`${capital(verb)} is not possible`, h("p", { style: { marginTop: "10px" } }, `${capital(error.message)}.`));
    return;
  }
  const said = h("p", { role: "status", style: { marginTop: "10px" } }, `${capital(effect || "the job ends: all ranks stop, and nodes are given back")}.`);
  const give = h("button", { class: ["evict", "stop", "hold"].includes(verb) ? "danger" : "strong" }, capital(`${verb} ${node}`.trim()));
  const box = showDialog(`${capital(verb)}${node ? ` ${node}` : " the job"}?`, said);
  box.querySelector(".choices").append(give);
  give.addEventListener("click", async () => {
    give.disabled = true;
    try {
      await ask("order", { verb, node });
      announce(`${verb} is ordered`);
      box.close();
    } catch (error) {
      said.textContent = `${capital(error.message)}.`;
    }
  });
}

export function jobOrders() {
  return block(["head", "orders_taken"], ({ head, orders_taken: taken }) => {
    if (!taken || head.over || job.embedded) return h("span", { hidden: true });
    const verbs = head.said.asking ? ["approve", "stop"] : head.said.held ? ["resume", "stop"] : ["hold", "stop"];
    return h("span", { class: "nowrap" }, verbs.map((verb) => h("button", { class: "plain", onclick: () => order(verb) }, capital(verb))));
  }, true);
}
