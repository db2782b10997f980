// A conversation with the server that this page came from.
//
// Whatever a model or the server writes is put into the page as text, never as HTML. The
// conversation and the key are kept in sessionStorage: they outlive a reload, and end with the tab.
"use strict";

const CONVERSATION = "arb-ternary.conversation";
const KEY = "arb-ternary.key";
// The log follows new text if its end is at most this many pixels below what is seen.
const NEAR_END = 40;
// The server's own limit for text that it continues is that of the OpenAI API, 16 tokens.
const PLAIN_TOKENS = "256";
const CUT_OFF = "The connection ended before the answer did.";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const messagesElement = byId("messages");
const textField = byId("text");
const modelField = byId("model");
const temperatureField = byId("temperature");
const maxTokensField = byId("max-tokens");
const plainField = byId("plain");
const keyForm = byId("key-form");

const state = {
  messages: [], // of {role, content, note}
  model: "",
  system: "",
  temperature: "",
  maxTokens: "",
  plain: false,
  draft: "",
};
let models = [];
let running = null; // the AbortController of the answer that is being written
let undo = null; // messages and draft as they were before it
let following = true;
let lastScrollTop = 0;
let drawing = false;

/** An error with a sentence for the user. */
class Problem extends Error {}

// --- the server ---------------------------------------------------------------------------------

async function call(path, options = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key !== null) {
    headers.Authorization = `Bearer ${key}`;
  }
  if (options.body !== undefined) {
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new Problem("The server cannot be reached.");
  }
  if (response.ok) {
    return response;
  }
  if (response.status === 401) {
    keyForm.hidden = false;
  }
  throw await problemOf(response);
}

async function problemOf(response) {
  let sentence = `The server refused with status ${response.status}.`;
  try {
    sentence = (await response.json()).error.message;
  } catch {
    // A proxy in between answers with other bodies; the status says enough.
  }
  const wait = response.headers.get("Retry-After");
  if (wait !== null) {
    const unit = wait === "1" ? "second" : "seconds";
    sentence += /^\d+$/.test(wait) ? ` Try again in ${wait} ${unit}.` : ` Try again at ${wait}.`;
  }
  return new Problem(sentence);
}

