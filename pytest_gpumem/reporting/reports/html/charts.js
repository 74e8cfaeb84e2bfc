// The report's charts: turn a chart's data into plotly's data and layout, in a theme's colours, without changing the page.
"use strict";
const CHARTS = (() => {
  const LONGEST = 40;

  // plotly reads texts as its own markup, so tags and formulas are escaped.
  const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", $: "&#36;" };
  const plain = (text) => text.replace(/[&<>$]/g, (character) => ENTITIES[character]);
  const label = (text) => plain(text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text);

  function layoutOf(theme, more) {
    const axis = {
      gridcolor: theme("line"), linecolor: theme("line"), zerolinecolor: theme("line"), automargin: true,
      tickfont: { color: theme("muted") }, fixedrange: matchMedia("(pointer: coarse)").matches,
    };
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: theme("ink") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      margin: { l: 8, r: 16, t: 28, b: 8 },
      legend: { orientation: "h", x: 0, y: -0.22, yanchor: "top", traceorder: "normal" },
      hoverlabel: {
        bgcolor: theme("paper"), bordercolor: theme("line"), font: { color: theme("ink") }, align: "left", namelength: -1,
      },
      height: more.height, shapes: more.shapes, annotations: more.annotations, hovermode: more.hovermode || "closest",
      xaxis: { ...axis, ...more.xaxis },
      yaxis: { ...axis, ...more.yaxis },
    };
  }

  const titled = (text, theme) => ({ text, font: { size: 13, color: theme("muted") }, standoff: 8 });

  return {
    over_time(chart, theme, narrow) {
      const data = chart.series.map(({ name, category, y }) => ({
        type: "scatter", mode: "lines", name, x: chart.time, y, stackgroup: "one",
        line: { shape: "hv", width: 0 }, fillcolor: theme(`c-${category.replace(" ", "-")}`),
        hovertemplate: `${name} %{y:,.4~g} ${chart.unit}<extra></extra>`,
      }));
      // The line makes peaks visible that are narrower than a pixel.
      data.push({
        type: "scatter", mode: "lines", name: "total", x: chart.time, showlegend: false,
        y: chart.time.map((_, at) => chart.series.reduce((sum, { y }) => sum + y[at], 0)),
        line: { shape: "hv", width: 1, color: theme("outline") }, hovertemplate: `total %{y:,.4~g} ${chart.unit}<extra></extra>`,
      });
      data.push({
        type: "scatter", mode: "markers", x: [chart.peak.x], y: [chart.peak.y], name: "peak", showlegend: false,
        marker: { color: theme("ink"), size: 9, symbol: "diamond-open", line: { width: 2 } },
        hovertemplate: `peak ${chart.peak.text}<extra></extra>`,
      });
      const end = chart.time[chart.time.length - 1] || 1;
      for (const { name, y } of chart.lines) {
        data.push({
          type: "scatter", mode: "lines", name, x: [0, end], y: [y, y], hoverinfo: "skip",
          line: { color: theme("ink"), width: 1.5, dash: name.startsWith("budget") ? "dot" : "dash" },
        });
      }
      const highest = Math.max(chart.peak.y, ...chart.lines.map(({ y }) => y / 1.1));
      const bands = chart.phases.map(({ begin, end: until }, number) => ({
        type: "rect", xref: "x", yref: "paper", x0: begin, x1: until, y0: 0, y1: 1, layer: "below", line: { width: 0 },
        fillcolor: theme(number % 2 ? "band" : "band-too"),
      }));
      const annotations = chart.phases
        .filter(({ begin, end: until }) => (until - begin) / end > (narrow ? 0.15 : 0.06))
        .map(({ name, begin, end: until }) => ({
          text: label(name), x: (begin + until) / 2, y: 1, xref: "x", yref: "paper", yanchor: "bottom", showarrow: false,
          font: { color: theme("muted"), size: 12 },
        }));
      const right = chart.peak.x > end / 2;
      annotations.push({
        text: `peak ${plain(chart.peak.text)}`, x: chart.peak.x, y: chart.peak.y, showarrow: false,
        xanchor: right ? "right" : "left", xshift: right ? -10 : 10, yanchor: "bottom", yshift: 4,
        bgcolor: theme("paper"), borderpad: 2, font: { color: theme("ink"), size: 12 },
      });
      return {
        data,
        layout: layoutOf(theme, {
          height: narrow ? 380 : 360, shapes: bands, annotations, hovermode: "x unified",
          xaxis: { title: titled("time while recorded", theme), ticksuffix: ` ${chart.clock}`, range: [0, end], showgrid: false, nticks: narrow ? 4 : 10 },
          yaxis: { ticksuffix: ` ${chart.unit}`, rangemode: "tozero", range: [0, 1.2 * highest || 1], ...(chart.unit === "B" && chart.peak.y < 8 ? { dtick: 1 } : {}) },
        }),
      };
    },

    rounds(chart, theme, narrow) {
      const data = [], shapes = [];
      // Without whole-number ticks plotly would label half a round as a round.
      let begin = 1;
      for (const [number, sample] of chart.samples.entries()) {
        const last = begin + sample.y.length - 1;
        const which = chart.samples.length > 1 ? `, sample ${number + 1}` : "";
        const rounds = sample.y.map((y, at) => ({ x: begin + at, y, why: sample.disturbed[at] }));
        const kinds = [
          [rounds.filter(({ why }) => why === null), "round", "circle", theme("accent")],
          [rounds.filter(({ why }) => why !== null), "disturbed round", "x-thin", theme("muted")],
        ];
        for (const [some, name, symbol, color] of kinds) {
          if (!some.length) continue;
          data.push({
            type: "scatter", mode: "markers", name: name + which, x: some.map(({ x }) => x), y: some.map(({ y }) => y),
            marker: { symbol, color, size: 8, line: { width: symbol === "circle" ? 0 : 2, color } },
            text: some.map(({ why }) => (why === null ? "" : `<br>${plain(why)}`)),
            hovertemplate: `round %{x}: %{y:.4~g} ${chart.unit}%{text}<extra></extra>`,
          });
        }
        data.push({
          type: "scatter", mode: "lines", name: "median" + which, x: [begin - 0.5, last + 0.5], y: [sample.median, sample.median],
          line: { color: theme("accent"), width: 2 }, hovertemplate: `median %{y:.4~g} ${chart.unit}<extra></extra>`,
        });
        shapes.push({
          type: "rect", xref: "x", yref: "y", x0: begin - 0.5, x1: last + 0.5, y0: sample.low, y1: sample.high,
          layer: "below", line: { width: 0 }, fillcolor: theme("interval"),
        });
        data.push({
          type: "scatter", mode: "markers", name: "95 % interval of the median" + which, x: [null], y: [null],
          marker: { symbol: "square", size: 12, color: theme("interval") },
        });
        begin = last + 1;
      }
      if (chart.baseline !== null) {
        data.push({
          type: "scatter", mode: "lines", name: "baseline's median", x: [0.5, begin - 0.5], y: [chart.baseline, chart.baseline],
          line: { color: theme("ink"), width: 1.5, dash: "dash" }, hovertemplate: `baseline %{y:.4~g} ${chart.unit}<extra></extra>`,
        });
      }
      return {
        data,
        layout: layoutOf(theme, {
          height: narrow ? 340 : 280, shapes,
          xaxis: { title: titled("round", theme), range: [0.5, begin - 0.5], showgrid: false, zeroline: false, tickformat: "d", ...(begin <= 12 ? { dtick: 1 } : { nticks: narrow ? 5 : 12 }) },
          yaxis: { ticksuffix: ` ${chart.unit}`, nticks: 5 },
        }),
      };
    },

    matrix(chart, theme, narrow) {
      const front = chart.points.filter(({ efficient }) => efficient).sort((one, other) => one.saving - other.saving);
      const trace = (points, name, symbol, color, position) => ({
        type: "scatter", mode: narrow ? "markers" : "markers+text", name, textposition: position,
        x: points.map(({ saving }) => saving), y: points.map(({ cost }) => cost),
        text: points.map(({ config }) => label(config)),
        hovertext: points.map(({ config, text }) => `${plain(config)}<br>${plain(text)}`),
        marker: { symbol, color, size: 11, line: { width: 2, color } }, cliponaxis: false,
        textfont: { color: theme("ink"), size: 12 },
        hovertemplate: "%{hovertext}<br>saves %{x:+.1f} %, costs %{y:+.1f} %<extra></extra>",
      });
      const data = [
        {
          type: "scatter", mode: "lines", name: "Pareto front", x: front.map(({ saving }) => saving),
          y: front.map(({ cost }) => cost), line: { color: theme("accent"), width: 1.5, dash: "dot" }, hoverinfo: "skip",
        },
        trace(front, "no other beats it", "circle", theme("accent"), "bottom center"),
        trace(chart.points.filter(({ efficient }) => !efficient), "beaten by another", "circle-open", theme("muted"), "top center"),
      ].filter(({ x }) => x.length);
      const savings = chart.points.map(({ saving }) => saving), costs = chart.points.map(({ cost }) => cost);
      const padded = (values, share) => {
        const [low, high] = [Math.min(...values), Math.max(...values)];
        const more = share * (high - low || 10);
        return [low - more, high + more];
      };
      return {
        data,
        layout: layoutOf(theme, {
          height: narrow ? 380 : 420,
          xaxis: { title: titled(`memory saved against ${label(chart.first)}`, theme), ticksuffix: " %", range: padded(savings, narrow ? 0.1 : 0.22), nticks: narrow ? 5 : 10 },
          yaxis: { title: titled("time it costs", theme), ticksuffix: " %", range: padded(costs, 0.18), nticks: 6 },
        }),
      };
    },
  };
})();
