"use strict";
// Progress of the search and lineage of the winner. Colours are the style sheet's: light and dark need no new drawing.
const data = JSON.parse(document.getElementById("figures").textContent);
const colourOf = (family) => (data.colours[family] ? `var(--${data.colours[family]})` : "var(--grey)");
const valueText = (value) => (data.measured ? `${d3.format(".2f")(value)} µs` : d3.format(",.5~r")(value));
const unit = data.measured ? "median, µs per call" : "relative cost (no time)";
const axis = { fontSize: 11, color: "var(--soft)" };
// A logarithm has too few round numbers in less than a factor of 4.
const scaleOf = (low, high) => (high / low > 4 ? "log" : "linear");
const tickText = d3.format(data.measured ? "~g" : "~s");

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function toggle(text, pressed, act, colourClass) {
  const button = element("button", { type: "button", "aria-pressed": pressed }, text);
  if (colourClass) button.prepend(element("i", { class: `swatch ${colourClass}` }));
  button.addEventListener("click", () => act(button));
  return button;
}

const progress = { place: document.getElementById("progress"), hidden: new Set(), byTime: false };

function drawProgress() {
  if (!progress.place) return;
  const p = data.progress,
    width = progress.place.clientWidth,
    narrow = width < 600;
  const last = p.seconds.at(-1),
    [step, name] = last > 7200 ? [3600, "h"] : last > 180 ? [60, "min"] : [1, "s"];
  const rows = p.trial.map((trial, i) => ({
    trial,
    index: i,
    x: progress.byTime ? p.seconds[i] / step : trial,
    family: p.family[i],
    value: p.value[i],
    improved: p.improved[i],
  }));
  const best = rows.filter((row) => row.improved);
  if (best.length) best.push({ ...best.at(-1), x: rows.at(-1).x });
  const outside = !narrow && p.peers.length > 0;
  const inside = (row) => row.value <= p.high && !progress.hidden.has(row.family);
  const options = {
    width,
    height: narrow ? 300 : 380,
    ariaLabel: "Progress of the search",
    marginLeft: 48,
    marginRight: outside ? 140 : 12,
    marginTop: 22,
    marginBottom: 38,
    style: axis,
    x: {
      label: progress.byTime ? `time since the study was made, ${name}` : "trial",
      nice: true,
      // no trial has the number 1.5
      tickFormat: progress.byTime ? undefined : (x) => (Number.isInteger(x) ? x.toLocaleString("en-US") : ""),
      labelArrow: "none",
      labelAnchor: "center",
    },
    y: {
      type: scaleOf(p.low, p.high),
      domain: [p.low, p.high],
      label: unit,
      grid: true,
      tickFormat: tickText,
      labelArrow: "none",
    },
    marks: [
      Plot.ruleY(p.peers, { y: "value", stroke: "var(--soft)", strokeDasharray: "4 3" }),
      Plot.dot(rows.filter(inside), {
        x: "x",
        y: "value",
        r: narrow ? 2.5 : 3.2,
        fill: (row) => colourOf(row.family),
        fillOpacity: 0.75,
      }),
      Plot.line(best, { x: "x", y: "value", curve: "step-after", stroke: "var(--text)", strokeWidth: 2 }),
      Plot.text(p.peers, {
        y: "value",
        text: (peer) => `${peer.name} ${valueText(peer.value)}`,
        frameAnchor: "right",
        ...(outside ? { textAnchor: "start", dx: 6 } : { textAnchor: "end", dy: -6 }),
        fill: "var(--text)",
        stroke: "var(--card)",
        strokeWidth: 4,
        paintOrder: "stroke",
      }),
      Plot.tip(
        rows.filter(inside),
        Plot.pointer({
          x: "x",
          y: "value",
          fill: "var(--card)",
          stroke: "var(--grey)",
          title: (row) =>
            `trial ${row.trial}, ${row.family}\n${valueText(row.value)}${row.improved ? "\na new best" : ""}`,
        }),
      ),
    ],
  };
  const plot = Plot.plot(options);
  plot.addEventListener("click", () => plot.value && showTrial(plot.value.index));
  progress.place.replaceChildren(named(plot));
}

// Screen readers take a drawing with a label for one picture.
function named(plot) {
  plot.setAttribute("role", "img");
  return plot;
}