/** Yield the data of each server-sent event; a chunk of bytes may end within a line or a letter. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) {
      return;
    }
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const content = line.endsWith("\r") ? line.slice(0, -1) : line;
      if (content.startsWith("data:")) {
        data.push(content.slice(5).trimStart());
      } else if (content === "" && data.length > 0) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

async function loadModels() {
  try {
    const response = await call("v1/models");
    models = (await response.json()).data;
  } catch (error) {
    showProblem(error);
    return;
  }
  keyForm.hidden = true;
  hideProblem();
  modelField.replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === state.model)) {
    modelField.value = state.model;
  }
  state.model = modelField.value;
  showMode();
}

// --- an answer ----------------------------------------------------------------------------------

function request() {
  const body = { model: state.model, stream: true };
  if (state.temperature !== "") {
    body.temperature = Number(state.temperature);
  }
  const maxTokens = state.maxTokens || (isPlain() ? PLAIN_TOKENS : "");
  if (maxTokens !== "") {
    body.max_tokens = Number(maxTokens);
  }
  if (isPlain()) {
    body.prompt = state.messages.map((message) => message.content).join("");
    return ["v1/completions", body];
  }
  body.messages = state.messages.map(({ role, content }) => ({ role, content }));
  if (state.system.trim() !== "") {
    body.messages.unshift({ role: "system", content: state.system });
  }
  return ["v1/chat/completions", body];
}

async function answer(before) {
  const run = new AbortController();
  const [path, body] = request();
  const message = { role: "assistant", content: "", note: "" };
  state.messages.push(message);
  running = run;
  undo = before;
  following = true;
  hideProblem();
  save();
  draw();
  byId("status").textContent = "An answer is being written.";
  let ended = false;
  let problem = null;
  try {
    const response = await call(path, {
      method: "POST",
      body: JSON.stringify(body),
      signal: run.signal,
    });
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") {
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error !== undefined) {
        throw new Problem(chunk.error.message);
      }
      for (const choice of chunk.choices) {
        message.content += choice.delta?.content ?? choice.text ?? "";
        if (choice.finish_reason) {
          ended = true;
          message.note = choice.finish_reason === "length" ? "Ended by the limit of tokens." : "";
        }
      }
      drawLater();
    }
    if (!ended) {
      throw new Problem(CUT_OFF);
    }
  } catch (error) {
    message.note = run.signal.aborted ? "Stopped." : "Not finished.";
    if (!run.signal.aborted) {
      // fetch and its streams raise a TypeError where the network fails.
      problem = error instanceof TypeError ? new Problem(CUT_OFF) : error;
    }
  }
  if (running !== run) {
    return; // a new conversation has begun
  }
  running = null;
  if (ended || message.content !== "") {
    if (message.content === "") {
      message.note = "The answer is empty.";
    }
    byId("status").textContent = `Answer: ${message.content}`;
  } else {
    // Nothing was answered: what was asked goes back to where it can be changed and sent again.
    state.messages = before.messages;
    textField.value = textField.value || before.draft;
    byId("status").textContent = "";
  }
  save();
  draw();
  if (problem !== null) {
    showProblem(problem);
  }
  textField.focus();
}

async function send() {
  const draft = textField.value;
  if (running !== null || !settingsAreValid()) {
    return;
  }
  if (draft.trim() === "" && !(isPlain() && state.messages.length > 0)) {
    return;
  }
  if (models.length === 0) {
    await loadModels();
    if (models.length === 0) {
      return;
    }
  }
  const before = { messages: [...state.messages], draft };
  if (draft !== "") {
    state.messages.push({ role: "user", content: draft, note: "" });
  }
  textField.value = "";
  await answer(before);
}

async function regenerate() {
  if (running !== null || state.messages.at(-1)?.role !== "assistant" || !settingsAreValid()) {
    return;
  }
  const before = { messages: [...state.messages], draft: "" };
  state.messages.pop();
  await answer(before);
}

function startNew() {
  running?.abort();
  running = null;
  state.messages = [];
  byId("status").textContent = "";
  hideProblem();
  save();
  draw();
  textField.focus();
}

// --- what is kept -------------------------------------------------------------------------------

function save() {
  const kept = { ...state, draft: textField.value };
  if (running !== null) {
    const last = state.messages.at(-1);
    kept.messages = [...state.messages.slice(0, -1), { ...last, note: "Not finished." }];
    if (last.content === "") {
      kept.messages = undo.messages;
      kept.draft = kept.draft || undo.draft;
    }
  }
  try {
    sessionStorage.setItem(CONVERSATION, JSON.stringify(kept));
  } catch {
    showProblem(new Problem("The conversation is too long to be kept over a reload."));
  }
}

function restore() {
  const kept = sessionStorage.getItem(CONVERSATION);
  if (kept !== null) {
    Object.assign(state, JSON.parse(kept));
  }
  textField.value = state.draft;
  byId("system").value = state.system;
  temperatureField.value = state.temperature;
  maxTokensField.value = state.maxTokens;
}

// --- what is shown ------------------------------------------------------------------------------

function hasTemplate() {
  return models.find((model) => model.id === state.model)?.has_chat_template !== false;
}

function isPlain() {
  return state.plain || !hasTemplate();
}

function showMode() {
  plainField.checked = isPlain();
  plainField.disabled = !hasTemplate();
  maxTokensField.placeholder = isPlain() ? PLAIN_TOKENS : "server's";
  byId("text-label").textContent = isPlain() ? "Text to continue" : "Message";
  byId("send").textContent = isPlain() ? "Continue" : "Send";
  let hint = "Write a message. The conversation ends with this tab.";
  if (isPlain()) {
    hint = "Write the beginning of a text. The model continues it.";
    if (!hasTemplate()) {
      hint += " This model has no template of a chat.";
    }
  }
  byId("empty").textContent = hint;
}

function showProblem(problem) {
  byId("problem").textContent = problem.message;
  byId("problem").hidden = false;
}

function hideProblem() {
  byId("problem").hidden = true;
}

function settingsAreValid() {
  for (const field of [temperatureField, maxTokensField]) {
    if (!field.checkValidity()) {
      toggleSettings(true);
      field.reportValidity();
      return false;
    }
  }
  return true;
}

function toggleSettings(open) {
  byId("settings").hidden = !open;
  byId("settings-button").setAttribute("aria-expanded", String(open));
}

/** Cut a text into prose and code, which stands between fences. */
function partsOf(text) {
  const parts = [{ tag: "P", lines: [] }];
  for (const line of text.split("\n")) {
    const inCode = parts.at(-1).tag === "PRE";
    if (inCode && /^ {0,3}```\s*$/.test(line)) {
      parts.push({ tag: "P", lines: [] });
    } else if (!inCode && /^ {0,3}```[^`]*$/.test(line)) {
      parts.push({ tag: "PRE", lines: [] });
    } else {
      parts.at(-1).lines.push(line);
    }
  }
  const texts = parts.map(({ tag, lines }) => {
    const text = lines.join("\n");
    return { tag, text: tag === "PRE" ? text : text.replace(/^\n+|\n+$/g, "") };
  });
  return texts.filter(({ tag, text }) => tag === "PRE" || text.trim() !== "");
}

/** Make an element show a text; what stands there already is left alone, selections with it. */
function fillBody(body, text) {
  const parts = partsOf(text);
  parts.forEach((part, index) => {
    let element = body.children[index];
    if (element?.tagName !== part.tag) {
      const fresh = document.createElement(part.tag);
      fresh.append("");
      if (element === undefined) {
        body.append(fresh);
      } else {
        element.replaceWith(fresh);
      }
      element = fresh;
    }
    const node = element.firstChild;
    if (part.text.startsWith(node.data)) {
      node.appendData(part.text.slice(node.data.length));
    } else {
      node.data = part.text;
    }
  });
  while (body.children.length > parts.length) {
    body.lastChild.remove();
  }
}

function newMessageElement() {
  const element = document.createElement("article");
  element.append(document.createElement("h2"), document.createElement("div"));
  element.children[1].className = "body";
  const note = document.createElement("p");
  note.className = "note";
  element.append(note);
  return element;
}

function drawMessage(index) {
  const message = state.messages[index];
  const element = messagesElement.children[index] ?? newMessageElement();
  const [heading, body, note] = element.children;
  const isWaiting = running !== null && message.content === "" && message.role === "assistant";
  element.className = `message ${message.role}`;
  heading.textContent = message.role === "user" ? "You" : "Model";
  fillBody(body, message.content);
  note.textContent = isWaiting ? "…" : message.note;
  note.hidden = note.textContent === "";
  if (element.parentNode === null) {
    messagesElement.append(element);
  }
}

function draw() {
  while (messagesElement.children.length > state.messages.length) {
    messagesElement.lastChild.remove();
  }
  state.messages.forEach((_, index) => drawMessage(index));
  const isRunning = running !== null;
  log.setAttribute("aria-busy", String(isRunning));
  byId("empty").hidden = state.messages.length > 0;
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  byId("regenerate").disabled = isRunning || state.messages.at(-1)?.role !== "assistant";
  follow();
}

/** Show the text that came, at most once per frame. */
function drawLater() {
  if (drawing) {
    return;
  }
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (running !== null) {
      drawMessage(state.messages.length - 1);
      follow();
    }
  });
}

function follow() {
  if (following) {
    log.scrollTop = log.scrollHeight;
  }
}

// --- events -------------------------------------------------------------------------------------

log.addEventListener("scroll", () => {
  // Text that came since the page scrolled to the end does not count as scrolling up.
  if (log.scrollTop < lastScrollTop) {
    following = false;
  }
  if (log.scrollHeight - log.clientHeight - log.scrollTop <= NEAR_END) {
    following = true;
  }
  lastScrollTop = log.scrollTop;
});

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});

textField.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});

keyForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  await loadModels();
  if (keyForm.hidden) {
    textField.focus();
  }
});

byId("stop").addEventListener("click", () => running?.abort());
byId("regenerate").addEventListener("click", regenerate);
byId("new").addEventListener("click", startNew);
byId("settings-button").addEventListener("click", () => toggleSettings(byId("settings").hidden));

byId("settings").addEventListener("input", () => {
  state.system = byId("system").value;
  state.temperature = temperatureField.value;
  state.maxTokens = maxTokensField.value;
  state.plain = plainField.checked && hasTemplate();
  showMode();
});

modelField.addEventListener("change", () => {
  state.model = modelField.value;
  showMode();
});

window.addEventListener("pagehide", save);
document.addEventListener("visibilitychange", save);

restore();
showMode();
draw();
textField.focus();
loadModels();
