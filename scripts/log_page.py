"""Charts of runs as SVG in one HTML page that needs nothing else: no package to make it, no network to read it.

A chart is a list of Series; plot_log.py decides which there are. Colours are CSS variables, so that the page follows the
reader's light or dark mode. A small script adds a read-out under the pointer and switches runs on and off; without it the
page shows all the same numbers.
"""

import base64
import html
import json
import math
import struct
import zlib

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 290, 58, 14, 12, 36
POINTS_MAX, DOTS_MAX = 1200, 60
HEAT_COLUMNS, HEAT_ROWS_MAX, HEAT_STEPS = 360, 1400, 120


class Series:
    """x and y of one line. `style`: line, faint (raw values behind a smoothed line), dashed, dots, band (y are pairs).
    `label` is written at its end."""

    def __init__(self, run, name, x, y, style="line", label=""):
        points = [(a, b) for a, b in zip(x, y) if finite(a) and (finite(b) if style != "band" else all(map(finite, b)))]
        self.run, self.name, self.style, self.label = run, name, style, label
        self.x, self.y = [p[0] for p in points], [p[1] for p in points]


class Chart:
    """log: the y axis is; zero: it begins at 0; settled: of a long run it leaves out the heights of the first steps."""

    def __init__(self, title, series, x_name, log=False, zero=False, settled=False, note=""):
        self.title, self.x_name, self.log, self.zero, self.settled, self.note = title, x_name, log, zero, settled, note
        self.series = [s for s in series if s.x]
        if log:
            for s in self.series:
                kept = [(a, b) for a, b in zip(s.x, s.y) if b > 0]
                s.x, s.y = [p[0] for p in kept], [p[1] for p in kept]


def finite(x):
    return x is not None and math.isfinite(x)


# ---- numbers --------------------------------------------------------------------------------------------------------


