// The place of sessions: this node serves none yet, and says so.
import { h } from "./dom.js";

const WORDS = {
  sessions: ["Sessions", "A session is one long-lived connection to a worker, such as a browser. This node holds none."],
};

export const page = (name) => () => ({
  el: h("div", {}, h("h1", {}, WORDS[name][0]), h("p", { class: "panel muted" }, WORDS[name][1])),
  title: WORDS[name][0],
});
