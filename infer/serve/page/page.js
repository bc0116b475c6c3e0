"use strict";

// A page for one server: what is said goes to its API as any client's would, and the answer comes as a stream.

const DEPTHS = 6; // tints; what is deeper has the last
const at = (id) => document.getElementById(id);
const turns = []; // of the chat: role, content
let served = null; // the model, as /v1/models has it
let underway = null; // aborts the request under way

/** Headers of a request, with the key if one was given. */
function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** An error's own words, of a response or of an event in a stream. */
function words(content) {
  return content && content.error ? content.error.message : "the server's answer can't be read";
}

/** Ask which model is served; where a key is needed, show the field for it. */
async function learn() {
  try {
    const reply = await fetch("v1/models", { headers: headers() });
    if (reply.status === 401) {
      at("key-label").hidden = false;
      at("model").textContent = "this server asks for a key";
      return;
    }
    const content = await reply.json();
    if (!reply.ok) throw new Error(words(content));
    served = content.data[0];
    const drafts = served.drafter === "none" ? "no drafts" : `drafts by ${served.drafter}`;
    const reach = served.context === null ? "" : `, texts up to ${served.context} tokens`;
    at("model").textContent = `${served.id}: ${drafts}${reach}`;
    at("text").placeholder = served.chat ? "Say something" : "Begin a text: this model continues it";
    document.title = `medusa: ${served.id}`;
  } catch (error) {
    at("model").textContent = `no answer from the server: ${error.message}`;
  }
}

/** Put a turn at the end of the log; return where it says something. */
function show(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const said = document.createElement("div");
  said.className = "said";
  said.textContent = text;
  turn.append(said);
  at("log").append(turn);
  turn.scrollIntoView({ block: "end" });
  return said;
}

/** A line below a turn. */
function note(said, text, wrong = false) {
  const line = document.createElement("p");
  line.className = wrong ? "note wrong" : "note";
  line.textContent = text;
  said.parentElement.append(line);
  line.scrollIntoView({ block: "end" });
}

/** Add a part of an answer, tinted by the depth of the tree that it was guessed at. */
function add(said, text, depth) {
  const part = document.createElement("span");
  part.textContent = text;
  if (depth) {
    part.className = `d${Math.min(depth, DEPTHS)}`;
    part.title = `guessed at depth ${depth}`;
  }
  said.append(part);
}

/** The figures of the answer under way, or of the last one. */
function figures(tokens, steps, seconds) {
  at("tokens").textContent = tokens;
  at("steps").textContent = steps;
  at("per-step").textContent = steps ? ((tokens - 1) / steps).toFixed(2) : "–";
  at("rate").textContent = seconds > 0 ? (tokens / seconds).toFixed(1) : "–";
}

/** The events of a stream, each as what its data says. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

/** What is asked, as the options say. */
function request(text) {
  const body = { stream: true, drafts: true, baseline: at("baseline").checked };
  body.temperature = Number(at("temperature").value);
  if (at("most").value) body.max_tokens = Number(at("most").value);
  if (at("seed").value) body.seed = Number(at("seed").value);
  if (served.chat) body.messages = [...turns, { role: "user", content: text }];
  else body.prompt = text;
  return body;
}

/** Read an answer into the page; return its text. */
async function read(reply, said) {
  let text = "", tokens = 0, start = null, last = null;
  for await (const chunk of events(reply.body)) {
    if (chunk.error) throw new Error(words(chunk));
    const choice = chunk.choices[0];
    const told = choice.medusa;
    if (choice.finish_reason) last = { ...told, reason: choice.finish_reason };
    else if (told) {
      start ??= performance.now();
      for (const part of told.drafts) add(said, part.text, part.depth);
      text += served.chat ? choice.delta.content : choice.text;
      tokens = told.tokens;
      figures(tokens, told.steps, (performance.now() - start) / 1000);
      at("log").lastElementChild.scrollIntoView({ block: "end" });
    }
  }
  if (last === null) throw new Error("the server broke off");
  tokens = last.steps ? Math.round(last.tokens_per_step * last.steps) + 1 : tokens;
  figures(tokens, last.steps, last.seconds);
  const how = at("baseline").checked || served.drafter === "none" ? "no drafts" : "drafts";
  const cut = last.reason === "length" ? ", cut at the limit" : "";
  const seed = last.seed === null ? "" : `, seed ${last.seed}`;
  note(said, `${how}: ${tokens} tokens in ${last.seconds.toFixed(2)} s, ${(tokens / last.seconds).toFixed(1)} tokens/s,`
    + ` ${last.tokens_per_step.toFixed(2)} tokens per step${cut}${seed}`);
  return text;
}

/** Send what was written, and show the answer while it comes. */
async function send() {
  const text = at("text").value;
  if (!text.trim() || underway) return;
  if (!served) await learn();
  if (!served) return;
  underway = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("baseline").disabled = true;
  at("text").value = "";
  if (served.chat) show("user", text);
  const said = show("assistant", "");
  if (!served.chat) {
    add(said, text, 0);
    said.firstElementChild.className = "prompt";
  }
  try {
    const path = served.chat ? "v1/chat/completions" : "v1/completions";
    const options = { method: "POST", headers: headers(), body: JSON.stringify(request(text)), signal: underway.signal };
    const reply = await fetch(path, options);
    if (!reply.ok) throw new Error(words(await reply.json().catch(() => null)));
    const answer = await read(reply, said);
    turns.push({ role: "user", content: text }, { role: "assistant", content: answer });
  } catch (error) {
    const left = error.name === "AbortError";
    note(said, left ? "stopped; this turn is forgotten" : error.message, !left);
    at("text").value = at("text").value || text;
  } finally {
    underway = null;
    at("send").disabled = at("baseline").disabled = false;
    at("stop").disabled = true;
    at("text").focus();
  }
}

/** What the tints mean. */
function legend() {
  at("legend").append("chosen by the trunk itself, or guessed at depth");
  for (let depth = 1; depth <= DEPTHS; depth++) {
    const name = document.createElement("span");
    name.className = `d${depth}`;
    name.textContent = depth < DEPTHS ? depth : `${depth} and deeper`;
    at("legend").append(name);
  }
}

/** Tint the drafts, or not. */
function tint() {
  document.body.classList.toggle("tinted", at("tint").checked);
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
at("stop").addEventListener("click", () => underway && underway.abort());
at("clear").addEventListener("click", () => {
  if (underway) underway.abort();
  turns.length = 0;
  at("log").replaceChildren();
});
at("tint").addEventListener("change", tint);
at("key").addEventListener("change", learn);
legend();
tint();
learn();
