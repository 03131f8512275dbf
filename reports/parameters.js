"use strict";
// The parameters of one family: all at once (parallel coordinates, one row per parameter), and a slice of each.
const shownFamily = {
  name: data.samples.length ? Object.keys(data.colours).find((family) => data.slices[family]) : null,
};
const ROW = 50;

function drawParallel() {
  const place = document.getElementById("parallel");
  const sample = data.samples.find((entry) => entry.family === shownFamily.name);
  if (!place || !sample) return;
  const width = place.clientWidth;
  const names = Object.keys(sample.values).filter((name) => sample.values[name].length > 1);
  const low = sample.value[0],
    high = sample.value.at(-1),
    best = Math.max(1, Math.ceil(sample.value.length / 10));
  const timeAt = high > low ? d3.scaleLog([low, high], [0.04, 0.96]) : () => 0.5;
  // Lines of one value lie side by side; the best runs through the middle.
  const slot = (index, count, rank) => (index + 0.5 + (((rank * 0.618034 + 0.5) % 1) - 0.5) * 0.5) / count;
  const points = sample.trial
    .flatMap((trial, rank) => [
      ...names.map((name, row) => ({
        trial,
        rank,
        row,
        at: slot(sample.columns[name][rank] ?? NaN, sample.values[name].length, rank),
      })),
      { trial, rank, row: names.length, at: timeAt(sample.value[rank]) },
    ])
    .filter((point) => Number.isFinite(point.at))
    .sort((one, other) => other.rank - one.rank);
  const labels = names.flatMap((name, row) =>
    sample.values[name].map((value, i, all) => ({
      row,
      at: (i + 0.5) / all.length,
      text: value,
      first: i === sample.columns[name][0],
    })),
  );
  labels.push(
    ...[low, high].map((value) => ({
      row: names.length,
      at: timeAt(value),
      text: valueText(value),
      first: value === low,
      anchor: value === low ? "start" : "end",
    })),
  );
  const colour = colourOf(shownFamily.name),
    rankIs = (test) => points.filter((point) => test(point.rank));
  const line = (rows, options) => Plot.line(rows, { x: "at", y: "row", z: "trial", curve: "bump-y", ...options });
  place.replaceChildren(
    named(Plot.plot({
      width,
      height: (names.length + 1) * ROW + 26,
      ariaLabel: `Parameters of the right candidates of ${shownFamily.name}`,
      margin: 0,
      marginTop: 26,
      marginBottom: 26,
      marginLeft: 4,
      marginRight: 4,
      style: axis,
      x: { domain: [0, 1], axis: null },
      y: { domain: [names.length, 0], axis: null },
      marks: [
        Plot.ruleY(d3.range(names.length + 1), { stroke: "var(--line)" }),
        line(
          rankIs((rank) => rank >= best),
          { stroke: "var(--grey)", strokeOpacity: Math.min(0.5, 20 / sample.trial.length), strokeWidth: 1 },
        ),
        line(
          rankIs((rank) => rank > 0 && rank < best),
          { stroke: colour, strokeOpacity: 0.55, strokeWidth: 1.3 },
        ),
        line(
          rankIs((rank) => rank === 0),
          { stroke: "var(--text)", strokeWidth: 3 },
        ),
        Plot.text([...names, data.measured ? "time" : "relative cost"], {
          x: 0,
          y: (_, i) => i,
          text: (d) => d,
          textAnchor: "start",
          dy: -12,
          fontFamily: "ui-monospace, monospace",
          fontWeight: 600,
          fill: "var(--text)",
          stroke: "var(--card)",
          strokeWidth: 4,
        }),
        ...d3.cross([true, false], ["start", "middle", "end"]).map(([first, anchor]) =>
          Plot.text(
            labels.filter((label) => label.first === first && (label.anchor ?? "middle") === anchor),
            {
              x: "at",
              y: "row",
              text: "text",
              dy: 11,
              textAnchor: anchor,
              fontWeight: first ? 700 : 400,
              fill: first ? "var(--text)" : "var(--soft)",
              stroke: "var(--card)",
              strokeWidth: 4,
              fontSize: width < 600 ? 10 : 11,
            },
          ),
        ),
      ],
    })),
  );
}

