"use strict";
// The page is whole without this: the script adds the timeline, sorting, filters and the choice of light or dark.
(() => {
  const $ = (id) => document.getElementById(id);
  const DATA = JSON.parse($("data").textContent);
  const ROLES = DATA.roles, CAUSES = DATA.causes;
  const AXIS = 24, HEAD = 22, CAUSE = 22, LANE = 19, GAP = 2, LEAST_WIDTH = 1.5, SPAN_LEAST_US = 0.02;

  // --- times ---
  const four = (number) => String(Number(number.toPrecision(4)));
  function formatUs(us) {
    const size = Math.abs(us);
    return size >= 999950 ? four(us / 1e6) + " s" : size >= 999.95 ? four(us / 1e3) + " ms" : four(us) + " us";
  }

  // --- lanes: typed arrays, once ---
  function unpack(columns) {
    const n = columns.t.length, start = new Float64Array(n), end = new Float64Array(n), latest = new Float64Array(n);
    let at = 0, most = -Infinity;
    for (let i = 0; i < n; i++) {
      at += columns.t[i];
      start[i] = at / 1000;
      end[i] = (at + columns.d[i]) / 1000;
      latest[i] = most = Math.max(most, end[i]);
    }
    return { n, start, end, latest };
  }
  const rows = [];
  let height = 0, firstUs = 0, lastUs = 1;
  const addRow = (row, size) => { row.y = height; row.h = size; height += size + GAP; rows.push(row); return row; };
  for (const rank of DATA.ranks) {
    addRow({ kind: "head", rank, text: rank.title }, HEAD);
    const causes = addRow({ kind: "cause", rank, text: "exposed", ...unpack(rank.exposed) }, CAUSE);
    causes.paint = Uint8Array.from(rank.exposed.c, Number);
    rank.row = causes;
    for (const lane of rank.lanes) {
      const row = addRow({ kind: "lane", rank, text: "stream " + lane.s, names: lane.n, ...unpack(lane) }, LANE);
      row.paint = Uint8Array.from(lane.r, Number);
    }
    lastUs = Math.max(lastUs, rank.duration);
  }
  for (const row of rows) {
    if (!row.n) continue;
    firstUs = Math.min(firstUs, row.start[0]);
    lastUs = Math.max(lastUs, row.latest[row.n - 1]);
  }
  height += 4;

  const view = $("view"), canvas = $("canvas"), tip = $("tip"), frame = $("frame"), details = $("details");
  const pen = canvas.getContext("2d", { alpha: false });
  let width = 0, shownHeight = 0, gutter = 84, colors = {}, from = firstUs, to = lastUs, selected = null, hovered = null, asked = false;

  function readColors() {
    const style = getComputedStyle(document.documentElement), read = (name) => style.getPropertyValue(name).trim();
    colors = { panel: read("--panel"), text: read("--text"), muted: read("--muted"), line: read("--line"), shade: read("--shade"),
      lane: ROLES.map((_, i) => read("--role-" + i)), cause: CAUSES.map((_, i) => read("--cause-" + i)) };
    [colors.laneWords, colors.causeWords] = [colors.lane, colors.cause].map((list) => list.map(wordOf));
    [colors.laneText, colors.causeText] = [colors.lane, colors.cause].map((list) => list.map((color) => brightness(color) > 0.18 ? "#10161d" : "#ffffff"));
  }
  const wordOf = (color) => parseInt(color.slice(5, 7) + color.slice(3, 5) + color.slice(1, 3), 16); // the bytes red, green, blue
  function brightness(color) {
    const part = (i) => (parseInt(color.slice(i, i + 2), 16) / 255) ** 2.2;
    return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
  }
  function redraw() {
    if (!asked) { asked = true; requestAnimationFrame(() => { asked = false; draw(); }); }
  }
  function resize() {
    width = view.clientWidth;
    gutter = width < 560 ? 62 : 84;
    $("space").style.height = AXIS + height + "px";
    shownHeight = Math.min(AXIS + height, view.clientHeight || AXIS + height);
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(shownHeight * scale);
    canvas.style.height = shownHeight + "px";
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.imageSmoothingEnabled = false;
    strip.width = Math.max(1, width - gutter);
    strip.height = 1;
    line = stripPen.createImageData(strip.width, 1);
    pixels = new Uint32Array(line.data.buffer);
    draw();
  }
  const perUs = () => (width - gutter) / (to - from);
  const xOf = (us) => gutter + (us - from) * perUs();
  const usOf = (x) => from + (x - gutter) / perUs();
  const topOf = (row) => AXIS + row.y - view.scrollTop;

  function setSpan(start, end) {
    const whole = lastUs - firstUs, span = Math.min(whole, Math.max(SPAN_LEAST_US, end - start));
    const middle = (start + end) / 2;
    from = Math.max(firstUs, Math.min(lastUs - span, middle - span / 2));
    to = from + span;
    redraw();
  }
  const pan = (us) => { const span = to - from; from = Math.max(firstUs, Math.min(lastUs - span, from + us)); to = from + span; redraw(); };
  const zoom = (factor, at = (from + to) / 2) => {
    const span = Math.min(lastUs - firstUs, Math.max(SPAN_LEAST_US, (to - from) / factor)), share = (at - from) / (to - from);
    from = Math.max(firstUs, Math.min(lastUs - span, at - share * span)); to = from + span; redraw();
  };
  function firstAfter(sorted, us) { // the first place whose value is above
    let low = 0, high = sorted.length;
    while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] > us) high = middle; else low = middle + 1; }
    return low;
  }

  // --- drawing: only what is visible; what is narrower than a pixel becomes one shaded pixel of the role that fills most of it.
  // These pixels are written into a strip of one line, drawn at once: tens of thousands of rectangles would be too slow. ---
  const strip = document.createElement("canvas"), stripPen = strip.getContext("2d");
  let line = null, pixels = null;
  function drawRow(row, top) {
    const palette = row.kind === "cause" ? colors.cause : colors.lane, words = row.kind === "cause" ? colors.causeWords : colors.laneWords;
    const kinds = palette.length, batches = palette.map(() => []), labels = [], filled = new Float64Array(kinds);
    const { start, end, paint } = row, scale = perUs(), size = line.width;
    let pixel = -1, sum = 0, isStrip = false;
    pixels.fill(0);
    const flush = () => {
      if (sum <= 0) return;
      let best = 0;
      for (let k = 1; k < kinds; k++) if (filled[k] > filled[best]) best = k;
      if (pixel >= 0 && pixel < size) { pixels[pixel] = words[best] | (Math.round(255 * Math.min(1, 0.3 + 0.7 * sum)) << 24); isStrip = true; }
      filled.fill(0); sum = 0;
    };
    for (let i = firstAfter(row.latest, from); i < row.n && start[i] < to; i++) {
      if (end[i] < from) continue;
      const x0 = Math.max(-2, (start[i] - from) * scale), x1 = Math.min(size + 2, (end[i] - from) * scale), long = x1 - x0;
      if (long >= LEAST_WIDTH) {
        flush();
        batches[paint[i]].push(gutter + x0, long > 4 ? long - 0.7 : long);
        if (long > 30) labels.push(i, gutter + x0, gutter + x1);
      } else {
        const place = Math.floor(x0), part = Math.max(0.05, long);
        if (place !== pixel) { flush(); pixel = place; }
        filled[paint[i]] += part; sum += part;
      }
    }
    flush();
    if (isStrip) { stripPen.putImageData(line, 0, 0); pen.drawImage(strip, 0, 0, size, 1, gutter, top, size, row.h); }
    batches.forEach((batch, place) => {
      pen.fillStyle = palette[place];
      for (let j = 0; j < batch.length; j += 2) pen.fillRect(batch[j], top, batch[j + 1], row.h);
    });
    for (let j = 0; j < labels.length; j += 3) label(row, labels[j], labels[j + 1], labels[j + 2], top);
  }
  function label(row, i, x0, x1, top) {
    const fits = Math.floor((x1 - Math.max(x0, gutter) - 8) / 6.2);
    if (fits < 3) return;
    const text = row.kind === "cause" ? CAUSES[row.paint[i]][0] : nameOf(row, i).replace(/^void (at::native::)?/, "");
    pen.fillStyle = (row.kind === "cause" ? colors.causeText : colors.laneText)[row.paint[i]];
    pen.fillText(text.length > fits ? text.slice(0, fits - 1) + "\u2026" : text, Math.max(x0, gutter) + 4, top + row.h / 2 + 0.5);
  }
  const nameOf = (row, i) => DATA.names[row.names[i]];

  function draw() {
    if (!width) return;
    pen.fillStyle = colors.panel;
    pen.fillRect(0, 0, width, shownHeight);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    const ticks = tickTimes();
    pen.fillStyle = colors.line;
    for (const us of ticks) pen.fillRect(Math.round(xOf(us)), 0, 1, shownHeight);
    for (const row of rows) {
      const top = topOf(row);
      if (top + row.h < AXIS || top > shownHeight) continue;
      if (row.kind !== "head") drawRow(row, top);
    }
    mark(hovered, 1.5);
    mark(selected, 2.5);
    for (const row of rows) {
      const top = topOf(row);
      if (top + row.h < AXIS || top > shownHeight) continue;
      if (row.kind === "head") {
        pen.fillStyle = colors.shade; pen.fillRect(0, top, width, row.h);
        pen.fillStyle = colors.text; pen.font = "bold 12px system-ui, sans-serif";
        pen.fillText(row.text, 6, top + row.h / 2 + 0.5); pen.font = "11px system-ui, sans-serif";
      } else {
        pen.fillStyle = colors.panel; pen.fillRect(0, top - GAP, gutter - 2, row.h + 2 * GAP);
        pen.fillStyle = row.kind === "cause" ? colors.text : colors.muted;
        pen.fillText(row.text, 6, top + row.h / 2 + 0.5);
      }
    }
    drawAxis(ticks);
  }
  function mark(target, thick) {
    if (!target) return;
    const { row, i } = target, x0 = Math.max(gutter, xOf(row.start[i])), x1 = Math.min(width, xOf(row.end[i])), top = topOf(row);
    if (x1 < gutter || x0 > width) return;
    pen.strokeStyle = colors.text; pen.lineWidth = thick;
    pen.strokeRect(x0 - 1, top - 1, Math.max(3, x1 - x0 + 2), row.h + 2);
  }
  function tickTimes() {
    const least = (to - from) / Math.max(2, Math.floor((width - gutter) / 110)), unit = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= least), times = [];
    for (let n = Math.ceil(from / step); n * step <= to; n++) times.push(n * step);
    return times;
  }
  function drawAxis(ticks) {
    pen.fillStyle = colors.panel; pen.fillRect(0, 0, width, AXIS);
    pen.fillStyle = colors.line; pen.fillRect(0, AXIS - 1, width, 1);
    pen.fillStyle = colors.muted;
    let free = gutter;
    for (const us of ticks) {
      const x = Math.round(xOf(us)), text = formatTick(us), room = pen.measureText(text).width;
      if (x < free || x + room + 4 > width) continue;
      pen.fillText(text, x + 3, AXIS / 2); pen.fillRect(x, AXIS - 7, 1, 6);
      free = x + room + 12;
    }
  }
  function formatTick(us) { // as many digits as tell neighbours apart
    const span = to - from, whole = Math.max(Math.abs(from), Math.abs(to));
    const unit = whole >= 1e6 ? ["s", 1e6] : whole >= 1e3 ? ["ms", 1e3] : ["us", 1];
    const digits = Math.max(0, Math.min(9, Math.ceil(Math.log10(unit[1] / span)) + 1));
    return (us / unit[1]).toFixed(digits) + " " + unit[0];
  }

  // --- what is under a point, and what is said of it ---
  function find(x, y) {
    if (x < gutter || y < AXIS) return null;
    const row = rows.find((each) => each.kind !== "head" && y >= topOf(each) && y <= topOf(each) + each.h);
    if (!row) return null;
    const us = usOf(x), slack = 3 / perUs();
    let best = -1, distance = slack;
    for (let i = firstAfter(row.latest, us - slack); i < row.n && row.start[i] <= us + slack; i++) {
      const off = Math.max(0, row.start[i] - us, us - row.end[i]);
      if (off < distance || (off === 0 && best >= 0)) { best = i; distance = off; }
    }
    return best < 0 ? null : { row, i: best };
  }
  function describe({ row, i }) {
    const times = [["from", formatUs(row.start[i])], ["for", formatUs(row.end[i] - row.start[i])]], where = row.rank.title;
    if (row.kind === "lane") {
      return { title: nameOf(row, i), facts: [["is", ROLES[row.paint[i]]], ["on", where + ", " + row.text], ...times] };
    }
    const exposed = row.rank.exposed, [name, meaning] = CAUSES[row.paint[i]], facts = [["cause", name + ": " + meaning], ["on", where], ...times];
    if (exposed.k[i] >= 0) facts.push(["collective", DATA.names[exposed.k[i]]]);
    if (exposed.o[i] >= 0) facts.push(["waited for", "rank " + exposed.o[i]]);
    if (exposed.e[i] >= 0) facts.push(["evidence", DATA.evidence[exposed.e[i]]]);
    return { title: "Exposed: " + name, facts };
  }
  const element = (kind, text, parent) => { const made = document.createElement(kind); made.textContent = text; parent.append(made); return made; };
  function select(target) {
    selected = target;
    details.replaceChildren();
    if (target) {
      const { title, facts } = describe(target);
      element("h3", title, details);
      const list = element("dl", "", details);
      for (const [name, fact] of facts) { element("dt", name, list); element("dd", fact, list); }
    }
    redraw();
  }
  function show(target) { // select it and bring it into view
    const { row, i } = target, length = row.end[i] - row.start[i];
    const span = Math.min(to - from, Math.max(length * 12, (lastUs - firstUs) / 200));
    if (row.start[i] < from || row.end[i] > to || length < span / 200 || span < to - from) setSpan((row.start[i] + row.end[i]) / 2 - span / 2, (row.start[i] + row.end[i]) / 2 + span / 2);
    const top = AXIS + row.y;
    if (top - view.scrollTop < AXIS || top + row.h > view.scrollTop + shownHeight) view.scrollTop = Math.max(0, top - shownHeight / 2);
    select(target);
  }
  function stepExposed(direction) {
    const all = DATA.ranks.flatMap((rank) => Array.from({ length: rank.row.n }, (_, i) => ({ row: rank.row, i })));
    if (!all.length) return;
    const row = selected && selected.row.rank.row, us = selected ? selected.row.start[selected.i] : -Infinity;
    let place = selected && selected.row === row ? all.findIndex((each) => each.row === row && each.i === selected.i) + direction
      : selected ? all.findIndex((each) => each.row === row && each.row.start[each.i] >= us) + (direction < 0 ? -1 : 0) : direction > 0 ? 0 : -1;
    show(all.at(((place % all.length) + all.length) % all.length));
  }
  function stepOperation(direction) {
    const row = selected ? selected.row : rows.find((each) => each.n);
    if (!row) return;
    const i = selected ? selected.i + direction : Math.min(row.n - 1, firstAfter(row.latest, from));
    if (i >= 0 && i < row.n) show({ row, i });
  }
  function stepLane(direction) {
    const lanes = rows.filter((each) => each.n), now = selected ? lanes.indexOf(selected.row) + direction : 0, row = lanes[now];
    if (!row) return;
    const us = selected ? selected.row.start[selected.i] : from;
    show({ row, i: Math.min(row.n - 1, firstAfter(row.latest, us)) });
  }

  // --- mouse, touch, keys ---
  const pointers = new Map();
  let moved = false, pinch = 0;
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const distance = () => { const [a, b] = [...pointers.values()]; return Math.hypot(a[0] - b[0], a[1] - b[1]); };
  view.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const at = place(event);
    if (at[0] > view.clientWidth) return; // the scroll bar
    if (!pointers.size) moved = false;
    pointers.set(event.pointerId, at);
    if (pointers.size === 2) { pinch = distance(); moved = true; }
  });
  view.addEventListener("pointermove", (event) => {
    const at = place(event), before = pointers.get(event.pointerId);
    if (!before) { hover(event.pointerType === "mouse" ? find(...at) : null, at); return; }
    const dx = at[0] - before[0];
    if (!moved && Math.hypot(dx, at[1] - before[1]) < 4) return;
    if (!moved) { moved = true; view.setPointerCapture(event.pointerId); view.classList.add("dragging"); hover(null); }
    pointers.set(event.pointerId, at);
    if (pointers.size === 2) {
      const [a, b] = [...pointers.values()], now = distance();
      if (pinch > 0 && now > 0) zoom(now / pinch, usOf((a[0] + b[0]) / 2));
      pinch = now;
      pan(-dx / perUs() / 2);
    } else {
      pan(-dx / perUs());
      if (event.pointerType === "mouse") view.scrollTop -= at[1] - before[1];
    }
  });
  const lift = (event) => {
    if (!pointers.delete(event.pointerId)) return;
    view.classList.remove("dragging");
    if (event.type === "pointerup" && !moved) { const found = find(...place(event)); select(found); if (found) hover(null); }
  };
  view.addEventListener("pointerup", lift);
  view.addEventListener("pointercancel", lift);
  view.addEventListener("pointerleave", () => hover(null));
  view.addEventListener("dblclick", (event) => zoom(3, usOf(place(event)[0])));
  view.addEventListener("scroll", redraw, { passive: true });
  view.addEventListener("wheel", (event) => {
    const [x] = place(event), across = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) { event.preventDefault(); zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.003)), usOf(x)); }
    else if (event.shiftKey || Math.abs(across) > Math.abs(event.deltaY)) { event.preventDefault(); pan(across / perUs()); }
  }, { passive: false });
  function hover(target, at) {
    if (!target) { tip.hidden = true; if (hovered) { hovered = null; redraw(); } return; }
    if (!hovered || hovered.row !== target.row || hovered.i !== target.i) {
      const { title, facts } = describe(target);
      tip.replaceChildren();
      element("strong", title.length > 120 ? title.slice(0, 119) + "\u2026" : title, tip);
      for (const [name, fact] of facts) if (name !== "on") element("div", name + " " + fact, tip);
      hovered = target;
      redraw();
    }
    tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(at[0] + 14, width - tip.offsetWidth - 4)) + "px";
    tip.style.top = (at[1] + 18 + tip.offsetHeight > shownHeight && at[1] > tip.offsetHeight + 12 ? at[1] - tip.offsetHeight - 12 : at[1] + 18) + "px";
  }
  const DO = { in: () => zoom(2), out: () => zoom(0.5), whole: () => setSpan(firstUs, lastUs), next: () => stepExposed(1), previous: () => stepExposed(-1) };
  const KEYS = { "+": DO.in, "=": DO.in, "-": DO.out, Home: DO.whole, 0: DO.whole, n: DO.next, p: DO.previous, Escape: () => select(null),
    ArrowLeft: () => pan((from - to) * 0.15), ArrowRight: () => pan((to - from) * 0.15),
    ArrowUp: () => { view.scrollTop -= 60; }, ArrowDown: () => { view.scrollTop += 60; } };
  const SHIFTED = { ArrowLeft: () => stepOperation(-1), ArrowRight: () => stepOperation(1), ArrowUp: () => stepLane(-1), ArrowDown: () => stepLane(1) };
  view.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, act = (event.shiftKey && SHIFTED[key]) || KEYS[key];
    if (act) { event.preventDefault(); act(); }
  });
  $("tools").addEventListener("click", (event) => { const act = DO[event.target.dataset.do]; if (act) act(); });

  // --- light and dark ---
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)"), button = $("theme");
  const kept = (theme) => { try { if (theme) localStorage.setItem("counterpoint-theme", theme); return localStorage.getItem("counterpoint-theme"); } catch { return theme; } };
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const setTheme = (theme) => { if (theme) root.dataset.theme = theme; button.textContent = isDark() ? "Light" : "Dark"; readColors(); redraw(); };
  button.setAttribute("aria-label", "Switch between light and dark");
  button.addEventListener("click", () => { const theme = isDark() ? "light" : "dark"; kept(theme); setTheme(theme); });
  system.addEventListener("change", () => setTheme());
  let before = "";
  window.addEventListener("beforeprint", () => { before = root.dataset.theme || ""; root.dataset.theme = "light"; readColors(); resize(); });
  window.addEventListener("afterprint", () => { if (before) root.dataset.theme = before; else delete root.dataset.theme; readColors(); resize(); });

  // --- tables ---
  const MOST_ROWS = 12;
  function sortBy(table, place, isFigure) {
    const head = table.tHead.rows[0].cells, now = head[place].getAttribute("aria-sort");
    const down = now ? now === "ascending" : isFigure;
    for (const cell of head) cell.removeAttribute("aria-sort");
    head[place].setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => isFigure ? (row.cells[place].dataset.v === undefined ? NaN : Number(row.cells[place].dataset.v)) : row.cells[place].textContent;
    const order = (a, b) => isFigure ? (isNaN(a) ? (isNaN(b) ? 0 : 1) : isNaN(b) ? -1 : down ? b - a : a - b)
      : (down ? -1 : 1) * a.localeCompare(b, "en", { numeric: true });
    const body = table.tBodies[0];
    body.append(...[...body.rows].map((row) => [value(row), row]).sort((a, b) => order(a[0], b[0])).map(([, row]) => row));
    foldRows(table);
  }
  function foldRows(table) {
    const wanted = (table.filterText || "").toLowerCase();
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
      row.classList.toggle("beyond", !row.hidden && ++shown > MOST_ROWS);
    }
    if (table.told) table.told.textContent = wanted ? shown + " found" : "";
  }
  document.addEventListener("click", (event) => { const cell = event.target.closest(".clamp"); if (cell) cell.classList.toggle("open"); });
  for (const table of document.querySelectorAll("table")) {
    [...table.tHead.rows[0].cells].forEach((cell, place) => {
      const text = cell.textContent;
      cell.textContent = "";
      const made = element("button", text, cell);
      made.type = "button";
      made.addEventListener("click", () => sortBy(table, place, cell.classList.contains("figure")));
    });
    const count = table.tBodies[0].rows.length;
    if (count <= MOST_ROWS) continue;
    const under = document.createElement("div");
    under.className = "under";
    table.closest(".scroll").after(under);
    const more = element("button", "Show all " + count, under);
    more.type = "button";
    more.setAttribute("aria-expanded", "false");
    more.addEventListener("click", () => {
      const folded = table.classList.toggle("folded");
      more.textContent = folded ? "Show all " + count : "Show fewer";
      more.setAttribute("aria-expanded", String(!folded));
    });
    const input = element("input", "", under);
    input.type = "search";
    input.placeholder = "Filter";
    input.setAttribute("aria-label", "Filter " + table.closest("section").querySelector("h2").textContent);
    input.addEventListener("input", () => { table.filterText = input.value; foldRows(table); });
    table.told = element("span", "", under);
    table.told.setAttribute("role", "status");
    table.classList.add("folded");
    foldRows(table);
  }

  // --- from a row of the exposed intervals to the timeline ---
  const exposedTable = $("table-exposed");
  if (exposedTable) {
    const titles = [...exposedTable.tHead.rows[0].cells].map((cell) => cell.textContent), at = (name) => titles.indexOf(name);
    for (const line of exposedTable.tBodies[0].rows) {
      const figure = (name) => Number(line.cells[at(name)].dataset.v), rank = DATA.ranks.find((each) => each.rank === figure("rank"));
      if (!rank || rank.step !== figure("step")) continue;
      const us = figure("start") - rank.origin, i = rank.row.start.findIndex((start) => Math.abs(start - us) < 0.002);
      if (i < 0) continue;
      const made = element("button", "Show", line.cells[0]);
      made.type = "button";
      made.setAttribute("aria-label", "Show in the timeline");
      made.addEventListener("click", () => { show({ row: rank.row, i }); $("timeline").scrollIntoView({ block: "start" }); view.focus({ preventScroll: true }); });
    }
  }

  // --- lines to paste ---
  for (const title of document.querySelectorAll(".apply h3")) {
    if (!navigator.clipboard) break;
    const made = element("button", "Copy", title), text = title.nextElementSibling.textContent;
    made.type = "button";
    made.addEventListener("click", () => navigator.clipboard.writeText(text).then(
      () => { made.textContent = "Copied"; }, () => getSelection().selectAllChildren(title.nextElementSibling)));
  }

  const stored = kept();
  setTheme(stored === "light" || stored === "dark" ? stored : "");
  button.hidden = false;
  if (rows.some((row) => row.n)) {
    for (const each of [frame, $("tools"), $("timeline-help")]) each.hidden = false;
    new ResizeObserver(resize).observe(view);
    resize();
  } else {
    $("timeline").hidden = true;
  }
  document.documentElement.dataset.ready = "yes";
  // What tests in a browser ask for; nothing on the page uses it.
  window.counterpointPage = { span: () => [from, to], pan, draw, selected: () => selected && describe(selected), rows };
})();
