/* Four pictures that answer a slider. Without JavaScript the still picture above each stays. */
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const COLORS = { weights: "#0072b2", gradients: "#56b4e9", optimizer: "#cc79a7", forward: "#0072b2", backward: "#56b4e9" };

function make(tag, attributes, parent, text) {
  const node = tag.startsWith("svg:") ? document.createElementNS(SVG, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function units(value, names, base) {
  let place = 0;
  while (value >= base && place < names.length - 1) [value, place] = [value / base, place + 1];
  return `${value < 10 && value % 1 ? value.toFixed(1) : Math.round(value)} ${names[place]}`;
}
const bytes = (value) => units(value, ["bytes", "KiB", "MiB", "GiB", "TiB"], 1024);
const time = (seconds) => units(seconds * 1e6, ["µs", "ms", "s"], 1000);

/* A frame: sliders, an image of `height`, a sentence. draw(image, values) returns the sentence. */
function picture(parent, title, sliders, height, draw) {
  make("strong", {}, parent, title);
  const rows = make("div", { class: "sliders" }, parent);
  const image = make("svg:svg", { viewBox: `0 0 700 ${height}`, role: "img", "aria-label": title }, parent);
  const sentence = make("p", { "aria-live": "polite" }, parent);
  const inputs = sliders.map(([name, values, first, text = String]) => {
    const row = make("label", {}, rows, name + " ");
    const input = make("input", { type: "range", min: 0, max: values.length - 1, value: values.indexOf(first) }, row);
    const output = make("output", {}, row);
    return { input, output, values, text };
  });
  function show() {
    image.replaceChildren();
    const chosen = inputs.map(({ input, values }) => values[input.value]);
    inputs.forEach(({ input, output, text }, i) => {
      output.textContent = text(chosen[i]);
      input.setAttribute("aria-valuetext", text(chosen[i]));
    });
    sentence.textContent = draw(image, chosen);
  }
  inputs.forEach(({ input }) => input.addEventListener("input", show));
  show();
}

const rect = (image, x, y, width, height, fill) =>
  make("svg:rect", { x, y, width, height, fill, stroke: "#222", "stroke-width": 0.5 }, image);
const label = (image, x, y, text, more) => make("svg:text", { x, y, "font-size": 12, ...more }, image, text);

/* The state of AdamW in 32 bit: 4 bytes a weight for weights and gradients, 8 for AdamW. */
function zero(parent) {
  const { models, gpus } = NUMBERS;
  const counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  picture(parent, "ZeRO: bytes that each GPU keeps for weights, gradients and AdamW",
    [["model", Object.keys(models), "gpt-7b"], ["GPUs", counts, 8]], 190, (image, [name, n]) => {
      const weights = models[name];
      const forms = { "DDP": [1, 1, 1], "ZeRO-1": [1, 1, n], "ZeRO-2": [1, n, n], "ZeRO-3": [n, n, n] };
      const most = 16 * weights;
      const fits = [];
      Object.entries(forms).forEach(([form, parts], row) => {
        let x = 70, total = 0;
        [["weights", 4], ["gradients", 4], ["optimizer", 8]].forEach(([part, size], i) => {
          const amount = size * weights / parts[i];
          rect(image, x, 8 + 34 * row, 530 * amount / most, 24, COLORS[part]);
          x += 530 * amount / most;
          total += amount;
        });
        label(image, 4, 25 + 34 * row, form);
        label(image, x + 6, 25 + 34 * row, bytes(total));
        const enough = Object.entries(gpus).find(([, memory]) => memory > total);
        fits.push(`${form} ${enough ? "leaves room on " + enough[0] : "is too large for an A100-80GB"}`);
      });
      ["weights", "gradients", "optimizer"].forEach((part, i) => {
        rect(image, 70 + 120 * i, 155, 14, 14, COLORS[part]);
        label(image, 90 + 120 * i, 167, part);
      });
      return `32 bit, without activations: ${fits.join("; ")}.`;
    });
}

/* Each forward takes 1 and each backward 2; messages take no time. */
function schedule(kind, stages, batches) {
  const orders = [...Array(stages).keys()].map((stage) => {
    const order = [];
    const ahead = kind === "1F1B" ? Math.min(batches, stages - stage) : batches;
    let f = 0, b = 0;
    while (f < ahead) order.push(["f", f++]);
    while (b < batches) {
      order.push(["b", kind === "1F1B" ? b : batches - 1 - b]);
      b++;
      if (f < batches) order.push(["f", f++]);
    }
    return order;
  });
  const ends = {}, free = Array(stages).fill(0), next = Array(stages).fill(0), bars = [];
  let left = 2 * stages * batches;
  while (left) {
    for (let stage = 0; stage < stages; stage++) {
      while (next[stage] < 2 * batches) {
        const [way, batch] = orders[stage][next[stage]];
        const before = way === "f" ? (stage ? `f${stage - 1}.${batch}` : null)
          : (stage < stages - 1 ? `b${stage + 1}.${batch}` : `f${stage}.${batch}`);
        if (before && ends[before] === undefined) break;
        const start = Math.max(free[stage], before ? ends[before] : 0);
        const length = way === "f" ? 1 : 2;
        bars.push({ stage, way, batch, start, length });
        free[stage] = ends[`${way}${stage}.${batch}`] = start + length;
        next[stage]++;
        left--;
      }
    }
  }
  return { bars, end: Math.max(...free) };
}

function pipeline(parent) {
  const upTo = (most) => [...Array(most).keys()].map((n) => n + 1);
  picture(parent, "A pipeline's step: stages, micro-batches, order",
    [["stages", upTo(8).slice(1), 4], ["micro-batches", upTo(16), 4], ["order", ["GPipe", "1F1B"], "GPipe"]], 230,
    (image, [stages, batches, kind]) => {
      const { bars, end } = schedule(kind, stages, batches);
      const height = 200 / stages, scale = 630 / end;
      for (let stage = 0; stage < stages; stage++) {
        label(image, 2, (stage + 0.6) * height, `stage ${stage}`);
        make("svg:rect", { x: 60, y: stage * height + 2, width: 630, height: height - 4, fill: "#eee" }, image);
      }
      for (const { stage, way, batch, start, length } of bars) {
        rect(image, 60 + start * scale, stage * height + 2, length * scale, height - 4, COLORS[way === "f" ? "forward" : "backward"]);
        if (length * scale > 14)
          label(image, 60 + (start + length / 2) * scale, (stage + 0.6) * height, batch + 1,
            { "text-anchor": "middle", fill: way === "f" ? "white" : "black" });
      }
      label(image, 60, 222, "dark: forward, light: backward (twice as long), grey: the stage waits");
      const waits = Math.round(100 * (1 - 3 * batches / end));
      const kept = kind === "1F1B" ? Math.min(stages, batches) : batches;
      return `A stage waits ${waits}% of the step; stage 0 keeps the activations of ${kept} micro-batch${kept > 1 ? "es" : ""}. Messages take no time here.`;
    });
}

function mesh(parent) {
  const powers = [1, 2, 4, 8];
  picture(parent, "64 GPUs, 8 in a node: who talks to GPU 0?",
    [["tensor parallel", powers, 8], ["pipeline stages", powers, 2]], 300, (image, [tensor, stages]) => {
      const data = 64 / tensor / stages;
      const groups = { tensor: new Set(), data: new Set(), pipeline: new Set() };
      for (let gpu = 0; gpu < 64; gpu++) {
        const t = gpu % tensor, d = Math.floor(gpu / tensor) % data, s = Math.floor(gpu / tensor / data);
        const same = [!d && !s && "tensor", !t && !s && "data", !t && !d && "pipeline"].filter(Boolean);
        const fill = gpu === 0 ? "#222" : { tensor: "#e69f00", data: "#56b4e9", pipeline: "#cc79a7" }[same[0]] || "#eee";
        const node = Math.floor(gpu / 8);
        same.forEach((name) => groups[name].add(node));
        const x = 10 + (node % 4) * 172, y = 8 + Math.floor(node / 4) * 130;
        if (gpu % 8 === 0) {
          make("svg:rect", { x, y, width: 164, height: 118, fill: "none", stroke: "#888" }, image);
          label(image, x + 6, y + 112, `node ${node}`, { "font-size": 11 });
        }
        const square = rect(image, x + 6 + (gpu % 4) * 39, y + 6 + (Math.floor(gpu / 4) % 2) * 46, 35, 42, fill);
        make("svg:title", {}, square, `GPU ${gpu}: part ${t} of the layers, stage ${s}, replica ${d}`);
      }
      [["#e69f00", "tensor: in each layer"], ["#56b4e9", "data: gradients, once a step"], ["#cc79a7", "pipeline: activations between stages"]]
        .forEach(([color, text], i) => {
          rect(image, 10 + 225 * i, 272, 14, 14, color);
          label(image, 30 + 225 * i, 284, text);
        });
      const nodes = (name) => groups[name].size === 1 ? "1 node" : `${groups[name].size} nodes`;
      return `${tensor} × tensor, ${data} × data, ${stages} × pipeline = 64. GPU 0's groups: tensor on ` +
        `${nodes("tensor")}, data on ${nodes("data")}, pipeline on ${nodes("pipeline")}.`;
    });
}

function allreduce(parent) {
  const { ranks, sizes, seconds } = NUMBERS;
  picture(parent, "An all-reduce: seconds against message and GPUs (simulated)",
    [["cluster", Object.keys(seconds), Object.keys(seconds)[1]], ["GPUs", ranks, 16], ["message", sizes, 4 ** 12, bytes]], 280,
    (image, [cluster, n, size]) => {
      const x = (i) => 60 + 620 * i / (sizes.length - 1), y = (s) => 240 - 225 * (Math.log10(s) + 5.3) / 6.4;
      for (let power = -5; power <= 1; power++) {
        make("svg:line", { x1: 60, x2: 680, y1: y(10 ** power), y2: y(10 ** power), stroke: "#ddd" }, image);
        label(image, 54, y(10 ** power) + 4, time(10 ** power), { "text-anchor": "end" });
      }
      sizes.forEach((one, i) => i % 2 || label(image, x(i), 262, bytes(one), { "text-anchor": "middle" }));
      ranks.forEach((count, row) => make("svg:polyline", {
        points: seconds[cluster][row].map((s, i) => `${x(i)},${y(s)}`).join(" "), fill: "none",
        stroke: count === n ? "#0072b2" : "#bbb", "stroke-width": count === n ? 3 : 1,
      }, image));
      const i = sizes.indexOf(size), took = seconds[cluster][ranks.indexOf(n)][i];
      make("svg:circle", { cx: x(i), cy: y(took), r: 6, fill: "#d55e00" }, image);
      const sent = 2 * (n - 1) / n * size;
      return `${bytes(size)} on ${n} GPUs: ${time(took)}. In a ring each GPU sends ${bytes(sent)}; ` +
        `that is ${bytes(size / took)} of the message a second.`;
    });
}

document.addEventListener("DOMContentLoaded", () => {
  const pictures = { zero, pipeline, mesh, allreduce };
  for (const parent of document.querySelectorAll(".answers")) pictures[parent.dataset.picture](parent);
});
