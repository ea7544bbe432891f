// The page of a run. It takes in increments (docs/view.md) and draws them. All text that comes from trials becomes
// textContent or is drawn on a canvas: it is never markup.

// The colours of runs beside each other, and of losses: PALETTE and LOSS in fluidtune/report. Trials have their own.
const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#7A5195", "#8C6D31"];
const LOSS = "#D55E00";
const STATES = ["silent", "resizing", "running", "waiting", "failed", "paused", "stopped", "unfinished"];
const SPANS = [["all", Infinity], ["1 h", 3600], ["10 min", 600], ["1 min", 60]];
const ROW_HEIGHT = 28, TABLE_HEIGHT = 600; // px, as in view.css; the height is the most
const MOST_PARAMETERS = 12; // columns of the table; the others are in the trial's own panel
const LISTED = 50; // trials that wait, one line each
const MARKS_DRAWN = 300; // with more in view, triangles would cover the bars
const SILENCE = 60; // s without a line, after which the page says so, as `fluidtune top`
const ANEW = 5000; // ms between two questions for all runs
const REFRESH = 2000; // ms between two questions for the curve of the trial that is open

const $ = (id) => document.getElementById(id);
const snapshot = $("snapshot") && JSON.parse($("snapshot").textContent);
const token = new URLSearchParams(location.search).get("token"); // who has it may steer
let model, source, key = "", cursor = "", open = null, active = null, span = Infinity, filter = "", dirty = false, asked = 0;
let sort = null, listed = [], only = new Set(), plots = {}, lanes = new Map(), boxes = [], pressed = null, stale = "";
let comparing = false, ahead = 0; // seconds that this machine's clock is ahead of that of the page's server

// --- small things

