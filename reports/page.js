"use strict";
// Draws the figures in the page's own colours, and again when the reader turns light into dark.
const figures = JSON.parse(document.getElementById("figures").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const text = colour("--text"), grid = colour("--line"), card = colour("--card");
  const out = structuredClone(layout);
  out.font = { ...out.font, color: text };
  out.hoverlabel = { ...out.hoverlabel, bgcolor: card, bordercolor: grid, font: { ...out.hoverlabel.font, color: text } };
  for (const axis of ["xaxis", "yaxis"]) out[axis] = { ...out[axis], gridcolor: grid, linecolor: grid, zerolinecolor: grid };
  for (const menu of out.updatemenus || []) { menu.bgcolor = card; menu.bordercolor = grid; menu.font = { color: text, size: 12 }; }
  return out;
}

function draw() {
  for (const [name, figure] of Object.entries(figures)) {
    Plotly.react(`plot-${name}`, figure.data, themed(figure.layout), { responsive: true, displaylogo: false, displayModeBar: "hover" });
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
