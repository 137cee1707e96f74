// Chat with the server of this page, and show the canvas while it settles. Model output is inserted only as text.
"use strict";

const byId = (id) => document.getElementById(id);
const model = document.body.dataset.model;
const longestSide = 1600; // of a picture that is sent; the model sees fewer pixels
let messages = [];
let running = null;
let picture = null; // the next message's, as a data URL

function add(kind, text) {
  const turn = document.createElement("p");
  turn.className = "turn " + kind;
  turn.textContent = text;
  byId("log").append(turn);
  scroll();
  return turn;
}

function scroll() {
  byId("log").scrollTop = byId("log").scrollHeight;
}

// Pieces that differ from the last draft are coloured; a piece that stays is plain.
function showDraft(canvas, pieces, last) {
  canvas.replaceChildren(...pieces.map((piece, at) => {
    const span = document.createElement("span");
    span.className = last.length && last[at] === piece ? "kept" : "new";
    span.textContent = piece.replaceAll("\n", "⏎");
    return span;
  }));
  scroll();
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function settings() {
  const options = { max_tokens: Number(byId("tokens").value) || 128 };
  for (const name of ["steps", "temperature", "seed"]) {
    if (byId(name).value !== "") options[name] = Number(byId(name).value);
  }
  const form = byId("schema").value.trim();
  if (form) options.response_format = { type: "json_schema", json_schema: { name: "answer", schema: readSchema(form) } };
  return options;
}

// A JSON schema, or the names of fields that are texts.
function readSchema(form) {
  if (form.startsWith("{")) return JSON.parse(form);
  const names = form.split(",").map((name) => name.trim()).filter(Boolean);
  const properties = Object.fromEntries(names.map((name) => [name, { type: "string", maxLength: 60 }]));
  return { type: "object", properties, required: names, additionalProperties: false };
}

function showPicture(url) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = "attached";
  return image;
}

// A photo is sent upright and no larger than needed, because every later turn of the chat sends it again.
async function attach(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, longestSide / Math.max(bitmap.width, bitmap.height));
  const drawn = document.createElement("canvas");
  drawn.width = Math.max(1, Math.round(bitmap.width * scale));
  drawn.height = Math.max(1, Math.round(bitmap.height * scale));
  drawn.getContext("2d").drawImage(bitmap, 0, 0, drawn.width, drawn.height);
  picture = drawn.toDataURL(scale < 1 ? "image/jpeg" : "image/png");
  byId("attached").replaceChildren(showPicture(picture));
}

function detach() {
  picture = null;
  byId("image").value = "";
  byId("attached").replaceChildren("Image");
}

async function send(text) {
  const parts = [{ type: "image_url", image_url: { url: picture } }, { type: "text", text }];
  messages.push({ role: "user", content: picture ? parts : text });
  add("user", text);
  const turn = add("assistant", "");
  const answer = document.createElement("span");
  const written = document.createTextNode("");
  const canvas = document.createElement("span");
  canvas.className = "canvas";
  answer.append(written, canvas);
  if (picture) {
    turn.classList.add("seen");
    turn.append(showPicture(picture));
  }
  turn.append(answer);
  detach();
  const headers = { "Content-Type": "application/json" };
  // A header may hold only characters up to 255, so the key's UTF-8 bytes are sent as such characters.
  const key = String.fromCharCode(...new TextEncoder().encode(byId("key").value));
  if (key) headers.Authorization = "Bearer " + key;
  running = new AbortController();
  byId("stop").hidden = false;
  byId("send").hidden = true;
  let last = [];
  let block = -1;
  try {
    const body = JSON.stringify({ model, messages, stream: true, drafts: true, ...settings() });
    const response = await fetch("v1/chat/completions", { method: "POST", headers, body, signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of readEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      const extra = event.dgemma || {};
      if (extra.draft) {
        if (extra.draft.block !== block) { last = []; block = extra.draft.block; }
        showDraft(canvas, extra.draft.pieces, last);
        last = extra.draft.pieces;
        continue;
      }
      const choice = event.choices[0];
      if (choice && choice.delta.content) { written.data = (written.data + choice.delta.content).trimStart(); canvas.replaceChildren(); scroll(); }
      if (extra.steps) {
        const counts = add("counts", `${extra.steps.reduce((a, b) => a + b, 0)} forwards, ` +
          `${extra.tokens_per_forward.toFixed(1)} tokens per forward, seed ${extra.seed}`);
        counts.className = "counts";
      }
    }
    messages.push({ role: "assistant", content: written.data });
  } catch (error) {
    messages.pop();
    if (error.name !== "AbortError") add("error", error.message);
  } finally {
    canvas.remove();
    running = null;
    byId("stop").hidden = true;
    byId("send").hidden = false;
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("input").value;
  if (running || !text.trim()) return;
  byId("input").value = "";
  send(text);
});
byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); byId("form").requestSubmit(); }
});
byId("image").addEventListener("change", () => {
  const [file] = byId("image").files;
  if (file) attach(file).catch(() => { detach(); add("error", "The browser cannot read this picture."); });
});
byId("stop").addEventListener("click", () => running && running.abort());
byId("clear").addEventListener("click", () => { messages = []; detach(); byId("log").replaceChildren(); });