function slice(parameter, colour, width, low, high) {
  const count = parameter.rows.length;
  const longest = Math.max(...parameter.rows.map((row) => `${row.value}`.length));
  const plot = Plot.plot({
    width,
    height: count * 20 + 26,
    ariaLabel: `Best and median by value of ${parameter.name}`,
    marginLeft: Math.max(84, 12 + 6.5 * longest),
    marginRight: 34,
    marginTop: 2,
    marginBottom: 24,
    style: axis,
    x: {
      type: scaleOf(low, high),
      domain: [low, high],
      ticks: width < 300 ? 3 : 4,
      tickFormat: tickText,
      label: null,
      grid: true,
    },
    y: { type: "band", domain: parameter.rows.map((row) => row.value), label: null, tickSize: 0 },
    marks: [
      Plot.ruleY(parameter.rows, {
        y: "value",
        x1: "best",
        x2: (row) => Math.min(row.median, high),
        stroke: colour,
        strokeOpacity: 0.45,
        strokeWidth: 4,
      }),
      Plot.tickX(
        parameter.rows.filter((row) => row.median <= high),
        { x: "median", y: "value", stroke: colour, strokeWidth: 2, inset: 2 },
      ),
      Plot.dot(parameter.rows, { x: "best", y: "value", fill: colour, r: 4.5 }),
      Plot.text(parameter.rows, {
        y: "value",
        text: (row) => `${row.trials}`,
        frameAnchor: "right",
        textAnchor: "end",
        dx: 30,
        fill: "var(--soft)",
      }),
      Plot.tip(
        parameter.rows,
        Plot.pointerY({
          x: "best",
          y: "value",
          fill: "var(--card)",
          stroke: "var(--grey)",
          title: (row) =>
            [
              `${parameter.name}=${row.value}`,
              `best ${valueText(row.best)}`,
              `median ${valueText(row.median)}`,
              `${row.trials} right candidates`,
            ].join("\n"),
        }),
      ),
    ],
  });
  const share = parameter.share == null ? "" : `${Math.round(100 * parameter.share)} %`;
  return element("div", {}, element("h4", { title: data.meanings[parameter.name] ?? "" }, parameter.name, element("span", {}, share)), named(plot));
}

function drawSlices() {
  const place = document.getElementById("slices"),
    parameters = data.slices[shownFamily.name];
  if (!place || !parameters) return;
  const columns = Math.max(1, Math.floor((place.clientWidth + 26) / 326)),
    width = (place.clientWidth - 26 * (columns - 1)) / columns;
  const rows = parameters.flatMap((parameter) => parameter.rows);
  const low = d3.min(rows, (row) => row.best),
    high = Math.max(...rows.map((row) => row.best), d3.quantile(rows, 0.9, (row) => row.median) ?? low);
  const pad = (high / low) ** 0.04;
  place.replaceChildren(
    ...parameters.map((parameter) => slice(parameter, colourOf(shownFamily.name), width, low / pad, high * pad)),
  );
  if (!parameters.length) place.textContent = "Every right candidate of this family has the same parameters.";
  document.getElementById("importance-note").textContent = data.notes[shownFamily.name] ?? "";
}

function familyControls() {
  const place = document.getElementById("family-controls");
  const families = Object.keys(data.colours).filter((family) => data.slices[family]);
  if (!place || families.length === 0) return;
  const buttons = families.map((family) =>
    toggle(
      family,
      family === shownFamily.name,
      () => {
        shownFamily.name = family;
        buttons.forEach((button, i) => button.setAttribute("aria-pressed", families[i] === family));
        drawParallel();
        drawSlices();
      },
      data.colours[family],
    ),
  );
  place.classList.add("choice");
  place.replaceChildren(...buttons);
}
