// Show the values of a chart at the pointer.
for (const chart of document.querySelectorAll(".chart")) {
  const [xs, steps, ...lines] = JSON.parse(chart.dataset.points);
  const names = JSON.parse(chart.dataset.names);
  const plot = chart.querySelector(".plot");
  const rule = Object.assign(document.createElement("span"), { className: "rule", hidden: true });
  const tip = Object.assign(document.createElement("span"), { className: "tip", hidden: true });
  plot.append(rule, tip);
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * 1000;
    const nearest = xs.reduce((best, x, i) => (Math.abs(x - at) < Math.abs(xs[best] - at) ? i : best), 0);
    const texts = lines.map((line, i) => {
      const value = line[nearest];
      const text = value === null ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
      return `${lines.length > 1 ? names[i] + "  " : ""}${text}${chart.dataset.unit}`;
    });
    tip.textContent = [`step ${steps[nearest].toLocaleString("en")}`, ...texts].join("\n");
    rule.hidden = tip.hidden = false;
    rule.style.left = `${xs[nearest] / 10}%`;
    const left = (xs[nearest] / 1000) * box.width;
    tip.style.left = `${Math.max(0, left + tip.offsetWidth + 12 < box.width ? left + 10 : left - tip.offsetWidth - 10)}px`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { rule.hidden = tip.hidden = true; });
}