def ticks(low, high, about=5):
    """Round numbers inside [low, high]."""
    span = high - low
    if span <= 0:
        return [low]
    step = 10 ** math.floor(math.log10(span / about))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step * about >= span * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low, high):
    """Powers of ten inside, with 2 and 5 where they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        found = [f * 10.0 ** d for d in decades for f in factors if low * 0.999 <= f * 10.0 ** d <= high * 1.001]
        if len(found) >= 3:
            break
    return found if len(found) > 1 else ticks(low, high, 4)


def short(x):
    """12000 -> 12k, 0.00032 -> 3.2e-4."""
    if x == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(x) >= size:
            return "%.4g%s" % (x / (1e3 if letter == "k" else size), letter)
    if abs(x) < 1e-3:
        mantissa, exponent = ("%.2e" % x).split("e")
        return "%ge%d" % (float(mantissa), int(exponent))
    return "%.4g" % x


def thinned(x, y):
    """At most POINTS_MAX points; of each stretch the lowest and the highest stay, so that no spike is lost."""
    if len(x) <= POINTS_MAX:
        return x, y
    n = POINTS_MAX // 2
    keep = []
    for i in range(n):
        part = range(i * len(x) // n, (i + 1) * len(x) // n)
        keep += sorted({min(part, key=y.__getitem__), max(part, key=y.__getitem__)})
    keep = sorted({0, len(x) - 1, *keep})
    return [x[i] for i in keep], [y[i] for i in keep]


# ---- a chart --------------------------------------------------------------------------------------------------------


def first_shown(series, chart):
    """Where the points begin that decide the height of the axis."""
    return len(series.x) // 50 if chart.settled and len(series.x) > 500 else 0


class Axes:
    def __init__(self, chart):
        self.log = chart.log
        xs = [v for s in chart.series for v in (s.x[0], s.x[-1])]
        ys = [v for s in chart.series for y in s.y[first_shown(s, chart):] for v in (y if s.style == "band" else (y,))]
        self.x0, self.x1 = min(xs), max(xs)
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 1, self.x1 + 1
        low, high = min(ys), max(ys)
        if chart.zero:
            low, high = min(low, 0), max(high, 0)
        if chart.log:
            self.y0, self.y1 = low / 1.1, high * 1.1
        else:
            pad = 0.05 * (high - low) or abs(high) * 0.1 or 1
            self.y0, self.y1 = (low if chart.zero and low == 0 else low - pad), high + pad
        self.x_ticks = ticks(self.x0, self.x1, 6)
        self.y_ticks = log_ticks(self.y0, self.y1) if chart.log else ticks(self.y0, self.y1)

    def x(self, v):
        return LEFT + (v - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, v):
        share = (math.log(v / self.y0) / math.log(self.y1 / self.y0) if self.log else (v - self.y0) / (self.y1 - self.y0))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def frame(axes, x_name, height=HEIGHT, y_labels=True):
    out = []
    for v in axes.y_ticks if y_labels else []:
        y = axes.y(v)
        out.append('<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>' % (LEFT, WIDTH - RIGHT, y, y))
        out.append('<text class="tick" x="%d" y="%.1f" text-anchor="end">%s</text>' % (LEFT - 7, y + 4, short(v)))
    for v in axes.x_ticks:
        x = axes.x(v)
        out.append('<line class="tickmark" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>' % (x, x, height - BOTTOM, height - BOTTOM + 4))
        out.append('<text class="tick" x="%.1f" y="%d" text-anchor="middle">%s</text>' % (x, height - BOTTOM + 17, short(v)))
    out.append('<line class="axis" x1="%d" x2="%d" y1="%d" y2="%d"/>' % (LEFT, WIDTH - RIGHT, height - BOTTOM, height - BOTTOM))
    out.append('<text class="tick" x="%d" y="%d" text-anchor="end">%s</text>' % (WIDTH - RIGHT, height - 5, html.escape(x_name)))
    return out


def draw(series, axes):
    colour = "c%d" % (series.run % 8)
    group = '<g data-run="%d" class="%s">%%s</g>' % (series.run, colour)
    if series.style == "band":
        low = thinned(series.x, [v[0] for v in series.y])
        high = thinned(series.x, [v[1] for v in series.y])
        outline = list(zip(*low)) + list(zip(*high))[::-1]
        return group % ('<polygon class="band" points="%s"/>' % positions(outline, axes))
    x, y = (series.x, series.y) if series.style == "dots" else thinned(series.x, series.y)
    points = list(zip(x, y))
    line = '<polyline class="%s" points="%s"/>' % (series.style, positions(points, axes))
    if (series.style == "dots" and len(points) <= DOTS_MAX) or len(points) == 1:
        line += "".join('<circle r="3" cx="%.1f" cy="%.1f"/>' % (axes.x(a), axes.y(b)) for a, b in points)
    if series.label:
        line += '<text class="label" x="%.1f" y="%.1f" text-anchor="end">%s</text>' % (
            axes.x(x[-1]) - 4, max(axes.y(y[-1]) - 8, TOP + 8), html.escape(series.label))
    return group % line


def positions(points, axes):
    return " ".join("%.1f,%.1f" % (axes.x(a), axes.y(b)) for a, b in points)


def significant(x):
    return float("%.6g" % x)


def chart_html(chart, data):
    """The figure; what the pointer reads out goes into `data`."""
    axes = Axes(chart)
    body = frame(axes, chart.x_name) + ['<g clip-path="url(#plot)">'] + [draw(s, axes) for s in chart.series] + ["</g>"]
    read = []
    for s in chart.series:
        if s.style == "faint" or s.style == "band":
            continue
        x, y = thinned(s.x, s.y)
        read.append({"run": s.run, "name": s.name, "x": [significant(v) for v in x], "y": [significant(v) for v in y]})
    data.append({"x0": axes.x0, "x1": axes.x1, "left": LEFT, "right": WIDTH - RIGHT, "width": WIDTH, "xName": chart.x_name,
                 "series": read})
    note = '<p class="note">%s</p>' % html.escape(chart.note) if chart.note else ""
    return ('<figure><figcaption>%s</figcaption>%s<svg viewBox="0 0 %d %d" role="img" aria-label="%s" data-chart="%d">%s'
            '<line class="cursor" y1="%d" y2="%d" x1="-9" x2="-9"/></svg></figure>' %
            (html.escape(chart.title), note, WIDTH, HEIGHT, html.escape(chart.title), len(data) - 1, "".join(body), TOP,
             HEIGHT - BOTTOM))


# ---- the heat map ---------------------------------------------------------------------------------------------------


def png(rows, palette):
    """8-bit PNG with a palette of (r, g, b, a); rows of palette indices."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows), 9)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"PLTE", b"".join(bytes(c[:3]) for c in palette)) +
            chunk(b"tRNS", bytes(c[3] for c in palette)) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def heat_palette():
    """Index HEAT_STEPS is the mean load and transparent; 0 is a quarter of it or less, 2 HEAT_STEPS four times it."""
    colours = []
    for i in range(2 * HEAT_STEPS + 1):
        strength = abs(i - HEAT_STEPS) / HEAT_STEPS
        colours.append(((38, 110, 214) if i < HEAT_STEPS else (226, 96, 12)) + (round(255 * strength ** 0.8),))
    return colours


