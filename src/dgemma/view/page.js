// Plays one recorded run: frames of a canvas. A model's output is inserted as text, never as markup.
(async () => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const content = JSON.parse(byId("content").textContent);
  const { texts, tokens, canvasLen, top, rows } = content;
  const special = new Set(content.special);
  const ACCEPTED = 1, RENOISED = 2, UNDECIDED = 4, FROZEN = 8;
  const LEVELS = 16;
  const isServed = location.protocol.startsWith("http"); // by `dgemma serve --replay`, which has a model
  const clickDoes = isServed ? "rewrites a word" : "removes a word";

  let row = null; // the current row, with its arrays
  let frame = 0;
  let cells = [];
  let held = -1; // the position whose candidates are shown
  let pinned = false;
  let timer = 0; // timer of the next step while playing
  let writing = 0; // timer of the next change of the address
  let healing = false; // a model is writing the holes
  let numHeals = 0; // the seed: another try gives another word
  let key = ""; // the API key, if the server needs one

  function add(parent, tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text) element.textContent = text;
    parent.append(element);
    return element;
  }

  function draw(parent, tag, attributes) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  }

  async function unpack(index) {
    const data = Uint8Array.from(atob(byId(`row-${index}`).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"));
    const buffer = await new Response(stream).arrayBuffer();
    const facts = rows[index];
    const size = facts.block.length * canvasLen;
    let at = 0;
    const take = (Kind, count) => {
      const array = new Kind(buffer, at, count);
      at += array.byteLength;
      return array;
    };
    const Place = content.wide ? Uint32Array : Uint16Array;
    return {
      ...facts,
      index,
      numSteps: facts.block.length,
      lastOf: new Map(facts.block.map((block, i) => [block, i])),
      canvas: take(Place, size),
      draft: take(Place, size),
      top: take(Place, size * top),
      entropies: take(Uint16Array, size),
      confidence: take(Uint16Array, size),
      probability: take(Uint16Array, size * top),
      flags: take(Uint8Array, size),
    };
  }

  // The text of a position. Leading space becomes layout, so that no line begins with it.
  function label(place, position) {
    const text = texts[place];
    const trimmed = text.trim();
    if (trimmed) return trimmed.replaceAll("\n", "⏎").replaceAll("\t", " ");
    if (text.includes("\n")) return "⏎";
    return text === "" || place === row.final[position] ? "" : "·";
  }

  // Every position has the width of its final token, so that nothing moves.
  function layOut() {
    const canvas = byId("canvas");
    canvas.replaceChildren();
    const length = row.final.reduce((sum, place) => sum + texts[place].length, 0);
    canvas.className = content.board ? "board" : length > 1500 ? "many" : length > 400 ? "some" : "";
    cells = [];
    for (let start = 0; start < row.final.length; start += canvasLen) {
      const block = add(canvas, "span", "block");
      let word = null;
      let used = 0;
      for (let position = start; position < start + canvasLen; position++) {
        const text = texts[row.final[position]];
        const trimmed = text.trimStart();
        const spaced = content.ids || (trimmed !== "" && trimmed !== text);
        if (spaced) block.append(" ");
        if (word === null || spaced || used > 28 || content.board) {
          if (!content.board) block.append(document.createElement("wbr")); // on a board it would take a cell of the grid
          word = add(block, "span", "w");
          used = 0;
        }
        const cell = add(word, "span", "t");
        cell.dataset.w = trimmed.trimEnd().replaceAll("\n", "⏎") || (text.includes("\n") ? "⏎" : text);
        cell.dataset.i = position;
        const glyph = document.createTextNode("");
        add(cell, "b").append(glyph);
        cells.push({ cell, glyph, shown: null, look: null });
        used += text.length;
        if (/\s$/.test(text)) word = null;
        for (const _ of text.matchAll(/\n/g)) add(block, "br");
      }
    }
  }

  function level(position, at) {
    const mode = byId("colour").value;
    const block = Math.floor(position / canvasLen);
    const offset = at * canvasLen + (position % canvasLen);
    let heat = 0;
    if (mode === "order") heat = row.settled[position] / Math.max(1, row.step[row.lastOf.get(block)]);
    else if (mode === "none" || frame === row.numSteps || block < row.block[at]) heat = 0;
    else if (row.step[at] < 0) heat = 1;
    else if (mode === "confidence") heat = 1 - row.confidence[offset] / 65535;
    else heat = Math.sqrt(row.entropies[offset] / content.entropyScale / content.maxEntropy);
    return Math.round(Math.min(1, heat) * (LEVELS - 1));
  }

  // The frame in which a position was last predicted: its block may be finished.
  const frameOf = (position) => Math.min(frame, row.lastOf.get(Math.floor(position / canvasLen)));

  function render(animate) {
    const finished = frame === row.numSteps;
    const ordered = byId("colour").value === "order";
    byId("low").textContent = ordered ? "early" : "certain";
    byId("high").textContent = ordered ? "late" : "uncertain";
    const at = Math.min(frame, row.numSteps - 1);
    const block = row.block[at];
    const source = byId("show").value === "canvas" ? row.canvas : row.draft;
    byId("canvas").childNodes.forEach((node, i) => { node.hidden = i > block; });
    cells.forEach((entry, position) => {
      const of = Math.floor(position / canvasLen);
      if (of > block) return;
      const committed = finished || of < block;
      const offset = at * canvasLen + (position % canvasLen);
      const place = committed ? row.final[position] : source[offset];
      const flags = committed ? row.flags[row.lastOf.get(of) * canvasLen + (position % canvasLen)] & FROZEN : row.flags[offset];
      const dropped = committed && position % canvasLen >= row.kept[of];
      let look = `t h${level(position, at)}`;
      if (flags & FROZEN) look += " frozen";
      else if (flags & ACCEPTED) look += " accepted";
      else if (flags & RENOISED) look += " renoised";
      if (flags & UNDECIDED) look += " undecided";
      if (dropped) look += " dropped";
      if (committed && row.healed.has(position)) look += " healed";
      if (committed && row.holes.has(position)) look += healing ? " hole healing" : " hole";
      if (special.has(tokens[place])) look += " special";
      if (texts[place].includes("\n")) look += " break";
      if (position === held) look += " held";
      const arrives = animate && (flags & ACCEPTED) && entry.look && entry.look.includes("undecided");
      if (entry.look !== look) {
        entry.cell.className = arrives ? look + " fresh" : look;
        entry.look = look;
      }
      if (entry.shown !== place) {
        entry.glyph.data = label(place, position);
        entry.shown = place;
      }
      if (look.includes(" hole")) entry.glyph.data = entry.shown = "";
    });
    describe(finished, at);
    if (held >= 0) inspect(held);
  }

  function totals() {
    const kept = row.kept.reduce((sum, count) => sum + count, 0);
    const forwards = row.step.filter((step) => step >= 0).length;
    return `${kept} tokens in ${forwards} forwards, ${(kept / forwards).toFixed(1)} tokens per forward`;
  }

  function describe(finished, at) {
    const blocks = row.block[row.numSteps - 1] + 1;
    const inBlock = blocks > 1 ? `Block ${row.block[at] + 1} of ${blocks}, ` : "";
    let place = `${inBlock}step ${row.step[at] + 1} of ${row.step[row.lastOf.get(row.block[at])] + 1}`;
    let facts = [`mean entropy ${row.entropy[at].toFixed(3)} nats`, `${row.accepted[at]} accepted`,
      `${row.renoised[at]} renoised`, `temperature ${row.temperature[at]}`];
    if (finished) {
      place = content.board ? "Filled" : "Written";
      facts = content.board ? [] : [`a click ${clickDoes}`];
    } else if (row.step[at] < 0) {
      place = inBlock + (inBlock ? "noise" : "Noise");
      facts = [`${canvasLen} positions, nothing predicted yet`];
      if (frame === 0 && !content.board) facts.push(`at the end, a click ${clickDoes}`);
    }
    place = place[0].toUpperCase() + place.slice(1);
    byId("place").textContent = place;
    byId("start").hidden = frame > 0 || timer > 0;
    byId("facts").textContent = facts.join(" · ");
    const scrub = byId("scrub");
    scrub.max = row.numSteps;
    scrub.value = frame;
    scrub.setAttribute("aria-valuetext", place);
    const svg = byId("strip").firstElementChild;
    svg.querySelector(".head").setAttribute("x", frame);
    svg.querySelectorAll(".bar").forEach((bar, i) => bar.classList.toggle("past", i <= frame));
  }

  function drawStrip() {
    const svg = byId("strip").firstElementChild;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${row.numSteps + 1} 1`);
    draw(svg, "rect", { class: "head", x: 0, y: 0, width: 1, height: 1, rx: 0.1 });
    const most = Math.max(1, ...row.accepted);
    row.accepted.forEach((count, i) => {
      const height = (0.94 * count) / most;
      draw(svg, "rect", { class: "bar", x: i + 0.15, y: 1 - height, width: 0.7, height });
      if (i && row.block[i] !== row.block[i - 1]) draw(svg, "line", { class: "edge", x1: i, x2: i, y1: 0, y2: 1 });
    });
    const highest = Math.max(1e-6, ...row.entropy);
    let path = "";
    row.entropy.forEach((value, i) => {
      if (row.step[i] < 0) return;
      path += `${row.step[i] === 0 ? "M" : "L"}${i + 0.5} ${1 - (0.94 * value) / highest}`;
    });
    draw(svg, "path", { class: "entropy", d: path });
    byId("bars").textContent = `accepted, up to ${most} per step`;
    byId("curve").textContent = `mean entropy, up to ${highest.toFixed(2)} nats`;
  }

  // A position's candidates at this step, and its confidence over all steps.
  function inspect(position) {
    const tip = byId("tip");
    const at = frameOf(position);
    const block = Math.floor(position / canvasLen);
    if (block > row.block[Math.min(frame, row.numSteps - 1)]) return release();
    const offset = at * canvasLen + (position % canvasLen);
    const committed = frame === row.numSteps || block < row.block[Math.min(frame, row.numSteps - 1)];
    const place = committed ? row.final[position] : (byId("show").value === "canvas" ? row.canvas : row.draft)[offset];
    const flags = row.flags[offset];
    const quoted = (p) => texts[p].replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(part of the previous character)";
    tip.replaceChildren();
    add(tip, "div", "token", quoted(place));
    const healed = committed && row.healed.has(position);
    const state = healed ? "written again" : flags & FROZEN ? "frozen" : committed ? (position % canvasLen < row.kept[block] ? "committed" : "dropped, after the end")
      : flags & ACCEPTED ? "accepted" : flags & RENOISED ? "renoised" : flags & UNDECIDED ? "undecided" : "kept";
    add(tip, "div", "soft", `position ${position} · id ${tokens[place]} · ${state}`);
    if (row.step[at] >= 0 && !healed) {
      add(tip, "div", "", `confidence ${(row.confidence[offset] / 65535).toFixed(3)} · entropy ${(row.entropies[offset] / content.entropyScale).toFixed(3)} nats`);
      const span = row.block.map((b, i) => [b, i]).filter(([b, i]) => b === block && row.step[i] >= 0).map(([, i]) => i);
      const chart = draw(tip, "svg", { viewBox: `0 0 ${Math.max(1, span.length - 1)} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
      draw(chart, "line", { x1: span.indexOf(at), x2: span.indexOf(at), y1: 0, y2: 1 });
      draw(chart, "path", { d: span.map((i, x) => `${x ? "L" : "M"}${x} ${1 - row.confidence[i * canvasLen + (position % canvasLen)] / 65535}`).join("") });
      add(tip, "div", "caption", "confidence, step by step, from 0 to 1");
      const list = add(tip, "ol");
      for (let k = 0; k < top; k++) {
        const chance = row.probability[offset * top + k] / 65535;
        const item = add(list, "li");
        add(item, "span", "much").style.width = `${100 * chance}%`;
        add(item, "span", "token", quoted(row.top[offset * top + k]));
        add(item, "span", "chance", chance >= 0.0005 ? `${(100 * chance).toFixed(1)} %` : "< 0.1 %");
      }
    }
    tip.hidden = false;
    const box = cells[position].cell.getBoundingClientRect();
    const roof = byId("deck").getBoundingClientRect().top;
    const below = box.bottom + 10;
    const narrow = innerWidth <= 640;
    tip.style.bottom = narrow ? `${innerHeight - roof + 8}px` : "auto";
    tip.style.left = `${Math.max(10, Math.min(box.left, innerWidth - tip.offsetWidth - 10))}px`;
    tip.style.top = `${below + tip.offsetHeight < roof ? below : Math.max(10, box.top - tip.offsetHeight - 10)}px`;
  }

  function hold(position) {
    if (held === position) return;
    if (held >= 0) cells[held].cell.classList.remove("held");
    held = position;
    cells[held].cell.classList.add("held");
    inspect(held);
  }

  // The positions of the word at a position. A piece that starts with a letter and no space continues a word.
  function wordAt(position) {
    const piece = (i) => texts[row.final[i]] ?? "";
    const continues = (i) => !content.ids && /^[\p{L}\p{N}'’]/u.test(piece(i)) && /[\p{L}\p{N}'’]$/u.test(piece(i - 1));
    let [start, stop] = [position, position + 1];
    while (continues(start)) start--;
    while (continues(stop)) stop++;
    return Array.from({ length: stop - start }, (_, i) => start + i).filter(isKept);
  }

  const isKept = (position) => position % canvasLen < row.kept[Math.floor(position / canvasLen)];

  function note(text) {
    byId("note").textContent = text;
    byId("note").hidden = !text;
  }

  // Remove a word, or put it back. A server that shows this page has a model, which writes the hole again.
  async function unwrite(position) {
    const word = wordAt(position);
    if (healing || !word.length || word.some((i) => special.has(tokens[row.final[i]]))) return;
    release();
    note("");
    if (row.holes.has(position)) {
      word.forEach((i) => row.holes.delete(i));
      return render(false);
    }
    word.forEach((i) => row.holes.add(i));
    healing = true;
    render(false);
    try {
      await heal();
    } catch (error) {
      note(error.message);
    }
    healing = false;
    render(false);
  }

  function post(path, body) {
    const headers = { "Content-Type": "application/json" };
    // A header may hold only characters up to 255, so the key's UTF-8 bytes are sent as such characters.
    if (key) headers.Authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
    return fetch(path, { method: "POST", headers, body }).catch(() => null);
  }

  async function heal() {
    const missing = "No model is connected, so the hole stays open; click it to put the word back. To let a model fill " +
      "holes, run `dgemma serve --replay FILE` with this file, or use `dgemma.serve.replay.ReplayPage` in a notebook.";
    if (!isServed) throw new Error(missing);
    const from = row;
    const positions = row.final.map((_, i) => i).filter(isKept);
    const prefix = row.context.length;
    const holes = positions.flatMap((i, at) => (row.holes.has(i) ? [[prefix + at, prefix + at + 1]] : []));
    const body = JSON.stringify({ tokens: [...row.context, ...positions.map((i) => tokens[row.final[i]])], holes, seed: numHeals++ });
    let response = await post("v1/infill", body);
    if (response?.status === 401) {
      key = prompt("This server needs an API key.") ?? "";
      if (key) response = await post("v1/infill", body);
    }
    const answer = await response?.json().catch(() => null);
    if (!response?.ok || !answer?.pieces) throw new Error(answer?.error?.message ?? missing);
    positions.forEach((i, at) => {
      if (!from.holes.has(i)) return;
      from.final[i] = tokens.push(answer.tokens[prefix + at]) - 1;
      texts.push(answer.pieces[prefix + at]);
      from.healed.add(i);
    });
    from.holes.clear();
    if (row === from) layOut();
  }

  function release() {
    if (held >= 0) cells[held].cell.classList.remove("held");
    held = -1;
    pinned = false;
    byId("tip").hidden = true;
  }

  function go(to, animate = false) {
    frame = Math.max(0, Math.min(row.numSteps, to));
    render(animate);
    remember();
  }

  // The address names the frame, so that it can be shared. Browsers limit how often it may change; a page inside a frame has no visible address.
  function remember() {
    clearTimeout(writing);
    if (window === window.top) writing = setTimeout(writeAddress, 300);
  }

  function writeAddress() {
    const parts = [`step=${frame}`];
    if (rows.length > 1) parts.push(`row=${row.name}`);
    history.replaceState(null, "", `#${parts.join("&")}`);
  }

  function pause() {
    clearTimeout(timer);
    timer = 0;
    byId("play").textContent = "Play";
    byId("play").setAttribute("aria-label", "Play");
  }

  function play() {
    if (frame === row.numSteps) go(0);
    byId("start").hidden = true;
    byId("play").textContent = "Pause";
    byId("play").setAttribute("aria-label", "Pause");
    const perSecond = Math.max(2, Math.min(10, row.numSteps / 8)); // at 1×, a run takes about eight seconds
    const tick = () => {
      go(frame + 1, true);
      if (frame === row.numSteps) pause();
      else timer = setTimeout(tick, 1000 / perSecond / Number(byId("speed").value));
    };
    timer = setTimeout(tick, 150);
  }

  const stepTo = (to) => { pause(); go(to); };

  async function choose(index, at = 0) {
    pause();
    release();
    row = await unpack(index);
    byId("row").value = index;
    byId("prompt").textContent = row.prompt;
    byId("prompt").hidden = !row.prompt;
    byId("total").textContent = totals();
    byId("note").hidden = true;
    byId("frozen").hidden = !row.flags.some((flags) => flags & FROZEN);
    layOut();
    drawStrip();
    go(at);
  }

  // The nearest position one line up or down.
  function vertical(position, direction) {
    const here = cells[position].cell.getBoundingClientRect();
    let best = position;
    let distance = Infinity;
    for (let i = position + direction; cells[i] && !cells[i].cell.closest(".block").hidden; i += direction) {
      const box = cells[i].cell.getBoundingClientRect();
      const lines = Math.round((direction * (box.top - here.top)) / 12);
      if (lines <= 0) continue;
      const far = lines * 1e4 + Math.abs(box.left - here.left);
      if (far < distance) [best, distance] = [i, far];
      else if (lines * 1e4 > distance) break;
    }
    return best;
  }

  function moveHeld(key) {
    if (held < 0) return hold(0);
    const visible = (row.block[Math.min(frame, row.numSteps - 1)] + 1) * canvasLen;
    const next = { ArrowLeft: held - 1, ArrowRight: held + 1, ArrowUp: () => vertical(held, -1), ArrowDown: () => vertical(held, 1) }[key];
    const to = typeof next === "function" ? next() : next;
    hold(Math.max(0, Math.min(visible - 1, to)));
    cells[held].cell.scrollIntoView({ block: "nearest" });
  }

  function cycle(id) {
    const select = byId(id);
    select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
    render(false);
  }

  function toggleTheme() {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const on = event.target;
    const { key } = event;
    if (on.tagName === "SELECT" || (on.tagName === "BUTTON" && (key === " " || key === "Enter"))) return;
    if (on.id === "canvas" && key.startsWith("Arrow")) moveHeld(key);
    else if (on.id === "canvas" && key === "Enter" && held >= 0) pinned = !pinned;
    else if ((key === "Delete" || key === "Backspace") && held >= 0 && canUnwrite()) unwrite(held);
    else if (key === " ") timer ? pause() : play();
    else if (key === "ArrowLeft") stepTo(frame - 1);
    else if (key === "ArrowRight") stepTo(frame + 1);
    else if (key === "Home") stepTo(0);
    else if (key === "End") stepTo(row.numSteps);
    else if (key === "ArrowUp" && rows.length > 1) choose((row.index + rows.length - 1) % rows.length, frame);
    else if (key === "ArrowDown" && rows.length > 1) choose((row.index + 1) % rows.length, frame);
    else if (key === "Escape") release();
    else if (key === "c") cycle("colour");
    else if (key === "d") cycle("show");
    else if (key === "t") toggleTheme();
    else return;
    event.preventDefault();
  });

  byId("play").addEventListener("click", () => (timer ? pause() : play()));
  byId("start").addEventListener("click", play);
  byId("first").addEventListener("click", () => stepTo(0));
  byId("back").addEventListener("click", () => stepTo(frame - 1));
  byId("forward").addEventListener("click", () => stepTo(frame + 1));
  byId("last").addEventListener("click", () => stepTo(row.numSteps));
  byId("scrub").addEventListener("input", (event) => stepTo(Number(event.target.value)));
  byId("theme").addEventListener("click", toggleTheme);
  for (const id of ["show", "colour"]) byId(id).addEventListener("change", () => render(false));
  byId("row").addEventListener("change", (event) => choose(Number(event.target.value), frame));

  const strip = byId("strip").firstElementChild;
  const scrubTo = (event) => {
    const box = strip.getBoundingClientRect();
    stepTo(Math.floor(((event.clientX - box.left) / box.width) * (row.numSteps + 1)));
  };
  strip.addEventListener("pointerdown", (event) => { strip.setPointerCapture(event.pointerId); scrubTo(event); });
  strip.addEventListener("pointermove", (event) => { if (event.buttons) scrubTo(event); });

  const canUnwrite = () => frame === row.numSteps && !content.board;
  const positionOf = (event) => {
    const cell = event.target.closest?.("#canvas .t");
    return cell ? Number(cell.dataset.i) : -1;
  };
  byId("canvas").addEventListener("pointerover", (event) => {
    if (pinned) return;
    const position = positionOf(event);
    if (position >= 0) hold(position);
  });
  byId("canvas").addEventListener("pointerleave", () => { if (!pinned) release(); });
  byId("canvas").addEventListener("blur", () => { if (!pinned) release(); });
  byId("canvas").addEventListener("click", (event) => {
    const position = positionOf(event);
    if (position >= 0 && canUnwrite()) return unwrite(position);
    if (position < 0 || (pinned && position === held)) return release();
    hold(position);
    pinned = true;
  });

  byId("about").textContent = content.about;
  for (let i = 0; i < LEVELS; i++) add(byId("ramp"), "span", `h${i}`);
  rows.forEach((facts, i) => {
    const { name, prompt } = facts;
    facts.holes = new Set(); // positions of removed words
    facts.healed = new Set(); // positions that a model has written again
    const words = prompt.length > 32 ? `${prompt.slice(0, 31).trimEnd()}…` : prompt;
    add(byId("row"), "option", "", words ? `${name}: ${words}` : `${name}`).value = i;
  });
  byId("pick").hidden = rows.length < 2;

  async function readAddress() {
    const address = new URLSearchParams(location.hash.slice(1));
    const index = rows.findIndex((facts) => String(facts.name) === address.get("row"));
    const at = Math.trunc(Number(address.get("step"))) || 0;  // frames are whole numbers
    if (row === null || (index >= 0 && index !== row.index)) await choose(Math.max(0, index), at);
    else go(at);
  }
  addEventListener("hashchange", readAddress);
  await readAddress();
  document.body.dataset.ready = "yes";
})();
