#!/usr/bin/env bash
# The page of scripts/plot_log.py in a browser (make test-page): headless Chromium opens it in light and in dark, the console
# stays empty, the pointer gets its read-out, a run can be switched off; screenshots go to build/page/. Not part of make test,
# since few machines have a browser. RUNS="runs/a runs/b" shows those instead of two short ones made here.
set -u
cd "$(dirname "$0")/.."
for name in "${CHROMIUM:-}" chromium chromium-browser google-chrome google-chrome-stable; do
    [ -n "$name" ] && BROWSER=$(command -v "$name") && break
done
if [ -z "${BROWSER:-}" ]; then
    echo "skipped: no Chromium here (apt-get install chromium, or CHROMIUM=PROGRAM)"
    exit 0
fi
export BROWSER
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
from trial import *

PAGE = os.path.abspath("build/page")
os.makedirs(PAGE, exist_ok=True)
runs = os.environ.get("RUNS", "").split()
if not runs:
    data = prepare("shards", "model/model.c", "model/mla.c", "model/moe.c")
    for name, rate in (("first", 3e-3), ("second", 1e-3)):
        train(config(name, data=data, eval={"every_steps": 20}, model={"num_nextn_predict_layers": 1},
                     train={"steps": 200, "seq_len": 64, "lr": rate, "global_batch_size": 4, "micro_batch_size": 2},
                     sample={"every_steps": 200, "prompts": ["static"], "tokens": 60}))
    runs = [path("first"), path("second")]
html = os.path.join(PAGE, "plot.html")
r = subprocess.run([sys.executable, "scripts/plot_log.py", *runs, "--no-png", "--out", html], capture_output=True, text=True)
check("plot_log.py", r.returncode == 0, said(r))

# What a user does, in a copy of the page: points at the middle of each chart, switches the first run off.
ACT = """<script>
const results = document.documentElement.dataset;
let read_outs = 0;
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  svg.scrollIntoView();
  const box = svg.getBoundingClientRect(), at = {clientX: box.left + 0.6 * box.width, clientY: box.top + 0.5 * box.height};
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const shown = document.getElementById("read");
  if (getComputedStyle(shown).display === "block" && shown.children.length > 1 && /\\d/.test(shown.lastChild.textContent))
    read_outs++;
  svg.dispatchEvent(new PointerEvent("pointerleave"));
}
results.readOuts = read_outs;
const input = document.querySelector("input[data-show]");
if (input) input.click();
results.hidden = [...document.querySelectorAll('[data-run="0"]')].every(part => getComputedStyle(part).display === "none");
results.wide = document.documentElement.scrollWidth > innerWidth;
</script>"""


def browse(file, *arguments):
    """Standard output, and the lines of the console."""
    r = subprocess.run([os.environ["BROWSER"], "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        "--user-data-dir=" + path("profile"), "--enable-logging=stderr", *arguments, "file://" + file],
                       capture_output=True, text=True, errors="replace", timeout=120)
    return r.stdout, [line for line in r.stderr.splitlines() if "CONSOLE" in line]


for name, width, arguments in (("light", 1400, []), ("dark", 1400, ["--blink-settings=preferredColorScheme=0"]),
                               ("narrow", 500, [])):
    shot = os.path.join(PAGE, name + ".png")
    if os.path.exists(shot):
        os.remove(shot)
    _, console = browse(html, "--window-size=%d,2900" % width, "--screenshot=" + shot, *arguments)
    check("%s: %s, nothing on the console" % (name, os.path.relpath(shot)), os.path.exists(shot) and
          os.path.getsize(shot) > 20000 and not console, console)
with open(html, encoding="utf-8") as f:
    text = f.read()
with open(path("act.html"), "w", encoding="utf-8") as f:
    f.write(text.replace("</body>", ACT + "</body>"))
for width in (1400, 500):
    dom, console = browse(path("act.html"), "--window-size=%d,900" % width, "--dump-dom")
    found = dict(re.findall(r'data-([a-z-]+)="([^"]*)"', (re.search(r"<html[^>]*>", dom) or [""])[0]))
    check("%d wide: the script ran to its end without an error" % width, int(found.get("ready", 0)) >= 6 and not console,
          (found, console))
    check("%d wide: every chart reads out under the pointer" % width, found.get("read-outs") == found.get("ready"), found)
    check("%d wide: a run is switched off" % width, len(runs) == 1 or found.get("hidden") == "true", found)
    check("%d wide: fits the window" % width, found.get("wide") == "false", found)
with open(path("broken.html"), "w", encoding="utf-8") as f:
    f.write(text.replace("</body>", "<script>nothing.at.all();</script></body>"))
check("an error would be seen", len(browse(path("broken.html"), "--dump-dom")[1]) == 1)
finish()
PYTHON