def heat_level(ratio):
    """-1 for a quarter of the mean and less, 0 for the mean, 1 for four times it and more."""
    return max(-1.0, min(1.0, math.log2(ratio) / 2)) if ratio > 0 else -1.0


def heat_index(ratio):
    return HEAT_STEPS + round(heat_level(ratio) * HEAT_STEPS)


def heat_rows(loads):
    """loads: steps of layers of counts, all of one shape. Returns rows of mean load / mean, layer by layer, and the number
    of experts in a row: more than one where they would not fit; then the row has the one furthest from the mean."""
    n_layers, n_experts = len(loads[0]), len(loads[0][0])
    n_columns = min(HEAT_COLUMNS, len(loads))
    together = math.ceil(n_layers * n_experts / HEAT_ROWS_MAX)
    rows = [[] for _ in range(n_layers * math.ceil(n_experts / together))]
    per_layer = len(rows) // n_layers
    for column in range(n_columns):
        part = loads[column * len(loads) // n_columns:(column + 1) * len(loads) // n_columns]
        for layer in range(n_layers):
            sums = [sum(counts) for counts in zip(*(step[layer] for step in part))]
            mean = sum(sums) / n_experts or 1
            ratios = [value / mean for value in sums]
            for i in range(per_layer):
                group = ratios[i * together:(i + 1) * together]
                rows[layer * per_layer + i].append(max(group, key=lambda r: abs(heat_index(r) - HEAT_STEPS)))
    return rows, together


class HeatAxes:
    def __init__(self, x0, x1):
        self.x0, self.x1 = x0, x1 if x1 > x0 else x0 + 1
        self.x_ticks = ticks(self.x0, self.x1, 6)

    x = Axes.x


def heat_html(title, loads, x, x_name, layer_names, run):
    rows, together = heat_rows(loads)
    per_layer = len(rows) // len(layer_names)
    row_height = max(1.0, min(9.0, 520 / len(rows)))
    height = round(row_height * len(rows)) + TOP + BOTTOM
    bottom = height - BOTTOM
    axes = HeatAxes(x[0], x[-1])
    out = frame(axes, x_name, height, y_labels=False)
    data = base64.b64encode(png([[heat_index(r) for r in row] for row in rows], heat_palette())).decode()
    out.append('<image class="heat" x="%d" y="%d" width="%d" height="%d" preserveAspectRatio="none" '
               'href="data:image/png;base64,%s"/>' % (LEFT, TOP, WIDTH - LEFT - RIGHT, bottom - TOP, data))
    for i, name in enumerate(layer_names):
        y = TOP + i * per_layer * row_height
        out.append('<line class="axis" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/>' % (LEFT, WIDTH - RIGHT, y, y))
        if per_layer * row_height >= 11 or i % math.ceil(11 / (per_layer * row_height)) == 0:
            out.append('<text class="tick" x="%d" y="%.1f" text-anchor="end">%s</text>' %
                       (LEFT - 7, y + max(per_layer * row_height / 2, 6) + 4, html.escape(name)))
    note = "one row an expert" if together == 1 else "a row is %d experts and shows the one furthest from the mean" % together
    return ('<figure data-run="%d"><figcaption>%s</figcaption><p class="note">Tokens of an expert over the mean of its layer; '
            '%s. <span class="scale"><i>1/4</i><b></b><i>4</i></span></p><svg viewBox="0 0 %d %d" role="img" aria-label="%s">'
            '%s</svg></figure>' % (run, html.escape(title), note, WIDTH, height, html.escape(title), "".join(out)))


CLIP = ('<svg width="0" height="0" style="position:absolute"><clipPath id="plot"><rect x="%d" y="0" width="%d" height="%d"/>'
        '</clipPath></svg>' % (LEFT - 4, WIDTH - LEFT - RIGHT + 8, HEIGHT - BOTTOM + 3))

# ---- the page -------------------------------------------------------------------------------------------------------

STYLE = """
:root { color-scheme: light dark; --bg: #f6f6f3; --panel: #ffffff; --ink: #1b1e21; --muted: #5f666d; --grid: #e7e7e2;
  --line: #b9bcbf; --c0: #0a66c8; --c1: #cf4f06; --c2: #18835b; --c3: #9a3fb5; --c4: #a67c00; --c5: #0b8a9c; --c6: #c22a52;
  --c7: #5a6b7b; }
@media (prefers-color-scheme: dark) { :root { --bg: #131518; --panel: #1b1e22; --ink: #e9e7e3; --muted: #9aa2aa;
  --grid: #2c3036; --line: #4a5058; --c0: #6fb1ff; --c1: #ff9a55; --c2: #56cf9d; --c3: #d79bf0; --c4: #e5c04b; --c5: #55cfe0;
  --c6: #ff7f9f; --c7: #a9b8c6; } }
* { box-sizing: border-box; }
body { margin: 0; padding: 24px clamp(12px, 3vw, 40px) 60px; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 17px; margin: 34px 0 10px; }
p { margin: 0 0 12px; color: var(--muted); } .note { font-size: 12.5px; margin: 0 0 4px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 14px 0 18px; background: var(--panel); border: 1px solid var(--grid); border-radius: 8px; }
th, td { padding: 6px 14px; text-align: right; white-space: nowrap; } th { color: var(--muted); font-weight: 500; }
th:first-child, td:first-child { text-align: left; } tr + tr { border-top: 1px solid var(--grid); }
label { cursor: pointer; } input { accent-color: var(--ink); margin: 0 8px 0 0; vertical-align: -2px; }
.key { display: inline-block; width: 16px; height: 3px; border-radius: 2px; margin-right: 8px; vertical-align: 4px;
  background: currentColor; }
.grid-of { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px 8px; background: var(--panel); border: 1px solid var(--grid); border-radius: 8px; }
figcaption { font-weight: 600; } svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
.tick { font-size: 12px; fill: var(--muted); font-variant-numeric: tabular-nums; }
.label { font-size: 12px; fill: currentColor; }
.grid { stroke: var(--grid); } .axis, .tickmark { stroke: var(--line); } .cursor { stroke: var(--muted); stroke-dasharray: 3 3; }
polyline { fill: none; stroke: currentColor; stroke-width: 1.8; stroke-linejoin: round; } circle { fill: currentColor; }
.faint { stroke-width: 1; opacity: .28; } .dashed { stroke-dasharray: 6 4; } .dots { stroke-width: 1.2; }
.band { fill: currentColor; opacity: .2; } .heat { image-rendering: pixelated; }
.c0 { color: var(--c0); } .c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); } .c7 { color: var(--c7); }
.scale { white-space: nowrap; } .scale i { font-style: normal; }
.scale b { display: inline-block; width: 90px; height: 9px; margin: 0 6px; border-radius: 2px; border: 1px solid var(--line);
  background: linear-gradient(90deg, rgb(38 110 214), rgb(38 110 214 / 0) 50%, rgb(226 96 12 / 0) 50%, rgb(226 96 12)); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel); border: 1px solid var(--grid);
  border-radius: 8px; padding: 10px 14px; font-size: 13px; } pre b { color: var(--muted); font-weight: 500; }
#read { position: fixed; display: none; pointer-events: none; background: var(--panel); color: var(--ink); z-index: 2;
  border: 1px solid var(--line); border-radius: 6px; padding: 6px 10px; font-size: 12.5px; max-width: 320px;
  box-shadow: 0 3px 12px rgb(0 0 0 / .18); font-variant-numeric: tabular-nums; }
.off { display: none; }
"""

SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("data").textContent), read = document.getElementById("read");
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}
function row(name, value, colour) {
  const line = document.createElement("div"), key = document.createElement("span");
  if (colour !== null) { key.className = "key c" + colour % 8; line.append(key); }
  line.append(name + (value === null ? "" : "  " + Number(value.toPrecision(5))));
  return line;
}
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = charts[svg.dataset.chart], cursor = svg.querySelector(".cursor");
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * chart.width;
    const share = (at - chart.left) / (chart.right - chart.left), lines = [];
    if (share < 0 || share > 1) return hide(cursor);
    const x = chart.x0 + share * (chart.x1 - chart.x0);
    let shown = x, distance = Infinity;
    for (const s of chart.series) {
      const input = document.querySelector('input[data-show="' + s.run + '"]');
      if (input && !input.checked) continue;
      const i = nearest(s.x, x), away = Math.abs(s.x[i] - x);
      if (away < distance) { distance = away; shown = s.x[i]; }
      lines.push(row(s.name, s.y[i], s.run));
    }
    const where = chart.left + (shown - chart.x0) / (chart.x1 - chart.x0) * (chart.right - chart.left);
    cursor.setAttribute("x1", where); cursor.setAttribute("x2", where);
    read.replaceChildren(row(chart.xName + " " + Number(shown.toPrecision(6)), null, null), ...lines);
    read.style.display = "block";
    read.style.left = Math.min(event.clientX + 16, innerWidth - read.offsetWidth - 8) + "px";
    read.style.top = Math.min(event.clientY + 16, innerHeight - read.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => hide(cursor));
}
function hide(cursor) { read.style.display = "none"; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); }
for (const input of document.querySelectorAll("input[data-show]"))
  input.addEventListener("change", () => {
    for (const part of document.querySelectorAll('[data-run="' + input.dataset.show + '"]'))
      part.classList.toggle("off", !input.checked);
  });