function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  const whole = Math.round(Math.max(0, seconds));
  if (seconds < 99.95) return `${seconds < 10 ? +seconds.toFixed(1) : whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(whole / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function number(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "number" ? String(+value.toPrecision(6)) : String(value);
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const colour = (trial) => trial.colour;
const label = (trial) => trial.name || trial.id;
const live = () => !model.over && !model.died && !snapshot && !model.trouble;
// Seconds since the last event. Where nothing is written for long the driver may have died: time stands still there.
const silence = () => (live() ? Math.max(0, Date.now() / 1000 - ahead - model.origin - model.now) : 0);
const now = () => model.now + (silence() <= SILENCE ? silence() : 0);
const narrow = matchMedia("(max-width: 900px)"); // as in view.css
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function short(trial) {
  const last = label(trial).split("_").pop();
  return /^\d+$/.test(last) ? String(+last) : last;
}

function state(trial) {
  return model.over && ["running", "resizing", "waiting", "silent"].includes(trial.state) ? "unfinished" : trial.state;
}

// The colour of text that is read on this one: as `_readable_on` in fluidtune/report/pictures.py.
function textOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255);
  return 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 ? "#1d2733" : "#ffffff";
}

function width(trial) {
  const held = model.heldBy.get(trial.number);
  return held ? held.devices.length * held.share : 0;
}

// --- what comes

function begin() {
  model = {
    head: {}, trials: [], names: new Set(), heldBy: new Map(), devices: [], drivers: [], marks: [], news: [],
    samples: [], now: 0, origin: 0, over: false, best: null, rate: 0, left: 0, trouble: "", unknown: 0, unreadable: 0, died: false,
    services: [], opened: false,
  };
  lanes = new Map();
}

function take(change) {
  if (change.whole) begin();
  if (change.clock) ahead = Date.now() / 1000 - change.clock;
  model.columns = change.columns ?? model.columns;
  for (const row of change.trials) {
    const trial = Object.fromEntries(model.columns.map((name, place) => [name, row[place]]));
    trial.text = `${trial.name} ${trial.id} ${trial.group} ${JSON.stringify(trial.parameters)}`.toLowerCase();
    for (const name of Object.keys(trial.parameters)) model.names.add(name);
    const before = model.trials[trial.number];
    model.trials[trial.number] = trial;
    if (open === trial.id && before) refresh(before.state !== trial.state || before.why !== trial.why);
  }
  for (const name of ["now", "origin", "over", "best", "rate", "left", "trouble", "unknown", "unreadable", "died", "services"]) {
    model[name] = change[name];
  }
  for (const name of ["head", "devices", "drivers", "news", "samples"]) if (change[name]) model[name] = change[name];
  if (change.marks) model.marks.push(...change.marks);
  if (change.intervals) {
    const [trials, devices, shares, starts, ends] = change.intervals;
    trials.forEach((trial, i) => lane(devices[i]).past.push({ trial, share: shares[i], start: starts[i], end: ends[i] }));
    for (const device of new Set(devices)) lane(device).boxes = null;
  }
  if (change.held) {
    for (const each of lanes.values()) [each.present, each.boxes] = [[], null];
    model.heldBy = new Map();
    for (const [trial, devices, share, start] of change.held) {
      model.heldBy.set(trial, { devices, share });
      for (const device of devices) lane(device).present.push({ trial, share, start, end: Infinity });
    }
  }
  model.opened = true;
  stale = "";
  if (sort === null && model.head.mode) sort = { key: "metric", up: model.head.mode === "min" };
  draw();
}

function lane(device) {
  if (!lanes.has(device)) lanes.set(device, { past: [], present: [], boxes: null });
  return lanes.get(device);
}

function follow(run) {
  [key, cursor] = [run, ""];
  begin();
  listenTo();
}

// Get what has come of the run since `cursor`. A hidden tab gets nothing: a browser has six connections for all of them.
function listenTo() {
  source?.close();
  if (document.hidden) return;
  source = new EventSource(`api/stream?run=${encodeURIComponent(key)}&cursor=${encodeURIComponent(cursor)}`);
  source.onmessage = (event) => {
    cursor = event.lastEventId;
    take(JSON.parse(event.data));
  };
  source.onerror = () => {
    stale = source.readyState === EventSource.CLOSED
      ? "There is no such run here any more."
      : "The page's server does not answer: start `fluidtune view` again. What is shown is as it was.";
    draw();
  };
}

// --- drawing, at most once a frame

function draw() {
  if (dirty) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    if (!comparing) for (const part of [drawHead, drawFigures, drawLanes, drawTable, drawLists, drawServices]) part();
    else drawHead();
  });
}

function drawHead() {
  const head = model.head;
  const name = comparing ? "All runs" : head.run || key || "FluidTune";
  document.title = `${name} - FluidTune`;
  put($("name"), name);
  $("state").hidden = comparing;
  const quiet = live() && model.opened && !model.left && model.now > 0 && silence() > SILENCE;
  let text = "opening";
  if (stale) text = "not connected";
  else if (model.trouble) text = "ended here";
  else if (model.left) text = `reading the log, ${(model.left / 1e6).toFixed(1)} MB to go`;
  else if (model.died) text = `its driver has died, after ${duration(model.now)}`;
  else if (model.over) text = `ended after ${duration(model.now)}`;
  else if (quiet) text = `nothing was written for ${duration(silence())}`;
  else if (model.opened && !model.now && !model.head.run) text = "nothing is written yet";
  else if (model.opened) text = `${snapshot ? "written until" : "running for"} ${duration(now())}`;
  put($("state"), text);
  $("state").className = `pill ${stale || model.trouble || model.died || quiet ? "bad" : live() && !model.left ? "live" : ""}`;
  const kind = { gpu: "GPUs", cpu: "CPU cores", emulated: "emulated devices" }[head.kind] || "";
  const began = model.origin ? `began ${new Date(1000 * model.origin).toLocaleString()}` : "";
  const metric = head.metric ? `${head.mode || ""} ${head.metric}`.trim() : "";
  put($("about"), comparing ? "" : [head.algorithm, metric, kind, head.machine, began].filter(Boolean).join(" · "));
  const troubles = [stale, model.trouble];
  if (model.died) troubles.push("Its driver was killed, or its machine has started anew. Tuner.restore goes on with the run.");
  if (model.unknown) {
    troubles.push(`FluidTune ${head.fluidtune || ""} wrote ${plural(model.unknown, "event")} that this version does not`
      + " know. They are left out: install the version that wrote the log.");
  }
  if (model.unreadable) troubles.push(`${plural(model.unreadable, "line")} of the log cannot be read and are left out.`);
  put($("trouble"), troubles.filter(Boolean).join(" "));
  $("trouble").hidden = !$("trouble").textContent;
}

function drawFigures() {
  const counts = {};
  for (const trial of model.trials) if (trial) counts[state(trial)] = (counts[state(trial)] || 0) + 1;
  const there = model.devices.filter(([, , since]) => since !== null);
  const busy = new Set([...model.heldBy.values()].flatMap((held) => held.devices)).size;
  const best = model.best && model.trials.find((trial) => trial.id === model.best[0]);
  const order = STATES.filter((name) => counts[name]).map((name) => `${counts[name].toLocaleString("en")} ${name}`).join(", ");
  const used = model.samples.filter(([, part]) => part !== null);
  const mean = used.reduce((sum, [, part]) => sum + part, 0) / (used.length || 1);
  const figures = [
    ["trials", model.trials.length.toLocaleString("en"), order],
    [`best ${model.head.metric || ""}, by last results`, model.best ? number(model.best[1]) : "-", best ? label(best) : "no result yet"],
    model.over
      ? ["devices", String(model.devices.length), "in all"]
      : ["devices busy", `${busy} of ${there.length}`, used.length ? `GPUs compute ${Math.round(100 * mean)} %` : ""],
    ["iterations", model.trials.reduce((sum, trial) => sum + (trial?.iterations || 0), 0).toLocaleString("en"),
      model.over ? "" : `${model.rate.toLocaleString("en")} in the last minute`],
    ["time", duration(now()), model.drivers.length ? `restored ${plural(model.drivers.length, "time")}` : ""],
  ];
  const box = $("figures");
  while (box.children.length < figures.length) {
    const cell = make("div");
    cell.append(make("dt"), make("dd"));
    cell.lastChild.append(make("span"), make("small"));
    box.append(cell);
  }
  figures.forEach(([name, value, more], place) => {
    const [term, data] = box.children[place].children;
    put(term, name);
    put(data.children[0], value);
    put(data.children[1], more);
    data.title = `${value} ${more}`;
  });
  // The states that there are become choices of the table.
  const names = STATES.filter((name) => counts[name]);
  if ([...$("states").children].map((each) => each.dataset.state).join() !== names.join()) {
    only = new Set([...only].filter((name) => names.includes(name)));
    $("states").replaceChildren(...names.map((name) => {
      const button = make("button", name);
      button.type = "button";
      button.dataset.state = name;
      button.setAttribute("aria-pressed", String(only.has(name)));
      button.onclick = () => {
        if (!only.delete(name)) only.add(name);
        button.setAttribute("aria-pressed", String(only.has(name)));
        draw();
      };
      return button;
    }));
  }
}

// --- devices over time

function slots(each) {
  // Where each interval begins in its device's row, 0 to 1: as the timeline has it, `_slots` in report/pictures.py.
  const all = [...each.past, ...each.present].sort((one, other) => one.start - other.start);
  let taken = [];
  const last = new Map();
  for (const box of all) {
    taken = taken.filter((other) => other.end > box.start);
    const tries = [...(last.has(box.trial) ? [last.get(box.trial)] : []),
      ...[0, ...taken.map((other) => other.low + other.share)].sort((one, other) => one - other)];
    const free = tries.find((low) => low + box.share <= 1 + 1e-6 && taken.every((other) =>
      low + box.share <= other.low + 1e-6 || low >= other.low + other.share - 1e-6));
    box.low = free ?? Math.max(0, 1 - box.share);
    last.set(box.trial, box.low);
    taken.push(box);
  }
  return all;
}

function drawLanes() {
  const canvas = $("lanes"), ids = model.devices.map(([device]) => device);
  const wide = Math.max(280, $("lanes-box").clientWidth), left = 34, axis = 22;
  const high = Math.max(7, Math.min(26, Math.floor(320 / Math.max(1, ids.length))));
  const tall = high * Math.max(1, ids.length) + axis, scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(tall * scale)) {
    [canvas.width, canvas.height] = [Math.round(wide * scale), Math.round(tall * scale)];
    [canvas.style.width, canvas.style.height] = [`${wide}px`, `${tall}px`];
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, wide, tall);
  const end = Math.max(now(), 1e-3), start = Math.max(0, end - span);
  const x = (seconds) => left + ((wide - left - 4) * (seconds - start)) / (end - start);
  const ink = css("--ink"), quiet = css("--quiet"), line = css("--line"), paper = css("--panel");
  boxes = [];
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  ids.forEach((device, row) => {
    const top = row * high + 1, tallRow = high - 2;
    const [, node, since, spans] = model.devices[row];
    pen.fillStyle = css("--idle");
    for (const [from, to] of [...spans, ...(since === null ? [] : [[since, end]])]) {
      if (to > start) pen.fillRect(x(Math.max(from, start)), top, Math.max(0.5, x(to) - x(Math.max(from, start))), tallRow);
    }
    const each = lane(device);
    each.boxes ??= slots(each);
    for (const box of each.boxes) {
      const to = Math.min(box.end, end);
      const trial = model.trials[box.trial];
      if (to <= start || !trial) continue;
      const from = x(Math.max(box.start, start)), reach = Math.max(0.6, x(to) - from);
      const y = top + tallRow * box.low, height = Math.max(1, tallRow * box.share - (box.share < 1 ? 0.5 : 0));
      pen.globalAlpha = open === null || open === trial.id ? 1 : 0.3;
      pen.fillStyle = colour(trial);
      pen.fillRect(from, y, reach > 3 ? reach - 0.8 : reach, height);
      boxes.push({ ...box, device, node, x: from, reach, y, height });
      const text = short(trial);
      if (height >= 10 && reach > 8 + 6.5 * text.length) {
        pen.fillStyle = textOn(colour(trial));
        pen.textAlign = "center";
        pen.fillText(text, from + reach / 2, y + height / 2 + 0.5);
      }
    }
    pen.globalAlpha = 1;
    const every = Math.ceil(12 / high);
    if (row % every === 0) {
      pen.fillStyle = quiet;
      pen.textAlign = "right";
      pen.fillText(String(device), left - 6, top + tallRow / 2);
    }
  });
  for (const seconds of model.drivers) {
    if (seconds < start) continue;
    pen.fillStyle = ink;
    for (let y = 0; y < tall - axis; y += 7) pen.fillRect(x(seconds), y, 1, 4);
  }
  const marks = model.marks.filter(([seconds, device]) => seconds >= start && ids.includes(device));
  for (const [seconds, device, kind] of marks.length <= MARKS_DRAWN ? marks : marks.filter((mark) => mark[2] === "lost")) {
    const at = x(seconds), y = ids.indexOf(device) * high + high / 2, size = Math.min(4.5, high / 2.4);
    pen.beginPath();
    if (kind === "lost") {
      pen.strokeStyle = LOSS;
      pen.lineWidth = 2;
      pen.moveTo(at - size, y - size); pen.lineTo(at + size, y + size);
      pen.moveTo(at + size, y - size); pen.lineTo(at - size, y + size);
    } else {
      const tip = kind === "grown" ? -size : size;
      [pen.strokeStyle, pen.fillStyle, pen.lineWidth] = [ink, paper, 1];
      pen.moveTo(at, y + tip); pen.lineTo(at + size, y - tip); pen.lineTo(at - size, y - tip);
      pen.closePath();
      pen.fill();
    }
    pen.stroke();
  }
  // The axis: at most one tick in 90 px.
  const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400];
  const step = steps.find((each) => ((wide - left) * each) / (end - start) >= 90) || 7 * 86400;
  pen.fillStyle = quiet;
  for (let seconds = Math.ceil(start / step) * step; seconds <= end; seconds += step) {
    pen.fillRect(x(seconds), tall - axis, 1, 4);
    pen.textAlign = x(seconds) > wide - 40 ? "right" : seconds <= start + step / 10 ? "left" : "center";
    pen.fillText(duration(seconds).replace(/ 00 (s|min)$/, ""), x(seconds), tall - axis / 2 + 2);
  }
  pen.fillStyle = line;
  pen.fillRect(left, tall - axis, wide - left, 1);
  canvas.setAttribute("aria-label", `who held which of ${plural(ids.length, "device")} when, until ${duration(end)}; `
    + "the table below has each trial's devices");
}

function pointed(event) {
  const { left, top } = $("lanes").getBoundingClientRect();
  const [x, y] = [event.clientX - left, event.clientY - top];
  const hit = (box) => x >= box.x - 1 && x <= box.x + box.reach + 1 && y >= box.y && y <= box.y + box.height;
  return boxes.findLast(hit);
}

function point(event) {
  const box = pointed(event);
  $("lanes").style.cursor = box ? "pointer" : "";
  const mark = "▲ grew · ▼ shrank · ✕ worker or device lost · ┆ another driver · grey: idle";
  if (!box) return put($("pointed"), mark);
  const until = box.end === Infinity ? "until now" : `until ${duration(box.end)}`;
  const part = box.share < 1 ? `, a share of ${number(box.share)}` : "";
  put($("pointed"), `${label(model.trials[box.trial])} on device ${box.device} (${box.node})${part}, `
    + `from ${duration(box.start)} ${until}`);
}

// --- the table of trials

// The column of the parameter with this name, whether the table has it or not.
const parameter = (name) => ({
  key: `=${name}`, title: name, value: ({ parameters }) => (Object.hasOwn(parameters, name) ? parameters[name] : null),
});

// What FluidTune knows of a trial.
function ownColumns() {
  const farthest = { min: "lowest", max: "highest" }[model.head.mode];
  return [
    // On a narrow screen the end of a name says more than its beginning.
    { key: "name", title: "trial", text: true, value: label, show: narrow.matches ? short : label },
    { key: "state", title: "state", text: true, value: (trial) => STATES.indexOf(state(trial)), show: state },
    { key: "metric", title: model.head.metric || "metric", value: (trial) => trial.metric },
    { key: "record", title: farthest || "", value: (trial) => (farthest ? trial.record : null) },
    { key: "iteration", title: "iteration", value: (trial) => trial.iteration,
      show: (trial) => (trial.target === null ? `${trial.iteration}` : `${trial.iteration} / ${number(trial.target)}`) },
    { key: "width", title: "on devices", value: width, show: devicesOf },
    { key: "seconds", title: "s / iteration", value: (trial) => trial.seconds,
      show: (trial) => (trial.seconds === null ? "" : number(+trial.seconds.toPrecision(3))) },
    { key: "why", title: "last change", text: true, value: (trial) => trial.why },
  ];
}

// FluidTune's own columns without those that would be empty, then what the search has chosen.
function columns() {
  const parameters = [...model.names].slice(0, MOST_PARAMETERS).map((name) => ({ ...parameter(name), chosen: true }));
  const has = (column) => model.trials.some((trial) => trial && ![null, "", 0].includes(column.value(trial)));
  const own = ownColumns().filter((column) => column.key === "name" || column.key === "state" || has(column));
  return [...own, ...parameters];
}

// The devices that it holds, with its share of them if that is a part: "0 1", "0 (0.5)".
function devicesOf(trial) {
  const held = model.heldBy.get(trial.number);
  return held ? held.devices.join(" ") + (held.share < 1 ? ` (${number(+held.share.toPrecision(3))})` : "") : "";
}

// The column that a filter means by this name. A parameter goes before the table's own columns.
function compared(name) {
  const like = (each) => each.toLowerCase() === name.toLowerCase();
  const own = model.names.has(name) ? name : [...model.names].find(like);
  if (own !== undefined) return parameter(own);
  return ownColumns().findLast((column) => like(column.key) || like(column.title));
}

// "lr<0.01 adam": each word must hold, a comparison of a parameter or column, or a part of the trial's text.
function test(words) {
  const tests = words.split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, typed] = /^([^<>=!]+)(<=|>=|!=|<|>|=)(.+)$/.exec(word) || [];
    const column = name && compared(name), [part, text] = [word.toLowerCase(), typed?.toLowerCase()];
    if (!column) return (trial) => trial.text.includes(part) || state(trial) === part;
    return (trial) => {
      const value = (column.show && !sign.match(/[<>]/) && column.text ? column.show : column.value)(trial);
      if (value === null || value === "") return false;
      const both = typeof value === "number" && text !== "" && !Number.isNaN(+text);
      const [one, other] = both ? [value, +text] : [String(value).toLowerCase(), text];
      return { "<": one < other, ">": one > other, "<=": one <= other, ">=": one >= other, "=": one === other, "!=": one !== other }[sign];
    };
  });
  return (trial) => tests.every((each) => each(trial));
}

function order(all) {
  const column = sort && all.find((each) => each.key === sort.key);
  const holds = test(filter);
  const found = model.trials.filter((trial) => trial && (!only.size || only.has(state(trial))) && holds(trial));
  if (!column) return found;
  const sign = sort.up ? 1 : -1;
  return found.map((trial) => [column.value(trial), trial]).sort(([one, first], [other, second]) => {
    // What has no value comes last in either direction.
    if (one === null || other === null) return (one === null) - (other === null) || first.number - second.number;
    const numbers = [one, other].filter((value) => typeof value === "number").length;
    // Numbers come before words.
    const less = numbers === 2 ? one - other : numbers === 1 ? (typeof one === "number" ? -1 : 1)
      : String(one).localeCompare(String(other), "en", { numeric: true });
    return sign * less || first.number - second.number;
  }).map(([, trial]) => trial);
}

function drawTable() {
  const all = columns(), titles = $("rows").tHead.rows[0];
  if ([...titles.cells].map((cell) => cell.dataset.key + cell.dataset.title).join() !== all.map((each) => each.key + each.title).join()) {
    titles.replaceChildren(...all.map((column, place) => {
      const cell = make("th", "", `${column.text ? "text" : ""} ${place ? "" : "first"} ${column.chosen ? "chosen" : ""}`);
      Object.assign(cell.dataset, { key: column.key, title: column.title });
      cell.scope = "col";
      const button = cell.appendChild(make("button", column.title));
      if (column.chosen) button.title = `${column.title}: a parameter`;
      button.type = "button";
      button.onclick = () => {
        sort = { key: column.key, up: sort?.key === column.key ? !sort.up : true };
        draw();
      };
      return cell;
    }));
  }
  for (const cell of titles.cells) {
    if (cell.dataset.key === sort?.key) cell.setAttribute("aria-sort", sort.up ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  }
  listed = order(all);
  if (open !== null && find(open)) allow(find(open));
  put($("shown"), `${listed.length.toLocaleString("en")} of ${plural(model.trials.length, "trial")}.`);
  drawRows(all);
}

// Only the rows in sight are in the document: 10,000 would make it slow.
function drawRows(all = columns()) {
  const box = $("rows-box"), body = $("rows").tBodies[0];
  const first = Math.max(0, Math.min(Math.floor(box.scrollTop / ROW_HEIGHT) - 5, listed.length - 1));
  const count = Math.max(0, Math.min(listed.length - first, Math.ceil(TABLE_HEIGHT / ROW_HEIGHT) + 10));
  $("rows").setAttribute("aria-rowcount", String(listed.length + 1));
  if (!body.rows.length) for (const _ of "ab") body.append(make("tr", "", "space")), body.lastChild.append(make("td"));
  while (body.rows.length > count + 2) body.rows[1].remove();
  while (body.rows.length < count + 2) body.insertBefore(make("tr"), body.lastChild);
  const spaces = [first, listed.length - first - count];
  [body.firstChild, body.lastChild].forEach((space, which) => {
    space.firstChild.colSpan = all.length;
    space.firstChild.style.height = `${spaces[which] * ROW_HEIGHT}px`;
    space.hidden = !spaces[which];
  });
  if (!listed.some((trial) => trial.id === active)) active = listed[0]?.id ?? null;
  const inside = body.contains(document.activeElement);
  for (let place = 0; place < count; place++) {
    const row = body.rows[place + 1], trial = listed[first + place];
    while (row.cells.length > all.length) row.lastChild.remove();
    while (row.cells.length < all.length) row.append(make("td"));
    row.dataset.trial = trial.id;
    row.setAttribute("aria-rowindex", String(first + place + 2));
    row.className = trial.id === open ? "open" : "";
    all.forEach((column, which) => {
      const cell = row.cells[which], text = column.show ? column.show(trial) : number(column.value(trial));
      cell.className = `${column.text ? "text" : ""} ${which ? "" : "first"} ${column.key === "state" ? text : ""} ${column.chosen ? "chosen" : ""}`;
      if (which) return put(cell, text);
      if (!cell.firstElementChild) cell.append(make("span", "", "swatch"), make("button"));
      const [swatch, button] = cell.children;
      swatch.style.background = colour(trial);
      button.type = "button";
      button.tabIndex = trial.id === active ? 0 : -1;
      put(button, text);
      cell.title = trial.id;
      if (inside && trial.id === active && document.activeElement !== button) button.focus({ preventScroll: true });
    });
  }
}

function move(by) {
  const place = listed.findIndex((trial) => trial.id === active) + by;
  const trial = listed[Math.max(0, Math.min(place, listed.length - 1))];
  if (!trial) return;
  active = trial.id;
  const box = $("rows-box"), top = listed.indexOf(trial) * ROW_HEIGHT;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + 3 * ROW_HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = top + 3 * ROW_HEIGHT - box.clientHeight;
  drawRows();
  $("rows").querySelector('td.first button[tabindex="0"]')?.focus({ preventScroll: true });
}

// --- one trial

const find = (id) => model.trials.find((trial) => trial?.id === id);

function choose(id) {
  open = active = id;
  location.hash = `${encodeURIComponent(key)}/${encodeURIComponent(id)}`;
  for (const plot of Object.values(plots)) plot.destroy();
  plots = {};
  $("detail").hidden = false;
  $("steer").hidden = !token || Boolean(snapshot);
  put($("steered"), "");
  $("story").replaceChildren();
  put($("story-head"), "");
  asked = 0;
  drawTrial();
  refresh(true);
  draw();
  $("detail-title").focus({ preventScroll: true });
}

function leave() {
  if (open === null) return;
  open = null;
  location.hash = encodeURIComponent(key);
  $("detail").hidden = true;
  draw();
  requestAnimationFrame(() => $("rows").querySelector('td.first button[tabindex="0"]')?.focus({ preventScroll: true }));
}

function drawTrial() {
  const trial = find(open);
  if (!trial) return;
  put($("detail-title"), label(trial));
  // A parameter may have the name of what follows.
  const facts = Object.entries(trial.parameters);
  if (trial.name && trial.name !== trial.id) facts.push(["id", trial.id]);
  facts.push(["state", state(trial) + (trial.waits ? `: ${trial.waits}` : "")], ["kind", trial.kind], ["group", trial.group]);
  allow(trial);
  $("parameters").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", name), make("dd", number(value))]));
}

// A button that could do nothing is off, and says why.
function allow(trial) {
  const ended = !live() ? "the run has ended" : "";
  const its = ended || (["stopped", "failed"].includes(trial.state) ? "the trial has ended" : "");
  const why = { stop: its, keep: its || model.head.no_keep || "", clone: ended };
  const what = { stop: "it ends at its next result", keep: "it goes on when the algorithm wants to stop it", clone: "a new trial with these parameters" };
  for (const [kind, reason] of Object.entries(why)) {
    $(kind).disabled = asking || reason !== "";
    $(kind).title = reason || what[kind];
  }
}

// Ask the driver to stop, keep or clone the trial that is open. Buttons wait for the answer; what comes twice has one id.
async function steer(kind) {
  const trial = open;
  if (kind === "stop" && !confirm(`Stop ${label(find(trial))} at its next result? It cannot be started again.`)) return;
  const body = { id: crypto.randomUUID(), run: key, trial, kind };
  if (kind === "clone") {
    body.parameters = $("clone-set").value.split(/[\s,]+(?=[^\s,=]+=)/).map((text) => text.trim()).filter(Boolean);
    body.from_checkpoint = $("clone-from").checked;
  }
  asking = true;
  allow(find(trial));
  put($("steered"), `asked: ${kind}`);
  let found;
  try {
    const answer = await fetch("api/steer", { method: "POST", headers: { "X-FluidTune-Token": token }, body: JSON.stringify(body) });
    found = await answer.json();
  } catch {
    found = { trouble: "The page's server does not answer." };
  }
  asking = false;
  if (open !== null) allow(find(open));
  if (open === trial) {
    put($("steered"), found.said ?? `not done: ${found.trouble}`);
    refresh(true);
  }
}

let timer = 0, told = false, asking = false;
function refresh(story) {
  told ||= story;
  if (timer) return;
  timer = setTimeout(async () => {
    const [id, run, tell] = [open, key, told];
    [told, asked] = [false, Date.now()];
    try {
      const where = `run=${encodeURIComponent(run)}&trial=${encodeURIComponent(id)}`;
      const ask = async (what) => (snapshot ? snapshot[what === "curve" ? "curves" : "stories"][id] : await (await fetch(`api/${what}?${where}`)).json());
      const mine = () => open === id && key === run;
      const curve = await ask("curve");
      if (mine()) drawTrial();
      if (mine() && curve.iterations) drawCurves(curve);
      const found = tell && mine() ? await ask("story") : null;
      if (tell && mine()) drawStory(found);
    } catch {
      put($("story-head"), "The page's server does not answer.");
    } finally {
      timer = 0;
    }
  }, Math.max(0, asked + REFRESH - Date.now()));
}

function drawStory(story) {
  if (!story?.told) {
    const command = `fluidtune why ${snapshot?.directory ?? "RUN_DIR"} ${open}`;
    return put($("story-head"), story?.trouble || `This file does not have the story of every trial. It is told by: ${command}`);
  }
  put($("story-head"), story.head);
  $("story").replaceChildren(...story.told.map(([at, iteration, text]) => {
    const line = make("li");
    line.append(make("span", duration(at)), make("div", (iteration ? `[${iteration}] ` : "") + text));
    return line;
  }), ...story.end.map((text) => make("li", text, "end")));
}

function plot(id, data, series, axis) {
  const box = $(id), wide = Math.max(220, box.clientWidth);
  if (plots[id]) {
    plots[id].setSize({ width: wide, height: plots[id].height });
    return plots[id].setData(data);
  }
  const axes = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const text = (plot, values) => values.map((value) => (axis === "time" ? duration(value) : number(value)));
  const said = (value) => (value === null ? "–" : axis === "time" ? duration(value) : number(value));
  box.replaceChildren();
  plots[id] = new uPlot({
    width: wide, height: id === "widths" ? 150 : 210, scales: { x: { time: false } },
    legend: { show: id !== "widths" }, cursor: { drag: { x: true, y: false } },
    series: [{ label: axis, value: (plot, value) => said(value) }, ...series],
    axes: [{ ...axes, values: text, space: 70 }, { ...axes, size: 58, values: (plot, values) => values.map(number) }],
  }, data, box);
  return plots[id];
}

function drawCurves(curve) {
  const trial = find(open), stroke = css("--accent");
  put($("curve-title"), model.head.metric || "Metric");
  const value = (plot, found) => (found === null || found === undefined ? "–" : number(found));
  plot("curve", [curve.iterations, curve.metric], [{ label: model.head.metric || "metric", stroke, width: 1.6, value }], "iteration");
  const steps = [...curve.widths];
  if (steps.length) steps.push([Math.max(now(), steps.at(-1)[0]), steps.at(-1)[1]]);
  const stepped = uPlot.paths.stepped({ align: 1 });
  const series = { label: "width", stroke, fill: `${colour(trial)}33`, width: 1.6, paths: stepped, value };
  plot("widths", [steps.map(([seconds]) => seconds), steps.map(([, wide]) => wide)], [series], "time");
}

// --- what waits, what went wrong, the services

function lines(list, texts, none) {
  while (list.children.length > Math.max(1, texts.length)) list.lastChild.remove();
  (texts.length ? texts : [none]).forEach((text, place) => put(list.children[place] || list.appendChild(make("li")), text));
}

function drawLists() {
  const waiting = model.trials.filter((trial) => trial && state(trial) === "waiting");
  waiting.sort((one, other) => one.since - other.since);
  const there = model.devices.filter(([, , since]) => since !== null).length;
  const busy = new Set([...model.heldBy.values()].flatMap((held) => held.devices)).size;
  const why = !waiting.length ? "" : there
    ? `${plural(waiting.length, "trial")} wait, ${busy} of ${plural(there, "device")} held.`
    : `${plural(waiting.length, "trial")} wait: the job has no device now.`;
  put($("waiting-why"), why);
  const texts = waiting.slice(0, LISTED).map((trial) => `${label(trial)}, for ${duration(now() - trial.since)}: ${trial.waits}`);
  if (waiting.length > LISTED) texts.push(`and ${plural(waiting.length - LISTED, "trial")} more`);
  lines($("waiting"), texts, "No trial waits.");
  lines($("news"), [...model.news].reverse().map(([at, text]) => `${duration(at)}  ${text}`), "Nothing so far.");
}

function drawServices() {
  const services = $("services");
  services.hidden = !model.services.length;
  while (services.children.length > model.services.length) services.lastChild.remove();
  model.services.forEach((service, place) => {
    const shown = services.children[place] || services.appendChild($("service").content.firstElementChild.cloneNode(true));
    put(shown.querySelector("h2"), `Service ${service.name}`.trim());
    shown.querySelector(".scroll").ariaLabel = `requests ${service.name}`.trim();
    put(shown.querySelector("p"), `It ${service.state}. Since its start: ${service.title}.`);
    table(shown.querySelector("table"), service.columns, service.rows);
  });
}

// What is asked for again and again is not asked for while an answer is pending: a browser has few connections.
const pending = new Set();
async function once(ask) {
  if (pending.has(ask)) return;
  pending.add(ask);
  try {
    await ask();
  } finally {
    pending.delete(ask);
  }
}

// Cells stay, and with them what has the keyboard's focus.
function table(element, titles, rows, pick) {
  const head = element.tHead.rows[0], body = element.tBodies[0];
  if (!head.cells.length) head.append(...titles.map((title, place) => make("th", title, place ? "" : "text first")));
  while (body.rows.length > rows.length) body.lastChild.remove();
  rows.forEach((row, which) => {
    const line = body.rows[which] || body.appendChild(make("tr"));
    row.forEach((text, place) => {
      const cell = line.cells[place] || line.appendChild(make("td", "", place ? "" : "text first"));
      if (place || !pick) return put(cell, text);
      const button = cell.firstElementChild || cell.appendChild(make("button"));
      button.type = "button";
      button.onclick = () => pick(which);
      put(button, text);
    });
  });
}

// --- several runs

async function drawOverview() {
  let runs;
  try {
    runs = await (await fetch("api/runs")).json();
  } catch {
    stale = "The page's server does not answer: start `fluidtune view` again. What is shown is as it was.";
    return draw();
  }
  if (!comparing) return;
  const share = (part) => `${Math.round(100 * part)} %`;
  const how = (run) => run.trouble || (run.over ? "ended" : run.died ? "its driver has died" : run.silence > SILENCE ? "silent" : "running");
  table($("overview-table"), ["run", "state", "algorithm", "trials", "iterations", "metric", "best", "time", "devices", "devices held", "began"],
    runs.map((run) => [run.key, how(run), run.algorithm || "", String(run.trials), String(run.iterations), run.metric || "",
      run.best ? number(run.best[1]) : "", duration(run.seconds), String(run.devices), share(run.use),
      run.origin ? new Date(1000 * run.origin).toLocaleString() : ""]), (which) => show(runs[which].key));
  // The best value so far over the time since each run's start, of the runs with the newest run's metric.
  const metric = runs.find((run) => run.records.length)?.metric;
  const drawn = runs.filter((run) => run.metric === metric && run.records.length).slice(0, PALETTE.length);
  const farthest = { min: "lowest", max: "highest" }[runs.find((run) => run.metric === metric)?.mode] || "";
  put($("overview-title"), metric ? `All runs: ${farthest} ${metric} so far` : "All runs");
  const times = [...new Set(drawn.flatMap((run) => [...run.records.map(([at]) => at), run.seconds]))].sort((one, other) => one - other);
  const values = drawn.map((run) => {
    let place = -1;
    return times.map((at) => {
      while (place + 1 < run.records.length && run.records[place + 1][0] <= at) place++;
      return place < 0 || at > run.seconds ? null : run.records[place][1];
    });
  });
  plots["overview-plot"]?.destroy();
  delete plots["overview-plot"];
  if (!drawn.length) return;
  const paths = uPlot.paths.stepped({ align: 1 });
  plot("overview-plot", [times, ...values], drawn.map((run, place) => ({
    label: run.key, stroke: PALETTE[place], width: 1.8, paths, points: { show: false }, value: (plot, found) => (found === null || found === undefined ? "–" : number(found)),
  })), "time");
}

function compare(on) {
  comparing = on;
  $("overview").hidden = !on;
  $("run").hidden = on;
  $("compare").setAttribute("aria-pressed", String(on));
  if (on) once(drawOverview);
  draw();
}

function show(run) {
  leave();
  sort = null;
  location.hash = encodeURIComponent(run);
  $("runs").value = run;
  compare(false);
  follow(run);
}

// --- the start

function listen() {
  for (const [text, seconds] of SPANS) {
    const button = $("spans").appendChild(make("button", text));
    button.type = "button";
    button.setAttribute("aria-pressed", String(seconds === span));
    button.onclick = () => {
      span = seconds;
      for (const each of $("spans").children) each.setAttribute("aria-pressed", String(each === button));
      draw();
    };
  }
  $("lanes").onpointermove = point;
  $("lanes").onclick = (event) => {
    const box = pointed(event);
    if (box) choose(model.trials[box.trial].id);
  };
  $("rows-box").onscroll = () => drawRows();
  $("filter").oninput = () => { filter = $("filter").value; $("rows-box").scrollTop = 0; draw(); };
  const trialAt = (event) => event.target.closest("tr[data-trial]")?.dataset.trial;
  // A row may get another trial between the press and the release of a button.
  $("rows").onpointerdown = (event) => { pressed = trialAt(event); };
  $("rows").onclick = (event) => {
    const id = (event.detail && pressed) || trialAt(event);
    if (id) choose(id);
  };
  $("rows").onkeydown = (event) => {
    const page = Math.floor($("rows-box").clientHeight / ROW_HEIGHT) - 2;
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -listed.length, End: listed.length }[event.key];
    if (!by || !event.target.closest("tbody")) return;
    event.preventDefault();
    move(by);
  };
  $("close").onclick = leave;
  $("steer").onsubmit = (event) => { event.preventDefault(); steer("clone"); };
  for (const kind of ["stop", "keep"]) $(kind).onclick = () => steer(kind);
  document.onkeydown = (event) => { if (event.key === "Escape") leave(); };
  $("runs").onchange = () => show($("runs").value);
  $("compare").onclick = () => compare(!comparing);
  if (!snapshot) document.onvisibilitychange = listenTo;
  window.onresize = () => { draw(); if (open) refresh(false); };
  matchMedia("(prefers-color-scheme: dark)").onchange = () => { if (open) choose(open); if (comparing) once(drawOverview); draw(); };
  point({ clientX: -1, clientY: -1 });
  // Clocks go on between two increments; the table of all runs is asked for again.
  setInterval(() => { if (!document.hidden && model.opened && live()) draw(); }, 1000);
  setInterval(() => { if (comparing && !document.hidden) once(drawOverview); }, ANEW);
}

async function start() {
  begin();
  listen();
  const [run, trial] = location.hash.slice(1).split("/").map(decodeURIComponent);
  if (snapshot) {
    take(snapshot.run);
  } else {
    const keys = await (await fetch("api/keys")).json();
    $("nav").hidden = keys.length < 2;
    $("runs").replaceChildren(...keys.map((each) => { const option = make("option", each); option.value = each; return option; }));
    const first = keys.includes(run) ? run : keys[0] ?? "";
    $("runs").value = first;
    follow(first);
    if (keys.length > 1 && !run) compare(true);
  }
  if (trial) {
    let looks = 100; // while the tab is seen: ten seconds
    const wait = setInterval(() => {
      if (!find(trial) && (document.hidden || looks-- > 0)) return;
      clearInterval(wait);
      if (find(trial)) choose(trial);
    }, 100);
  }
}

start();
