"""The report of a run, in a real browser: what it draws, that it is true, and that everybody can read it."""

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import launching
import pytest
import report
import report_charts
import report_data
import report_scores
import smoke

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars")
FLAGS += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER),
    reason="no chromium and chromedriver here: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def run(benches):
    """A run of the invoice recipe that was killed, resumed, and scored by the recipe's score.py."""
    bench = benches("qwen3-8b-invoice")
    folder, log = bench.work / "reported", bench.work / "reported.log"

    def stop():
        return any("loss" in line and line["step"] >= 4 for line in launching.metrics(folder))

    for _ in range(3):  # on a busy machine the run may be done before the signal arrives
        shutil.rmtree(folder, ignore_errors=True)
        bench.launch("single", folder, 1, log, stop_when=stop)
        if launching.metrics(folder)[-1]["step"] < smoke.STEPS:
            break
    else:
        pytest.fail("not stopped in time")
    assert bench.launch("single", folder, 1, log).rc == 0, log.read_text()[-2000:]
    words = [folder, "--max_new_tokens", "16", "--worst", "3"]
    done = subprocess.run(
        [sys.executable, RECIPE / "score.py", *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def copy_of(run: Path, folder: Path, **record) -> Path:
    """What a report reads of a run, elsewhere, with keys of run.json replaced."""
    folder.mkdir()
    for name in ("run.json", "metrics.jsonl", "eval_rows.json", "scores.json"):
        shutil.copy(run / name, folder)
    told = json.loads((run / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | record))
    return folder


def make(*words) -> tuple[int, str]:
    """report.py with these words: (exit code, the page)."""
    output = Path(words[words.index("--output") + 1] if "--output" in words else Path(words[0], "report.html"))
    code = report.main([str(word) for word in words])
    return code, output.read_text(encoding="utf-8") if output.is_file() else ""


@pytest.fixture(scope="module")
def other(run, tmp_path_factory):
    """A second run to compare with: the first one's losses doubled, another learning rate, and one of its scores changed."""
    folder = copy_of(run, tmp_path_factory.mktemp("other") / "slower")
    told = json.loads((folder / "run.json").read_text())
    told["arguments"]["learning_rate"] = 0.5
    (folder / "run.json").write_text(json.dumps(told))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"loss": 2 * line["loss"]} if "loss" in line else line for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# ---- in the browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
        driver.set_script_timeout(120)  # axe on a busy machine
        yield driver
        driver.quit()


def visit(browser, page: Path, width: int = 1200, scheme: str = "light", media: str = "") -> None:
    """Open the page, freshly, on a screen of that width and mode."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(page.as_uri())


@pytest.fixture(scope="module", params=["one run", "two runs"])
def page(request, run, other, tmp_path_factory):
    """The page of one run, and that of two, by the command line."""
    runs = [run, other] if request.param == "two runs" else [run]
    file = tmp_path_factory.mktemp("page") / "report.html"
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), *map(str, runs), "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=file.parent)
    assert done.returncode == 0, done.stderr
    assert str(file) in done.stdout and "\x1b" not in done.stdout  # plain where nobody looks
    return file, runs


GEOMETRY = """
return [...document.querySelectorAll("figure.chart")].map(figure => {
  const svg = [...figure.querySelectorAll("svg")].find(svg => svg.getBoundingClientRect().width > 0);
  const box = svg.viewBox.baseVal, inside = element => {
    const drawn = element.getBBox();
    return drawn.x >= -1 && drawn.y >= -1 && drawn.x + drawn.width <= box.width + 1 && drawn.y + drawn.height <= box.height + 1;
  };
  const curves = [...svg.querySelectorAll(".curve")];
  return {
    title: svg.querySelector("title").textContent, text: svg.querySelector("desc").textContent,
    curves: curves.map(c => c.tagName == "circle" ? 1 : c.getAttribute("d").split("L").length),
    inside: [...curves, ...svg.querySelectorAll(".tick, .dot, .mark")].every(inside),
    painted: curves.every(c => c.tagName == "circle" || getComputedStyle(c).stroke.startsWith("rgb")),
    marks: svg.querySelectorAll(".mark").length, ticks: svg.querySelectorAll(".tick").length,
  };
});
"""


@needs_browser
@pytest.mark.parametrize("width", [1200, 360])
def test_every_chart_is_drawn_inside_its_box_with_all_points(browser, page, width):
    file, runs = page
    visit(browser, file, width)
    drawn = {chart["title"]: chart for chart in browser.execute_script(GEOMETRY)}
    lines = [line for line in launching.metrics(runs[0]) if "loss" in line]
    assert {"Training loss", "Evaluation loss", "Learning rate", "Gradient norm", "Tokens per second"} <= drawn.keys()
    assert "Peak GPU memory" not in drawn  # no GPU: said in words
    for chart in drawn.values():
        assert chart["inside"] and chart["painted"] and chart["ticks"] >= 4, chart
        assert chart["marks"] == len(runs)  # each was resumed once
    for title in ("Training loss", "Learning rate", "Gradient norm"):
        assert max(drawn[title]["curves"]) == len({line["step"] for line in lines}) == smoke.STEPS
    assert drawn["Evaluation loss"]["curves"] == [3] * len(runs)
    assert f"last {report_charts.number(lines[-1]['loss'])} at step {smoke.STEPS}" in drawn["Training loss"]["text"]


@needs_browser
def test_nothing_is_loaded_nothing_fails_and_links_lead_somewhere(browser, page):
    file, _ = page
    visit(browser, file)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert not re.search(r"(?:src|href)=.(?:https?:|//)|@import|url\(", file.read_text(encoding="utf-8"))
    lost = "return [...document.querySelectorAll('a')].filter(a => !document.getElementById(a.hash.slice(1))).length"
    assert browser.execute_script(lost) == 0
    assert browser.execute_script("return document.querySelectorAll('nav a').length") >= 4
    doubles = "const ids = [...document.querySelectorAll('[id]')].map(e => e.id); return ids.length - new Set(ids).size"
    assert browser.execute_script(doubles) == 0
    assert file.stat().st_size < 3_000_000


@needs_browser
def test_a_phone_needs_no_sideways_scrolling_and_print_is_light(browser, page):
    file, _ = page
    widest = "return document.documentElement.scrollWidth"
    visit(browser, file, 360)
    assert browser.execute_script(widest) == 360
    back = "return getComputedStyle(document.body).backgroundColor"
    colours = []
    for scheme, media in (("light", ""), ("dark", ""), ("dark", "print")):
        visit(browser, file, scheme=scheme, media=media)
        colours.append(sum(map(int, re.findall(r"\d+", browser.execute_script(back))[:3])))
    light, dark, printed = colours
    assert dark < 150 and light > 700 and printed > 700


@needs_browser
@pytest.mark.parametrize(
    ("page", "scheme"), [("one run", "light"), ("one run", "dark"), ("two runs", "light")], indirect=["page"]
)
def test_axe_finds_no_barrier(browser, page, scheme):
    import axe_core_python

    visit(browser, page[0], scheme=scheme)
    browser.execute_script("document.querySelector('details').open = true")
    browser.execute_script(Path(axe_core_python.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    rules = {} if scheme == "light" else {"runOnly": ["color-contrast"]}  # nothing else depends on the mode
    found = browser.execute_async_script("axe.run(arguments[0]).then(arguments[1])", rules)
    told = [
        f"{rule['id']}: {node['target']} {node['failureSummary'][:300]}"
        for rule in found["violations"]
        for node in rule["nodes"][:3]
    ]
    assert told == []
    looked_at = {rule["id"] for rule in found["passes"]}
    assert {"color-contrast", *([] if rules else ["svg-img-alt", "html-has-lang", "empty-table-header"])} <= looked_at


@needs_browser
def test_the_keyboard_reads_a_chart(browser, page):
    from selenium.webdriver.common.keys import Keys

    file, runs = page
    visit(browser, file)
    chart = browser.find_element("id", "training-loss")
    chart.send_keys(Keys.END)
    told = chart.find_element("tag name", "output").text
    assert told.startswith(f"step {smoke.STEPS}: ")
    losses = [report_charts.number(launching.losses(folder)[-1]) for folder in runs]
    assert re.findall(r"[\d.e-]+(?=,|$)", told) == losses
    chart.send_keys(Keys.ARROW_LEFT)
    assert chart.find_element("tag name", "output").text.startswith(f"step {smoke.STEPS - 1}: ")
    chart.send_keys(Keys.ESCAPE)
    assert chart.find_element("tag name", "output").text == ""


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_the_summary_is_what_the_run_left(run):
    told = {label: (value, remark) for label, value, remark in report.facts(report_data.read_run(run))}
    losses, lines = launching.losses(run), launching.metrics(run)
    record, scores = (json.loads((run / name).read_text()) for name in ("run.json", "scores.json"))
    tuned = scores["held-out rows"]["tuned"]
    assert told["Outcome"] == ("done", f"step {smoke.STEPS} of {smoke.STEPS}")
    assert told["Training loss"] == (f"{losses[0]:.3f} → {sum(losses[-3:]) / 3:.3f}", "first, mean of the last 3")
    assert told["Score"][0] == f"{scores['held-out rows']['base']['micro_f1']:.3f} → {tuned['micro_f1']:.3f}"
    assert f"{tuned['documents']} held-out rows" in told["Score"][1]
    assert told["Time"][1] == "2 starts, 1 resumed"
    first, second = record["started"]
    spans = [max(line["time"] for line in lines if line["time"] < second) - first, lines[-1]["time"] - second]
    assert told["Time"][0] == report.duration(sum(spans))
    counted = [line["num_tokens"] for line in lines if "num_tokens" in line]  # begins anew with each start
    falls = [a for a, b in pairwise(counted) if b < a]
    assert len(falls) == 1 and told["Tokens"][0] == report_charts.number(falls[0] + counted[-1])


def test_the_resume_is_marked_where_the_second_start_went_on(run):
    read = report_data.read_run(run)
    lines = [line for line in launching.metrics(run) if "loss" in line]
    second = [line["step"] for line in lines if line["time"] > read.record["started"][1]]
    assert second[0] > 1, "the run began anew"
    assert [start.first for start in read.starts] == [1, second[0]]
    assert read.starts[1].repeated == len([line for line in lines if line["step"] in second]) - len(second)
    for chart in report.charts([read])[0]:
        assert [(step, what) for step, _, what in chart.marks] == [(second[0], "resumed")]


def test_a_start_that_began_anew_is_no_resume(run, tmp_path):
    folder = copy_of(run, tmp_path / "anew")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = lines[0]["time"]
    told = json.loads((run / "run.json").read_text()) | {
        "started": [first - 60, first - 30, first - 1]
    }  # two died early
    (folder / "run.json").write_text(json.dumps(told))
    read = report_data.read_run(folder)
    assert len(read.starts) == 3 and read.resumes == []
    assert all(chart.marks == [] for chart in report.charts([read])[0])
    assert "Start 1, 2 of 3 ended" in " ".join(read.notes)


def test_data_settings_and_command_are_those_of_the_run(run):
    read = report_data.read_run(run)
    record, held_out = read.record, json.loads((run / "eval_rows.json").read_text())
    rows = dict(report.data_rows(read))
    assert rows["Rows held out"] == str(len(held_out)) == "4"
    assert rows["Trained on"] == "20 documents" and rows["Packing"] == "off"
    assert rows["Rows, training file"].startswith("24 read, 24 kept, 0 malformed")
    assert sum(record["dataset"]["lengths"]["histogram"]) == 20
    assert rows["Tokens of an epoch"].startswith(f"{record['tokens']:,}, of which")
    changed = {key: (old, new) for key, old, new in read.changed_settings}
    config = launching.read_config(RECIPE)
    assert changed["learning_rate"] == (str(config["learning_rate"]), "0.001")
    assert changed["use_cpu"] == (None, "true")  # not in the config file
    assert "seed" not in changed and "packing" not in changed  # not given; given as the file has it
    words = read.command.split()
    line = "accelerate launch --config_file accelerate_configs/single.yaml recipes/qwen3-8b-invoice/train.py"
    assert read.command.startswith(line) and words[words.index("--max_steps") + 1] == str(smoke.STEPS)
    old = report_data.read_run(run)  # a record of before these words were kept
    del old.record["words"]
    assert old.own_words == read.own_words


def test_runs_are_compared(run, other, tmp_path):
    file = tmp_path / "results.md"
    code, page = make(run, other, "--output", tmp_path / "page.html", "--markdown", file, "--png", tmp_path / "plots")
    assert code == 0
    runs = report_data.read_runs([run, other])
    assert report.different_settings(runs) == [("learning_rate", ["0.001", "0.5"])]
    assert page.count("<h2 id=") == 3 and 'class="curve s1"' in page
    table = file.read_text(encoding="utf-8").splitlines()
    assert table[0] == f"|  | {run.name} | slower |"
    losses = launching.losses(run)
    last = sum(losses[-3:]) / 3
    assert f"{losses[0]:.3f} → {last:.3f}" in table[3] and f"{2 * losses[0]:.3f} → {2 * last:.3f}" in table[3]
    assert all(line.count("|") == 4 for line in table[: table.index("")])
    assert "Field F1 of slower, 4 documents of held-out rows:" in table
    titles = {chart.key for chart in report.charts(runs)[0]}
    plots = sorted((tmp_path / "plots").glob("*.png"))
    assert {plot.stem for plot in plots} == titles and len(titles) >= 6
    assert all(plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 5000 for plot in plots)


def test_chats_are_shown_side_by_side(run, tmp_path):
    folder = copy_of(run, tmp_path / "chats")
    common = {"tokens": 40, "rows": 4, "date": "2026-11-30", "device": "cpu"}
    scores = {
        label: common
        | {"loss": loss, "perplexity": math.exp(loss), "answers": [answer | {"id": "sum", "prompt": "1 + 1?"}]}
        for label, loss, answer in (
            ("base", 5.0, {"answer": "<b>one", "limit_hit": True}),
            ("tuned", 1.5, {"answer": "two", "limit_hit": False}),
        )
    }
    (folder / "scores.json").write_text(json.dumps({report_data.LOSS: scores}))
    code, page = make(folder)
    assert code == 0 and page.count("1 + 1?") == 1
    assert "&lt;b&gt;one</pre>" in page and "two</pre>" in page and page.count("cut at the output limit") == 1
    assert dict((row[0], row[1]) for row in report.facts(report_data.read_run(folder)))["Score"] == "148.4 → 4.482"


# ---- runs that went wrong --------------------------------------------------------------------------------------------


def test_a_failed_run_with_damaged_lines_is_reported_and_its_text_is_no_markup(run, tmp_path):
    error = "step 7: the loss is nan <script>alert(1)</script>"
    folder = copy_of(run, tmp_path / "failed", outcome="failed", error=error)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[1:1] = ["{half a li", '{"step": "two"}', "[1, 2]", '{"step": 2, "loss": NaN}']
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 1')
    (folder / "scores.json").write_text('{"held-out rows": {"base": {"fields"')
    (folder / "eval_rows.json").unlink()
    (folder / "starts.jsonl").write_text(
        "".join(
            json.dumps({"time": "2026-11-30T12:00:00+0000"} | more) + "\n"
            for more in ({"checkpoint": 0}, {"exit_code": 75}, {"checkpoint": 3}, {"exit_code": 78})
        )
    )
    code, page = make(folder)
    assert code == 0
    for text in ("failed", "stopped with an error", "&lt;script&gt;alert(1)", "4 damaged line(s) left out: 2, 3, 4, "):
        assert text in page, text
    for text in ("scores.json cannot be read", "There is no eval_rows.json", "exit code"):
        assert text in page, text
    assert "<script>alert" not in page and "NaN" not in page
    read = report_data.read_run(folder)
    assert read.values("loss") == launching.losses(run)
    assert [start.exit_code for start in read.starts] == [75, 78]


def test_a_line_that_is_being_written_is_told_apart_from_damage(run, tmp_path):
    folder = copy_of(run, tmp_path / "live", outcome="running")
    lines = (run / "metrics.jsonl").read_text().splitlines()[:3]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "los')
    code, page = make(folder)
    assert code == 0 and "the last line, 4, was cut off" in page and "damaged" not in page
    assert "running, or its processes were killed" in page


@pytest.mark.parametrize("kept", [["run.json"], ["metrics.jsonl"]])
def test_half_a_run_folder_makes_a_page_that_says_what_is_missing(run, tmp_path, kept):
    folder = copy_of(run, tmp_path / "half")
    for file in folder.iterdir():
        if file.name not in kept:
            file.unlink()
    code, page = make(folder)
    assert code == 0
    if kept == ["run.json"]:
        assert "there are no curves" in page and '<figure class="chart' not in page
    else:
        assert "settings, versions and hardware are not known" in page
        starts = report_data.read_run(folder).starts  # told by the token counter alone
        assert [start.first for start in starts] == [start.first for start in report_data.read_run(run).starts]


def test_no_run_folder_and_one_given_twice_are_refused_in_one_line(run, tmp_path, capsys):
    for words, reason in (([tmp_path], "is no run folder"), ([run, run], "was given twice")):
        assert report.main([str(word) for word in words]) == 1
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


# ---- documents and charts --------------------------------------------------------------------------------------------

RECEIPT = {"company": "MR D.I.Y. SDN BHD", "date": "25/12/2018", "address": None, "total": "9.00"}


def test_the_characters_that_differ_are_marked_and_the_outcomes_are_those_of_the_scores():
    from field_scores import score_replies

    schema_file = RECIPE / "schema_receipt.json"
    answer = {"company": "MR. DIY SDN BHD", "date": "25/12/2013", "address": "JOHOR", "total": None}
    report_scores.field_schemas.cache_clear()
    compared = report_scores.compare(RECEIPT, {"answer": json.dumps(answer)}, "elsewhere/schema_receipt.json")
    rows = {name: (expected, *cells[0]) for name, expected, cells in compared["rows"]}
    assert rows["date"] == ('25/12/201<mark class="lost">8</mark>', '25/12/201<mark class="extra">3</mark>', "wrong")
    assert rows["company"][2] == "right, written otherwise"
    assert rows["address"] == ("", '<mark class="extra">JOHOR</mark>', "invented")
    assert rows["total"] == ('<mark class="lost">9.00</mark>', "", "missed")
    scored = score_replies([RECEIPT], [json.dumps(answer)], json.loads(schema_file.read_text()))["fields"]
    for name, (_, _, state) in rows.items():
        outcome = "normalised" if state.startswith("right") else state
        assert scored[name][outcome] == 1, name


def test_an_answer_without_json_is_shown_as_it_came_and_is_no_markup():
    compared = report_scores.compare(RECEIPT, {"base": "<b>I cannot", "tuned": json.dumps(RECEIPT)}, None)
    assert compared["labels"] == ["tuned"] and compared["raw"] == {"base": "<b>I cannot"}
    evil = RECEIPT | {"company": "<img src=x onerror=alert(1)>"}
    (row,) = [
        row for row in report_scores.compare(evil, {"tuned": json.dumps(evil)}, None)["rows"] if row[0] == "company"
    ]
    assert row[1] == row[2][0][0] == "&lt;img src=x onerror=alert(1)&gt;"


def test_a_long_run_stays_small_and_keeps_its_spike(tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    lines = [
        {
            "step": step,
            "time": 1.0 * step,
            "loss": 2 + math.sin(step / 50) + (40 if step == 11_234 else 0),
            "grad_norm": 1.0,
        }
        for step in range(1, 20_001)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, page = make(folder)
    assert code == 0 and len(page) < 400_000
    points = report_data.read_run(folder).curve("loss")
    assert max(report_charts.thinned(points), key=lambda point: point[1])[0] == 11_234
    chart = report_charts.Chart("Loss", "", [report_charts.Line("long", 0, points)])
    steep = [(step, 5 / step) for step in range(1, 200)]
    high = report_charts.Chart("Loss", "", [report_charts.Line("steep", 0, steep, report_charts.smoothed(steep))])
    assert report_charts.limits(high)[3] > 5  # the start of a curve is no spike
    assert report_charts.limits(chart)[3] < 10  # one value does not press the curve flat
    assert "highest 4" in chart.summary and "at step 11234" in chart.summary  # nor is it hidden


def test_smoothing_follows_without_lag():
    ramp = [(step, float(step)) for step in range(1, 201)]
    smooth = report_charts.smoothed(ramp)
    assert [step for step, _ in smooth] == [step for step, _ in ramp]
    assert all(abs(value - step) < 1e-9 for step, value in smooth[20:-20])
    noisy = report_charts.smoothed([(step, (-1.0) ** step) for step in range(200)])
    assert max(abs(value) for _, value in noisy) < 0.3


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0, "0"),
        (3e-4, "0.0003"),
        (2e-5, "2e-05"),
        (0.03125, "0.0312"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        (56_789, "56.8k"),
    ],
)
def test_numbers_are_short(value, told):
    assert report_charts.number(value) == told


def test_ticks_are_round_and_inside():
    for low, high in ((0, 1), (1, 9), (5673, 6405), (0.0, 3e-4), (1, 60_000)):
        found = report_charts.ticks(low, high, 5)
        assert 3 <= len(found) <= 7 and low <= found[0] and found[-1] <= high * (1 + 1e-9)