document.documentElement.dataset.ready = charts.length;
"""


def table_html(head, rows):
    """rows: lists of texts; the first is the run's name and gets its colour and a switch."""
    out = ["<tr>%s</tr>" % "".join("<th>%s</th>" % html.escape(h) for h in head)]
    for i, row in enumerate(rows):
        switch = '<input type="checkbox" checked data-show="%d">' % i if len(rows) > 1 else ""
        name = '<label>%s<span class="c%d"><span class="key"></span></span>%s</label>' % (switch, i % 8, html.escape(row[0]))
        out.append("<tr><td>%s</td>%s</tr>" % (name, "".join("<td>%s</td>" % html.escape(v) for v in row[1:])))
    return '<div class="wide"><table>%s</table></div>' % "".join(out)


def page_html(title, subtitle, table, charts, extra):
    """charts: Chart objects; extra: finished HTML of what follows them."""
    data = []
    figures = "".join(chart_html(chart, data) for chart in charts)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" '
            'content="width=device-width, initial-scale=1"/><link rel="icon" href="data:,"/><title>%s</title>'
            '<style>%s</style></head><body>%s<h1>%s</h1><p>%s</p>%s<div class="grid-of">%s</div>%s<div id="read"></div>'
            '<script type="application/json" id="data">%s</script><script>%s</script></body></html>\n' %
            (html.escape(title), STYLE, CLIP, html.escape(title), html.escape(subtitle), table, figures, extra, text, SCRIPT))