// The trial of a point: its config, and the source where the page holds it.
function showTrial(index) {
  const p = data.progress,
    trial = p.trial[index],
    options = p.config[index].map((value, i) => [p.names[p.family[index]][i], value]).filter(([, value]) => value !== null);
  const text = [`--family ${p.family[index]}`, ...options.map(([name, value]) => `--set ${name}=${value}`)].join(" ");
  const said = [element("b", {}, `trial ${trial}`), ` ${p.family[index]}, ${valueText(p.value[index])} `];
  if (trial === data.winner) said.push(element("a", { href: "#source" }, "its source"));
  else said.push(element("code", {}, `evoattn show ${trial} --source`));
  document.getElementById("trial").replaceChildren(
    element("p", {}, ...said),
    element("pre", { class: "settings" }, ...text.split(" --").map((word, i) => element("span", {}, (i ? "--" : "") + word))),
  );
}

function progressControls() {
  const place = document.getElementById("progress-controls");
  if (!place) return;
  const axes = [
    ["by trial", false],
    ["by time", true],
  ].map(([text, byTime]) =>
    toggle(text, byTime === progress.byTime, () => {
      progress.byTime = byTime;
      axes.forEach((button, i) => button.setAttribute("aria-pressed", (i === 1) === byTime));
      drawProgress();
    }),
  );
  const families = Object.keys(data.colours).filter((family) => data.progress.family.includes(family));
  const shown = families.map((family) =>
    toggle(
      family,
      true,
      (button) => {
        if (!progress.hidden.delete(family)) progress.hidden.add(family);
        button.setAttribute("aria-pressed", !progress.hidden.has(family));
        drawProgress();
      },
      data.colours[family],
    ),
  );
  place.replaceChildren(element("span", { class: "choice" }, ...axes), element("span", { class: "gap" }), ...shown);
}

// The lineage as version control draws commits: each trial is a row of the list and a dot in a lane, with a curve to
// each of its parents.
function drawLineage() {
  const list = document.getElementById("lineage");
  if (!list) return;
  list.querySelector("svg")?.remove();
  const items = [...list.querySelectorAll("li")],
    places = new Map(),
    lanes = [],
    gap = 13,
    wait = [];
  const rows = items.map((item) => ({
    trial: +item.dataset.trial,
    parents: item.dataset.parents.split(" ").filter(Boolean).map(Number),
    family: item.dataset.family,
  }));
  const known = new Set(rows.map((row) => row.trial));
  for (const row of rows) {
    let lane = lanes.indexOf(row.trial);
    if (lane < 0) lane = lanes.indexOf(null) < 0 ? lanes.length : lanes.indexOf(null);
    lanes.forEach((trial, i) => {
      if (trial === row.trial) lanes[i] = null;
    });
    lanes[lane] = null;
    places.set(row.trial, lane);
    for (const parent of row.parents.filter((trial) => known.has(trial) && !lanes.includes(trial))) {
      const free = lanes.indexOf(null);
      if (free < 0) lanes.push(parent);
      else lanes[free] = parent;
    }
    wait.push(lanes.length);
  }
  const width = Math.max(...wait, 1) * gap + 12;
  list.style.setProperty("--lanes", `${width + 6}px`);
  const spot = new Map(rows.map((row, i) => [row.trial, [places.get(row.trial) * gap + 9, items[i].offsetTop + 15]]));
  const edges = rows.flatMap((row) =>
    row.parents
      .filter((parent) => spot.has(parent))
      .map((parent) => {
        const [x, y] = spot.get(row.trial),
          [px, py] = spot.get(parent),
          bend = Math.min(34, (py - y) / 2);
        return `M${x},${y}C${x},${y + bend} ${px},${y + bend / 2} ${px},${y + bend * 1.5}V${py}`;
      }),
  );
  const svg = d3.create("svg").attr("width", width).attr("height", list.offsetHeight).attr("aria-hidden", "true");
  svg
    .append("g")
    .attr("fill", "none")
    .attr("stroke", "var(--grey)")
    .attr("stroke-width", 1.5)
    .selectAll("path")
    .data(edges)
    .join("path")
    .attr("d", (d) => d);
  svg
    .selectAll("circle")
    .data(rows)
    .join("circle")
    .attr("cx", (row) => spot.get(row.trial)[0])
    .attr("cy", (row) => spot.get(row.trial)[1])
    .attr("r", (row, i) => (i ? 4.5 : 6))
    .attr("fill", (row) => colourOf(row.family))
    .attr("stroke", "var(--card)")
    .attr("stroke-width", 2);
  list.prepend(svg.node());
}
