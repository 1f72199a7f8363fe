// The chat page: /v1/chat/completions as a stream, as any client would ask. What is said stays in this tab.
"use strict";

const $ = (id) => document.getElementById(id);
const said = []; // messages as the API has them
let asking = null; // the AbortController of the answer that is coming

function show(role, words) {
  const box = document.createElement("div"), text = document.createElement("div");
  box.className = "message " + role;
  text.className = "words";
  text.textContent = words;
  box.append(text);
  $("talk").append(box);
  box.scrollIntoView({ block: "end" });
  return { box, text };
}

function headers() {
  const h = { "Content-Type": "application/json" };
  if ($("key").value) h.Authorization = "Bearer " + $("key").value;
  return h;
}

async function explain(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return "HTTP " + response.status;
  }
}

async function find_model() {
  try {
    const r = await fetch("/v1/models", { headers: headers() });
    if (!r.ok) {
      $("state").textContent = await explain(r);
      $("settings").open = r.status === 401;
      return;
    }
    const card = (await r.json()).data[0];
    $("model").textContent = card.id;
    $("state").textContent = card.max_model_len.toLocaleString() + " tokens of context";
  } catch {
    $("state").textContent = "The server does not answer.";
  }
}

function body() {
  const system = $("system").value, b = { stream: true, stream_options: { include_usage: true } };
  b.messages = system ? [{ role: "system", content: system }, ...said] : [...said];
  if ($("temperature").value) b.temperature = Number($("temperature").value);
  if ($("most").value) b.max_tokens = Number($("most").value);
  const plugin = $("plugin").value, budget = $("budget").value;
  if (plugin || budget) b.sparse = { ...(plugin && { plugin }), ...(budget && { budget: Number(budget) }) };
  return JSON.stringify(b);
}

// Events of a stream, one JSON object each; [DONE] ends it, and an end without it is told.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer was cut short.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// Milliseconds to the first token, tokens a second behind it, what was found of the prompt.
function numbers(began, first, usage, finish) {
  const parts = [], cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(usage.prompt_tokens + " tokens in" + (cached ? " (" + cached + " cached)" : ""), usage.completion_tokens + " out");
  if (first) parts.push("first after " + Math.round(first - began) + " ms");
  const seconds = (performance.now() - first) / 1000;
  if (first && usage?.completion_tokens > 1 && seconds > 0) parts.push(((usage.completion_tokens - 1) / seconds).toFixed(1) + " tokens/s");
  if (finish && finish !== "stop") parts.push(finish === "length" ? "ended by its length" : finish);
  return parts.join(", ");
}

async function answer(controller) {
  const began = performance.now();
  const r = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: body(), signal: controller.signal });
  if (!r.ok) throw new Error(await explain(r));
  const { box, text } = show("assistant", "");
  let first = 0, usage = null, finish = null;
  try {
    for await (const e of events(r)) {
      if (e.error) throw new Error(e.error.message);
      usage = e.usage ?? usage;
      const choice = e.choices?.[0];
      finish = choice?.finish_reason ?? finish;
      if (!choice?.delta?.content) continue;
      first ||= performance.now();
      text.textContent += choice.delta.content;
      box.scrollIntoView({ block: "end" });
    }
  } finally {
    if (text.textContent === "") box.remove();
    else said.push({ role: "assistant", content: text.textContent }); // a stopped one, too: it was read
    const line = document.createElement("div");
    line.className = "numbers";
    line.textContent = numbers(began, first, usage, controller.signal.aborted ? "stopped" : finish);
    box.append(line);
  }
}

function busy(controller) {
  asking = controller;
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
  if (controller === null) $("text").focus();
}

$("ask").addEventListener("submit", async (e) => {
  e.preventDefault();
  const words = $("text").value.trim();
  if (words === "" || asking !== null) return;
  const controller = new AbortController(), n = said.push({ role: "user", content: words });
  const mine = show("user", words);
  $("text").value = "";
  busy(controller);
  try {
    await answer(controller);
  } catch (why) {
    if (!controller.signal.aborted) show("error", why.message);
    if (said.length === n) { // nothing came: the question is asked again as it was
      said.pop();
      mine.box.remove();
      $("text").value = words;
    }
  }
  busy(null);
});

$("text").addEventListener("keydown", (e) => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => asking?.abort());
$("fresh").addEventListener("click", () => {
  asking?.abort();
  said.length = 0;
  $("talk").replaceChildren();
  $("text").focus();
});
$("choices").addEventListener("submit", (e) => e.preventDefault());
$("key").addEventListener("change", find_model);
find_model();
