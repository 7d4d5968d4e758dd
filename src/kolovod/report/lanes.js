"use strict";
// The lanes of the ranks, drawn on a canvas of the size of what can be seen. Times are nanoseconds.
(() => {
  const data = JSON.parse(document.getElementById("lanes-data").textContent);
  const place = document.getElementById("lanes-view");
  const spacer = place.firstElementChild;
  const canvas = spacer.firstElementChild;
  const said = document.getElementById("lanes-said");
  const range = document.getElementById("lanes-range");
  const context = canvas.getContext("2d");

  const ROW = 20, GAP = 2, HEAD = 24, AXIS = 24, LEAST_SPAN = 1000, ZOOM = 1.5;
  const NEAR = 6; // pixels: what is smaller can still be chosen
  const KINDS = {
    compute: ["marked", "backward"],
    own: ["own", "other spans of the script"],
    optimizer: ["optimizer", "optimizer step"],
    wait: ["ranks", "waiting for communication"],
    submitted: ["rest", "submitted, until all ranks have it"],
    carried: ["hidden", "carried"],
  };

  // Rows with absolute times, and where they are.
  const rows = [], heads = [];
  let height = AXIS;
  let lastRank = null;
  for (const row of data.rows) {
    if (row.rank !== lastRank) {
      heads.push({ rank: row.rank, y: height });
      height += HEAD;
      lastRank = row.rank;
    }
    const starts = new Float64Array(row.starts.length);
    const ends = new Float64Array(row.starts.length);
    let at = data.begin;
    row.starts.forEach((more, i) => {
      at += more;
      starts[i] = at;
      ends[i] = at + row.durations[i];
    });
    const above = rows[rows.length - 1];
    const isNew = !above || above.rank !== row.rank || above.label !== row.label;
    rows.push({ ...row, starts, ends, y: height, title: isNew ? row.label : "" });
    height += ROW + GAP;
  }
  const hosts = new Map(data.hosts);
  const whole = [data.begin, data.end];
  let [from, to] = limited(data.view[0], data.view[1]);
  let chosen = null; // { row, index }
  let colours = {}, width = 0, left = 0, seen = 0, isDrawing = false;

  function limited(a, b) {
    const most = whole[1] - whole[0];
    const span = Math.min(Math.max(b - a, Math.min(LEAST_SPAN, most)), most);
    const start = Math.min(Math.max(a, whole[0]), whole[1] - span);
    return [start, start + span];
  }
  function show(a, b) {
    [from, to] = limited(a, b);
    draw();
  }
  const timeOf = (x) => from + ((x - left) / (width - left)) * (to - from);
  const xOf = (at) => left + ((at - from) / (to - from)) * (width - left);
  function zoom(factor, x = (left + width) / 2) {
    const at = timeOf(x), share = (at - from) / (to - from);
    const span = Math.max((to - from) / factor, LEAST_SPAN);
    show(at - share * span, at + (1 - share) * span);
  }
  function pan(share) {
    const by = share * (to - from);
    show(from + by, to + by);
  }

  function text(ns) {
    const us = ns / 1000;
    if (us < 1000) return `${us.toFixed(us < 10 ? 2 : 0)} us`;
    return us < 1e6 ? `${(us / 1e3).toFixed(us < 1e4 ? 2 : 1)} ms` : `${(us / 1e6).toFixed(2)} s`;
  }
  function bytes(count) {
    const units = ["bytes", "KiB", "MiB", "GiB"];
    let unit = 0;
    for (; count >= 1024 && unit < 3; unit += 1) count /= 1024;
    return `${count.toFixed(unit ? 1 : 0)} ${units[unit]}`;
  }
  function moment(ns, span) {
    const digits = Math.min(9, Math.max(2, Math.ceil(-Math.log10(span / 1e9)) + 2));
    return `${(ns / 1e9).toFixed(digits)} s`;
  }

  // Drawing ---------------------------------------------------------------------------------------

  function measure() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ground", "raised", "line", "text", "quiet", "focus", "on-bar",
      "marked", "rest", "optimizer", "hidden", "carried", "ranks", "own"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    const full = height + GAP;
    const most = Math.max(240, Math.round(0.7 * window.innerHeight));
    spacer.style.height = `${full}px`;
    place.style.height = `${Math.min(full, most) + 2}px`;
    width = place.clientWidth;
    seen = Math.min(full, most);
    left = width < 600 ? 0 : 92;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(seen * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${seen}px`;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    draw();
  }
  function draw() {
    if (isDrawing) return;
    isDrawing = true;
    requestAnimationFrame(() => {
      isDrawing = false;
      paint();
    });
  }
  function paint() {
    const top = place.scrollTop;
    context.fillStyle = colours.ground;
    context.fillRect(0, 0, width, seen);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    paintGrid();
    for (const row of rows) {
      const y = row.y - top;
      if (y > seen || y + ROW < AXIS) continue;
      paintRow(row, y);
    }
    for (const head of heads) {
      const y = head.y - top;
      if (y > seen || y + HEAD < AXIS) continue;
      context.font = "600 12px system-ui, sans-serif";
      context.fillStyle = colours.text;
      context.fillText(`rank ${head.rank} on ${hosts.get(head.rank)}`, 6, y + HEAD / 2 + 2);
    }
    context.font = "12px system-ui, sans-serif";
    paintAxis();
    range.textContent = `${moment(from, to - from)} to ${moment(to, to - from)}: ${text(to - from)}`;
  }
  function ticks() {
    const wanted = (to - from) / Math.max(2, (width - left) / 120);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= wanted);
    const found = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
    return [found, step];
  }
  function paintGrid() {
    context.fillStyle = colours.line;
    for (const at of ticks()[0]) context.fillRect(Math.round(xOf(at)), AXIS, 1, seen);
    if (data.step) { // the usual one
      context.globalAlpha = 0.5;
      context.fillStyle = colours.raised;
      const x = Math.max(left, xOf(data.step[0]));
      context.fillRect(x, AXIS, Math.max(0, xOf(data.step[1]) - x), seen);
      context.globalAlpha = 1;
    }
  }
  function paintAxis() {
    context.fillStyle = colours.raised;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = colours.quiet;
    const [found, step] = ticks();
    context.textAlign = "center";
    for (const at of found) {
      const x = xOf(at);
      if (x > left + 30 && x < width - 30) context.fillText(moment(at, step * 10), x, AXIS / 2);
    }
    context.textAlign = "left";
  }
  function paintRow(row, y) {
    if (left) {
      context.fillStyle = colours.quiet;
      context.fillText(cut(row.title, left - 14), 10, y + ROW / 2);
    }
    context.save();
    context.beginPath();
    context.rect(left, Math.max(y, AXIS), width - left, ROW);
    context.clip();
    let painted = -1;
    const fills = data.kinds.map((each) => colours[KINDS[each][0]]);
    let kind = -1; // whose colour is set
    for (let i = firstAfter(row, from); i < row.starts.length && row.starts[i] < to; i += 1) {
      const a = Math.max(xOf(row.starts[i]), left), b = xOf(row.ends[i]);
      const x = Math.floor(a), wide = Math.max(Math.round(b) - x, 1);
      if (x + wide <= painted) continue; // nothing that can be seen
      painted = x + wide;
      if (row.kinds[i] !== kind) context.fillStyle = fills[kind = row.kinds[i]];
      context.fillRect(x, y, wide > 3 ? wide - 1 : wide, ROW);
      if (wide > 34) {
        context.fillStyle = colours["on-bar"];
        kind = -1;
        context.fillText(cut(titleOf(row, i), Math.min(b, width) - a - 8), a + 4, y + ROW / 2);
      }
    }
    if (chosen && chosen.row === row) {
      const a = xOf(row.starts[chosen.index]), b = xOf(row.ends[chosen.index]);
      context.strokeStyle = colours.text;
      context.lineWidth = 2;
      context.strokeRect(a - 1, y + 1, Math.max(b - a, 2) + 1, ROW - 2);
    }
    context.restore();
  }
  function cut(words, room) {
    if (context.measureText(words).width <= room) return words;
    let keep = words.length;
    while (keep > 1 && context.measureText(`${words.slice(0, keep)}…`).width > room) {
      keep = Math.floor(keep * 0.8);
    }
    return keep > 1 ? `${words.slice(0, keep)}…` : "";
  }
  /** The first event of a row that ends after a time: they do not overlap. */
  function firstAfter(row, at) {
    let low = 0, high = row.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (row.ends[middle] < at) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Choosing --------------------------------------------------------------------------------------

  function titleOf(row, index) {
    const name = data.texts[row.names[index]];
    return row.members ? `${name} ${data.texts[row.members[index]]}` : name;
  }
  function describe({ row, index }) {
    const name = data.texts[row.names[index]];
    const took = row.ends[index] - row.starts[index];
    let words = `Rank ${row.rank} on ${hosts.get(row.rank)}, ${row.label}: ${name}, took ${text(took)}, ` +
      `began at ${(row.starts[index] / 1e9).toFixed(6)} s.`;
    if (row.bytes) words += ` ${bytes(row.bytes[index])}: ${data.texts[row.members[index]]}.`;
    return words;
  }
  function choose(found) {
    chosen = found;
    said.textContent = found ? describe(found) : "No event is chosen.";
    if (found) {
      const { row, index } = found;
      if (row.ends[index] <= from || row.starts[index] >= to) {
        const middle = (row.starts[index] + row.ends[index]) / 2, half = (to - from) / 2;
        show(middle - half, middle + half);
      }
      const top = place.scrollTop;
      if (row.y < top + AXIS + HEAD) place.scrollTop = row.y - AXIS - HEAD;
      else if (row.y + ROW > top + seen) place.scrollTop = row.y + ROW + GAP - seen;
    }
    draw();
  }
  function nearest(row, at) {
    if (!row.starts.length) return null;
    const after = Math.min(firstAfter(row, at), row.starts.length - 1);
    const before = Math.max(after - 1, 0);
    const gap = (i) => Math.max(row.starts[i] - at, at - row.ends[i], 0);
    return { row, index: gap(before) <= gap(after) ? before : after };
  }
  function under(x, y) {
    const below = y + place.scrollTop;
    const row = rows.find((each) => below >= each.y && below < each.y + ROW + GAP);
    if (!row || y < AXIS || x < left) return null;
    const found = nearest(row, timeOf(x));
    if (!found) return null;
    const a = xOf(row.starts[found.index]), b = xOf(row.ends[found.index]);
    return x >= a - NEAR && x <= b + NEAR ? found : null;
  }
  function chooseLane(by) {
    const held = rows.filter((row) => row.starts.length);
    if (!held.length) return;
    const place = chosen ? held.indexOf(chosen.row) + by : by > 0 ? 0 : held.length - 1;
    const row = held[Math.min(Math.max(place, 0), held.length - 1)];
    const middle = chosen ? (chosen.row.starts[chosen.index] + chosen.row.ends[chosen.index]) / 2 : NaN;
    choose(nearest(row, middle >= from && middle <= to ? middle : (from + to) / 2));
  }
  function chooseNext(by) {
    if (!chosen) return chooseLane(1);
    const index = chosen.index + by;
    if (index >= 0 && index < chosen.row.starts.length) choose({ row: chosen.row, index });
  }
  function zoomToChosen() {
    if (!chosen) return;
    const a = chosen.row.starts[chosen.index], b = chosen.row.ends[chosen.index];
    const more = Math.max(b - a, LEAST_SPAN) * 0.25;
    show(a - more, b + more);
  }

  // Input -----------------------------------------------------------------------------------------

  const actions = {
    in: () => zoom(ZOOM),
    out: () => zoom(1 / ZOOM),
    left: () => pan(-0.25),
    right: () => pan(0.25),
    whole: () => show(...whole),
    step: () => show(...data.view),
  };
  const keys = {
    ArrowLeft: actions.left, ArrowRight: actions.right, "+": actions.in, "=": actions.in,
    "-": actions.out, Home: actions.whole, ArrowUp: () => chooseLane(-1),
    ArrowDown: () => chooseLane(1), n: () => chooseNext(1), p: () => chooseNext(-1),
    Enter: zoomToChosen, Escape: () => choose(null),
  };
  place.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keys[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  for (const button of document.querySelectorAll(".controls button")) {
    button.addEventListener("click", actions[button.dataset.do]);
    if (button.dataset.do === "step" && !data.step) button.textContent = "The beginning";
  }
  place.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!sideways && !event.ctrlKey && document.activeElement !== place) return; // the page's
    event.preventDefault();
    if (sideways) pan((event.deltaX || event.deltaY) / 1000);
    else zoom(2 ** (-event.deltaY / (event.ctrlKey && Math.abs(event.deltaY) < 20 ? 50 : 300)), xIn(event));
  }, { passive: false });

  const fingers = new Map();
  let moved = 0;
  const xIn = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const yIn = (event) => event.clientY - canvas.getBoundingClientRect().top;
  place.addEventListener("pointerdown", (event) => {
    if (event.target !== canvas || event.button) return;
    if (!fingers.size) moved = 0;
    fingers.set(event.pointerId, xIn(event));
    canvas.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined) {
      const found = under(xIn(event), yIn(event));
      canvas.title = found ? describe(found) : "";
      return;
    }
    const x = xIn(event);
    const other = [...fingers].find(([id]) => id !== event.pointerId);
    fingers.set(event.pointerId, x);
    moved += Math.abs(x - before);
    if (other) { // what is below each finger stays there
      const was = Math.max(Math.abs(before - other[1]), 10), is = Math.max(Math.abs(x - other[1]), 10);
      zoom(is / was, other[1]);
    } else {
      pan((before - x) / (width - left));
    }
  });
  function lift(event) {
    if (!fingers.delete(event.pointerId)) return;
    if (event.type === "pointerup" && !fingers.size && moved < 4) choose(under(xIn(event), yIn(event)));
  }
  place.addEventListener("pointerup", lift);
  place.addEventListener("pointercancel", lift);
  place.addEventListener("scroll", draw);
  new ResizeObserver(measure).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", measure);

  const legend = document.getElementById("lanes-legend");
  for (const [kind, [colour, words]] of Object.entries(KINDS)) {
    if (!data.kinds.includes(kind)) continue;
    const item = legend.appendChild(document.createElement("li"));
    item.innerHTML = '<svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10"/></svg>';
    item.querySelector("rect").setAttribute("class", `c-${colour}`);
    item.append(words);
  }
  measure();
})();
