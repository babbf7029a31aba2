// The request form: what it says as a request body.

import { byId } from "./dom.js";

const PROMPTS = {
  completion: 'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n',
  chat: "Explain in three sentences why the sky is blue.",
};
const LARGEST_SEED = 2 ** 32;

export class Form {
  constructor() {
    this.prompts = { ...PROMPTS };
    this.shown = "completion";
    byId("prompt").value = PROMPTS.completion;
    for (const radio of document.getElementsByName("kind")) radio.addEventListener("change", () => this.#kindChanged());
    byId("speculate").addEventListener("change", () => this.#speculateChanged());
    this.#speculateChanged();
  }

  /** "completion" or "chat". */
  get kind() {
    return document.querySelector("input[name=kind]:checked").value;
  }

  get path() {
    return this.kind === "chat" ? "v1/chat/completions" : "v1/completions";
  }

  get prompt() {
    return byId("prompt").value;
  }

  /** The body. Its seed is always given, so that the same text can be asked for again. */
  get body() {
    const seed = byId("seed").value === "" ? Math.floor(Math.random() * LARGEST_SEED) : Number(byId("seed").value);
    const prediction = byId("prediction").value;
    return {
      model: byId("model").value || undefined,
      ...(this.kind === "chat" ? { messages: [{ role: "user", content: this.prompt }] } : { prompt: this.prompt }),
      temperature: Number(byId("temperature").value),
      max_tokens: Number(byId("max-tokens").value),
      seed,
      stream: true,
      stream_options: { include_speculation: true },
      speculation: this.#speculation,
      ...(prediction && byId("speculate").checked ? { prediction: { type: "content", content: prediction } } : {}),
    };
  }

  /** Answers are not kept: the same request, sent again, could copy them and look fast. */
  get #speculation() {
    if (!byId("speculate").checked) return { enabled: false, details: true, remember: false };
    const boxes = [...document.getElementsByName("source")];
    const sources = boxes.filter((box) => box.checked).map((box) => box.value);
    return {
      enabled: true,
      details: true,
      remember: false,
      ...(byId("depth").value === "" ? {} : { max_depth: Number(byId("depth").value) }),
      ...(sources.length === boxes.length ? {} : { sources }),
    };
  }

  /** Offer these models, and keep the choice where it is still there. */
  setModels(names) {
    const select = byId("model");
    const [shown, chosen] = [[...select.options].map((option) => option.value), select.value];
    if (shown.join("\n") === names.join("\n")) return;
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
  }

  #kindChanged() {
    this.prompts[this.shown] = this.prompt;
    this.shown = this.kind;
    byId("prompt").value = this.prompts[this.shown];
    byId("prompt-label").textContent = this.shown === "chat" ? "Message" : "Prompt";
  }

  #speculateChanged() {
    const off = !byId("speculate").checked;
    for (const control of byId("speculation").querySelectorAll("input, textarea")) control.disabled = off;
    byId("speculation").classList.toggle("off", off);
  }
}
